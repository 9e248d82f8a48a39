"""ffn whose gate has a bias: b1 (2F,), on the CPU's backends; ffn_semantics.py has the GPUs'."""

import itertools

import pytest
import torch
from torch.autograd import gradcheck

import tfm_kernels as tfk
from tests.threads import on_threads
from tfm_kernels.testing import assert_contract
from tfm_kernels.testing.derivative import assert_opcheck

BACKENDS = ["reference", "aten", "cpu"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SEED = torch.tensor(20261129)


def block(rows, width, hidden, out, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rows * 1000 + width)
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype)
    given = {"x": draw(rows, width), "w1": draw(hidden, width) * width**-0.5, "b1": draw(2 * hidden)}
    given |= {"w2": draw(out, hidden) * hidden**-0.5, "b2": draw(out), "gate": draw(hidden, width) * width**-0.5}
    return given | {"activation": "silu"}


# one row, few rows with tails, tiles, several strips of rows and chunks of features
SIZES = [(1, 16, 9, 4), (7, 66, 1030, 48), (31, 33, 66, 31), (129, 48, 63, 65), (1100, 24, 140, 24)]


@pytest.mark.parametrize(
    ("size", "dtype", "more"),
    list(itertools.product(SIZES, DTYPES, [{}, {"recompute": True}, {"dropout_p": 0.25, "seed": SEED}])),
    ids=str,
)
def test_contract(size, dtype, more):
    assert_contract("ffn", block(*size, dtype) | more, "cpu")


@pytest.mark.parametrize("backend", ["reference", "aten"])
def test_contract_of_the_others(backend):
    assert_contract("ffn", block(33, 24, 40, 24) | {"dropout_p": 0.5, "seed": SEED}, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_layer_that_computes_both_products(backend):
    """What it is for: weights and bias as DINOv2's weights_in has them."""
    given = block(6, 12, 20, 8, torch.float64)
    both = torch.cat((given["w1"], given["gate"]))
    a, b = torch.nn.functional.linear(given["x"], both, given["b1"]).chunk(2, -1)
    expected = torch.nn.functional.linear(torch.nn.functional.silu(a) * b, given["w2"], given["b2"])
    torch.testing.assert_close(tfk.ops.ffn(**given, backend=backend), expected)


@pytest.mark.parametrize("rows", [3, 40])
def test_gradients(rows):
    given = {k: t.requires_grad_() if k != "activation" else t for k, t in block(rows, 3, 4, 2, torch.float64).items()}
    names = [name for name in given if name != "activation"]
    for recompute in (False, True):
        options = {"activation": "silu", "recompute": recompute, "backend": "cpu"}
        run = lambda *leaves: tfk.ops.ffn(**dict(zip(names, leaves, strict=True)), **options)
        assert gradcheck(run, [given[name] for name in names])


@pytest.mark.parametrize("rows", [5, 40])
@pytest.mark.parametrize("names", [["b1"], ["x"], ["gate"], ["w1", "b1"], ["b2", "w2"]], ids=str)
def test_any_subset_of_gradients(names, rows):
    given = block(rows, 20, 70, 18)
    tensors = [t.requires_grad_() for t in given.values() if isinstance(t, torch.Tensor)]
    y = tfk.ops.ffn(**given, backend="cpu")
    every = dict(zip((n for n in given if n != "activation"), torch.autograd.grad(y.sum(), tensors), strict=True))
    given = {n: t.detach().requires_grad_(n in names) if n != "activation" else t for n, t in given.items()}
    some = torch.autograd.grad(tfk.ops.ffn(**given, backend="cpu").sum(), [given[name] for name in names])
    for name, gradient in zip(names, some, strict=True):
        assert torch.equal(gradient, every[name]), name


@pytest.mark.parametrize("rows", [0, 9])
def test_opcheck(rows):
    given = block(rows, 20, 33, 12)
    given.pop("activation")
    assert len(assert_opcheck("ffn", given, "cpu")) == 2
    y = tfk.ops.ffn(**{name: t.requires_grad_() for name, t in given.items()}, backend="cpu")
    assert torch.autograd.grad(y.sum(), given["b1"])[0].shape == (66,)


def test_does_not_depend_on_threads():
    found = []
    for threads in (1, 3):
        with on_threads(threads):
            given = block(300, 20, 270, 12)
            given["b1"].requires_grad_()
            y = tfk.ops.ffn(**given, backend="cpu")
            found.append((y.detach(), torch.autograd.grad(y.sum(), given["b1"])[0]))
    assert all(map(torch.equal, *found))


def test_traced_whole():
    given = block(9, 20, 33, 12, torch.float64)
    run = lambda x, b1: tfk.ops.ffn(**given | {"x": x, "b1": b1})
    step = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (9, 4):
        torch.testing.assert_close(step(given["x"][:rows], given["b1"]), run(given["x"][:rows], given["b1"]))
