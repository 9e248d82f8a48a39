"""What ffn's GPU kernels have to do wherever they run: imported by the tests of each backend, which say which.

A module that imports these tests has a fixture ``backend``; those that refuse calls also ``refusal``.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tfm_kernels as tfk
from tests.cases import CASES
from tests.fences import fenced
from tfm_kernels import dropout
from tfm_kernels.ops.ffn import BWD, FWD
from tfm_kernels.testing import assert_contract, exact, invariance
from tfm_kernels.testing.derivative import assert_opcheck

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SEED = torch.tensor(2**40 + 20261121)
FFN = [case for case in CASES if case.op == "ffn" and case.levels["dtype"] != "f64"]
FAR = 2**31 + 4096  # elements between two rows, sixteen times
PROBABILITIES = (2.0**-33, 0.1, 0.9999, 1.0)
# (rows, width, hidden, out) with nothing somewhere
NOTHING = ((0, 4, 5, 6), (4, 0, 5, 6), (4, 3, 0, 6), (4, 3, 5, 0), (0, 0, 0, 0))


def every_level(cases):
    """Whether these hold every level of what the kernels tell apart."""
    for factor in ("dtype", "activation", "gate", "b1", "b2", "dropout_p", "layout", "data", "recompute"):
        assert {case.levels[factor] for case in cases} == {case.levels[factor] for case in FFN}, factor


def randn(*shape, dtype=torch.float32, seed=0, scale=1.0):
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def block(rows, width, hidden, out, dtype=torch.float32, gated=False):
    """A call with everything; with a gate, one that has a bias."""
    spread = 1.5 / width**0.5
    given = {
        "x": randn(rows, width, dtype=dtype), "w1": randn(hidden, width, dtype=dtype, seed=1, scale=spread),
        "b1": randn(hidden * (1 + gated), dtype=dtype, seed=2),
        "w2": randn(out, hidden, dtype=dtype, seed=3, scale=hidden**-0.5), "b2": randn(out, dtype=dtype, seed=4),
        "dropout_p": 0.2, "seed": SEED, "activation": "gelu",
    }  # fmt: skip
    return given | ({"gate": randn(hidden, width, dtype=dtype, seed=5, scale=spread)} if gated else {})


def test_small_integers_are_exact(backend):
    """Tolerance 0."""
    for dtype in DTYPES:
        exact.assert_exact("ffn", exact.integers("ffn", dtype, "cpu", 3), backend, backward=True)


@pytest.mark.parametrize("hidden", [7, 64, 130])
@pytest.mark.parametrize("p", PROBABILITIES)
def test_dropout_masks_are_those_of_the_other_backends(backend, hidden, p):
    """Everything is 1 up to the hidden activation, and what is behind it is the identity."""
    rows = torch.cat([torch.arange(69), torch.tensor([2**33 + 7])])
    keep = dropout.keep_mask(SEED, p, rows, hidden)
    eye = torch.eye(hidden)

    def masks(backend):
        x = torch.ones(70, hidden, requires_grad=True)
        options = {"dropout_p": p, "seed": SEED, "dropout_rows": rows, "backend": backend}
        y = tfk.ops.ffn(x, eye, None, eye, None, **options)
        (dx,) = torch.autograd.grad(y.sum(), x)
        return y != 0, dx != 0

    for name in (backend, "cpu", "reference"):
        assert all(torch.equal(mask, keep) for mask in masks(name)), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views_give_the_bits_of_contiguous_tensors(backend, dtype):
    """Views give the bits of contiguous tensors."""
    invariance.assert_view_equals_contiguous("ffn", block(9, 40, 24, 16, dtype, gated=True), backend)


@pytest.mark.parametrize("sizes", NOTHING)
@pytest.mark.parametrize("recompute", [False, True])
def test_nothing_of_something(backend, sizes, recompute):
    """Sums over nothing are 0, and so are their gradients: as the reference has it."""
    rows, width, hidden, out = sizes
    shapes = {"x": (rows, width), "w1": (hidden, width), "b1": (hidden,), "w2": (out, hidden), "b2": (out,)}

    def run(backend):
        leaves = {name: randn(*s, seed=i).requires_grad_() for i, (name, s) in enumerate(shapes.items())}
        y = tfk.ops.ffn(**leaves, activation="gelu", recompute=recompute, backend=backend)
        return y, *torch.autograd.grad(y.sum(), list(leaves.values()))

    for found, expected in zip(run(backend), run("reference"), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("gated", [False, True])
def test_any_subset_of_gradients(backend, gated):
    """What is not asked for changes nothing."""
    given = block(33, 20, 70, 18, gated=gated)
    leaves = [name for name, t in given.items() if isinstance(t, torch.Tensor) and t.is_floating_point()]

    def run(names):
        inputs = {name: t.clone().requires_grad_() if name in names else t for name, t in given.items()}
        y = tfk.ops.ffn(**inputs, backend=backend)
        return dict(zip(names, torch.autograd.grad(y, [inputs[name] for name in names], randn(33, 18)), strict=True))

    everything = run(leaves)
    for name in leaves:
        assert torch.equal(run([name])[name], everything[name]), name


@pytest.mark.parametrize("gated", [False, True])
def test_opcheck(backend, gated):
    """torch.library.opcheck of both operators."""
    checked = assert_opcheck("ffn", block(9, 20, 33, 12, gated=gated), backend)
    assert checked == [f"tfm_kernels::ffn_fwd_{backend}", f"tfm_kernels::ffn_bwd_{backend}"]


def test_traced_for_a_gpu_that_is_not_there(backend):
    """Without gradients: torch's autograd ends the process where a CPU build meets a CUDA device."""

    def step(x, w1, w2, gate):
        seed = torch.full((), 3, device=x.device)
        options = {"activation": "silu", "gate": gate, "dropout_p": 0.1, "seed": seed, "backend": backend}
        return tfk.ops.ffn(x, w1, None, w2, None, **options) * 2

    with FakeTensorMode():
        shapes = (2, 3, 16), (24, 16), (8, 24), (24, 16)
        x, w1, w2, gate = (torch.empty(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
        y = torch.compile(step, fullgraph=True, backend="eager")(x, w1, w2, gate)
        assert y.device.type == "cuda" and y.shape == (2, 3, 8) and y.dtype == torch.bfloat16
        rows, dy, preact = x.view(6, 16), y.view(6, 8), x.new_empty(6, 48)
        found = BWD[backend](dy, rows, w1, None, w2, gate, preact, 3, 0.0, None, None, *(True,) * 5, False)
        assert [t.shape for t in found] == [(6, 16), (24, 16), (24,), (8, 24), (8,), (0,)]
        assert {t.device.type for t in found} == {"cuda"}


def assert_no_byte_outside(backend, sizes, save, dtype):
    """Every argument ends at a protected page; the contract judges what is read of it."""
    given = block(*sizes, dtype, gated=True) | {"dropout_rows": torch.arange(sizes[0]) * 3, "recompute": not save}
    given = {name: fenced(t) if isinstance(t, torch.Tensor) else t for name, t in given.items()}
    assert_contract("ffn", given, backend, douts={"y": fenced(randn(sizes[0], sizes[3], dtype=dtype, seed=9))})


def apart(space, t):
    """``t``, 17 rows: the last lies FAR elements behind the first, and in the second step of a sum over rows."""
    return space.as_strided((17, t.shape[1]), (FAR // 16, 1)).copy_(t)


def assert_far_rows_arrive(backend, name, space):
    """Forward, and backward with and without preact: each argument is read by rows and by columns."""
    shapes = {"x": (17, 24), "w1": (17, 24), "w2": (17, 17), "gate": (17, 24), "dy": (17, 17)}
    given = {name: randn(*s, seed=i) for i, (name, s) in enumerate(shapes.items())}
    _, preact = FWD["cpu"](given["x"], given["w1"], None, given["w2"], None, given["gate"], 1, 0.0, None, None, True)

    def run(x, w1, w2, gate, dy):
        results = [FWD[backend](x, w1, None, w2, None, gate, 1, 0.0, None, None, True)[0]]
        for residual in (preact, preact.new_empty(0)):
            needs = (True, True, False, True, True, True)
            results += BWD[backend](dy, x, w1, None, w2, gate, residual, 1, 0.0, None, None, *needs)
        return results

    for a, b in zip(run(**given | {name: apart(space, given[name])}), run(**given), strict=True):
        assert torch.equal(a, b)


X, W1, W2 = randn(3, 4), randn(5, 4), randn(4, 5)


def _forward(x=X, w1=W1, w2=W2, *, b1=None, b2=None, gate=None, activation=0, p=0.0, seed=None, rows=None):
    return lambda backend: FWD[backend](x, w1, b1, w2, b2, gate, activation, p, seed, rows, False)


def _backward(dy=X, preact=None, need_gate=False):
    preact = torch.empty(0) if preact is None else preact
    needs = (*(True,) * 5, need_gate)
    return lambda backend: BWD[backend](dy, X, W1, None, W2, None, preact, 0, 0.0, None, None, *needs)


# what the operators themselves say of a call that would read outside -> that call on a backend
REFUSED = {
    "w1 must have shape": _forward(w1=randn(5, 3)),
    "w2 must have shape": _forward(w2=randn(4, 6)),
    "b1 must have shape": _forward(b1=randn(4)),
    "b2 must have shape": _forward(b2=randn(5)),
    "gate must have shape": _forward(gate=randn(5, 5)),
    "w1 must be one of": _forward(w1=W1.half()),
    "x must be one of": _forward(X.double(), W1.double(), W2.double()),
    "activation must lie in 0..3": _forward(activation=4),
    "seed must be a tensor": _forward(p=0.5),
    "dropout_rows must have shape": _forward(p=0.5, seed=SEED, rows=torch.arange(2)),
    "x must have 2 dimensions": _forward(X[0]),
    "dy must have shape": _backward(dy=randn(3, 5)),
    "preact must have shape": _backward(preact=torch.empty(3, 6)),
    "need_gate must be False without a gate": _backward(need_gate=True),
}


@pytest.mark.parametrize("words", REFUSED)
def test_the_operators_themselves_refuse_what_would_read_outside(backend, words, refusal):
    with pytest.raises(refusal, match=f"ffn_[fb]wd_{backend}: {words.split()[0]} (must|has)"):
        REFUSED[words](backend)
