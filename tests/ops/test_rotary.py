"""rotary: what a call means, on every backend that has it."""

import math

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import tfm_kernels as tfk
from tests.threads import on_threads
from tfm_kernels.testing import ContractError, assert_contract, invariance, judge
from tfm_kernels.testing.float64 import assert_same_in_float64

BACKENDS = ["reference", "aten", "cpu"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
# batch, heads, positions, width, turned: tails of vectors, nothing turned, a part of a head, one position
SIZES = [(1, 1, 1, 2, 2), (2, 3, 5, 64, 64), (2, 2, 7, 70, 34), (1, 4, 1, 128, 128), (3, 1, 9, 17, 6), (2, 2, 3, 8, 0)]
SIZES += [(2, 3, 40, 96, 80), (1, 2, 130, 256, 256)]


def call(size, dtype=torch.float32, angles=None, rows=None, interleaved=False):
    """``rows``: None for one table of factors, else how many."""
    batch, heads, length, width, turned = size
    generator = torch.Generator().manual_seed(1000 * width + length)
    x = torch.randn(batch, length, heads, width, generator=generator).to(dtype).transpose(1, 2)
    angle = 7.0 * torch.randn(*(() if rows is None else (rows,)), length, turned, generator=generator)
    tables = {"cos": angle.cos().to(angles or dtype), "sin": angle.sin().to(angles or dtype)}
    return {"x": x, **tables, **({"interleaved": True} if interleaved else {})}


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_contract(size, dtype, interleaved):
    """Factors that differ within a pair too, as no angle has them: each is read in its own place."""
    kinds = {(dtype, None), (dtype, 1), (dtype, size[0]), (torch.float32, size[0])}
    for angles, rows in sorted(kinds, key=str):
        if not (dtype == torch.float64 and angles == torch.float32):
            assert_contract("rotary", call(size, dtype, angles, rows, interleaved), "cpu")


def test_float64_by_factors_of_float32():
    assert_contract("rotary", call((2, 3, 5, 64, 48), torch.float64, torch.float32), "cpu")


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("backend", ["reference", "aten"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_contract_of_the_others(backend, dtype, interleaved):
    assert_contract("rotary", call((2, 3, 40, 64, 48), dtype, rows=2, interleaved=interleaved), backend)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_it_turns_by_the_angle(backend, interleaved):
    """As complex numbers are multiplied; the distance of two positions is all that a product of two sees."""
    length, width = 6, 8
    angle = torch.outer(torch.arange(length).double(), 100.0 ** -torch.arange(0, 1, 2 / width).double())
    table = angle.repeat_interleave(2, 1) if interleaved else angle.repeat(1, 2)
    x = torch.randn(1, 2, 1, width, dtype=torch.float64).expand(1, 2, length, width)
    y = tfk.ops.rotary(x, table.cos(), table.sin(), interleaved=interleaved, backend=backend)
    split = (lambda t: (t[..., 0::2], t[..., 1::2])) if interleaved else (lambda t: t.chunk(2, -1))
    expected = torch.complex(*split(x)) * torch.polar(torch.ones_like(angle), angle)
    assert_same_in_float64(torch.stack(split(y)), torch.stack((expected.real, expected.imag)))
    products = y[0, 0] @ y[0, 1].T
    assert_same_in_float64(products[1:, 1:], products[:-1, :-1])


def test_the_judge_sees_what_was_turned_otherwise():
    given = call((2, 3, 40, 64, 48), rows=2)
    y = tfk.ops.rotary(**given, backend="reference")
    judge("rotary", given, {"y": y}).raise_broken()
    other = {**given, "sin": -given["sin"]}, {**given, "cos": given["cos"].roll(1, 1)}, {**given, "interleaved": True}
    short = {**given, "cos": given["cos"][..., :46], "sin": given["sin"][..., :46]}
    for wrong in (*other, short):
        with pytest.raises(ContractError):
            judge("rotary", given, {"y": tfk.ops.rotary(**wrong, backend="reference")}).raise_broken()


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients(backend):
    given = call((2, 2, 3, 8, 6), torch.float64, rows=2)
    x = given.pop("x").requires_grad_()
    assert gradcheck(lambda x: tfk.ops.rotary(x, **given, backend=backend), x)
    if backend != "cpu":
        cos, sin = (t.requires_grad_() for t in given.values())
        assert gradcheck(lambda *t: tfk.ops.rotary(*t, backend=backend), (x, cos, sin))
        assert gradgradcheck(lambda *t: tfk.ops.rotary(*t, backend=backend), (x, cos, sin))


@pytest.mark.parametrize("backend", ["cpu"])
def test_gradients_of_the_factors_are_refused_by_name_and_left_to_pytorch_otherwise(backend):
    given = call((2, 3, 5, 64, 48))
    given["sin"].requires_grad_()
    with pytest.raises(tfk.BackendError, match="computes no gradients of cos and sin"):
        tfk.ops.rotary(**given, backend=backend)
    tfk.ops.rotary(**given).sum().backward()
    assert given["sin"].grad is not None
    with torch.no_grad():
        assert "-> cpu" in tfk.explain("rotary", **given)


@pytest.mark.parametrize("backend", ["cpu"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_any_strides(backend, dtype, interleaved):
    """Bit for bit; the result lies as x does where x has no gaps."""
    given = call((2, 3, 5, 64, 48), dtype, rows=2, interleaved=interleaved)
    y = tfk.ops.rotary(**given, backend=backend)
    assert y.shape == given["x"].shape and y.stride() == given["x"].stride()
    for order in ((0, 1, 2, 3), (3, 1, 0, 2)):
        x = given["x"].permute(order).contiguous().permute(*torch.tensor(order).argsort())
        again = tfk.ops.rotary(**(given | {"x": x}), backend=backend)
        assert torch.equal(again, y) and again.stride() == x.stride()
    for name in ("cos", "sin"):  # each may lie in its own way
        apart = torch.cat([given[name], given[name]], -1)[..., : given[name].shape[-1]]
        assert torch.equal(tfk.ops.rotary(**(given | {name: apart}), backend=backend), y)
    invariance.assert_view_equals_contiguous("rotary", given, backend, backward=False)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [(0, 2, 3, 8, 8), (2, 0, 3, 8, 8), (2, 2, 0, 8, 8), (2, 2, 3, 0, 0)], ids=str)
def test_nothing_of_something(backend, size):
    given = call(size)
    x = given.pop("x").requires_grad_()
    y = tfk.ops.rotary(x, **given, backend=backend)
    assert y.shape == size[:4] and torch.autograd.grad(y.sum(), x)[0].shape == size[:4]


def test_does_not_depend_on_threads():
    given, found = call((3, 8, 70, 64, 64)), []
    for threads in (1, 2, 5):
        with on_threads(threads):
            found.append(tfk.ops.rotary(**given, backend="cpu"))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_not_finite_stays_in_its_pair(backend):
    given = call((1, 2, 3, 32, 16))
    clean = tfk.ops.rotary(**given, backend=backend)
    given["x"][0, 1, 2, 3] = math.nan
    given["x"][0, 0, 1, 20] = math.inf  # is not turned
    y = tfk.ops.rotary(**given, backend=backend)
    assert y[0, 1, 2, 3].isnan() and y[0, 1, 2, 11].isnan() and y[0, 0, 1, 20] == math.inf
    changed = torch.zeros_like(y, dtype=torch.bool)
    changed[0, 1, 2, [3, 11]] = changed[0, 0, 1, 20] = True
    assert torch.equal(y[~changed], clean[~changed])


@pytest.mark.parametrize(
    "change, words",
    [
        ({"x": torch.ones(2, 5, 64)}, r"x must have shape \(B, H, T, D\), got \(2, 5, 64\)"),
        ({"cos": torch.ones(4, 48)}, r"cos must have shape \(5, R\) or \(1, 5, R\) or \(2, 5, R\)"),
        ({"cos": torch.ones(3, 5, 48)}, r"cos must have shape .*, got \(3, 5, 48\)"),
        ({"sin": torch.ones(5, 46)}, r"sin must have shape \(5, 48\) to match cos"),
        ({"cos": torch.ones(5, 47), "sin": torch.ones(5, 47)}, "cos must have an even number of columns, at most 64"),
        ({"cos": torch.ones(5, 66), "sin": torch.ones(5, 66)}, "cos must have an even number of columns, at most 64"),
        (
            {"cos": torch.ones(5, 48).half(), "sin": torch.ones(5, 48).half()},
            "cos and sin must both be float32 to go with x, got x float32, cos float16",
        ),
        ({"cos": torch.ones(5, 48).double()}, "cos and sin must both be float32 to go"),
        (
            {"x": torch.ones(2, 3, 5, 64).half(), "cos": torch.ones(5, 48).half()},
            "cos and sin must both be float16 or float32",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_calls(change, words):
    with pytest.raises(ValueError, match=f"^rotary: {words}"):
        tfk.ops.rotary(**(call((2, 3, 5, 64, 48)) | change))


@pytest.mark.parametrize("backend", ["cpu"])
@pytest.mark.parametrize("trained", [False, True])
def test_traced_whole(backend, trained):
    given = call((2, 3, 5, 64, 48))
    x = given.pop("x").requires_grad_(trained)
    turn = lambda x: tfk.ops.rotary(x, **given, backend=backend) * 2
    y, expected = torch.compile(turn, fullgraph=True, backend="aot_eager")(x), turn(x)
    assert torch.equal(y, expected)
    if trained:
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.autograd.grad(expected.sum(), x)[0])
