"""What every compiled backend of ffn has to show beside the numeric contract; each check names its backend."""

import torch

import tfm_kernels as tfk
from tests.cases import CASES
from tfm_kernels import dropout
from tfm_kernels.ops.ffn import BWD, FWD
from tfm_kernels.testing import exact, invariance
from tfm_kernels.testing.derivative import assert_opcheck

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SEED = torch.tensor(2**40 + 20261121)
FFN = [case for case in CASES if case.op == "ffn" and case.levels["dtype"] != "f64"]
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
    """A call with everything."""
    spread = 1.5 / width**0.5
    given = {
        "x": randn(rows, width, dtype=dtype), "w1": randn(hidden, width, dtype=dtype, seed=1, scale=spread),
        "b1": randn(hidden, dtype=dtype, seed=2), "w2": randn(out, hidden, dtype=dtype, seed=3, scale=hidden**-0.5),
        "b2": randn(out, dtype=dtype, seed=4), "dropout_p": 0.2, "seed": SEED, "activation": "gelu",
    }  # fmt: skip
    return given | ({"gate": randn(hidden, width, dtype=dtype, seed=5, scale=spread)} if gated else {})


def small_integers_are_exact(backend):
    """Tolerance 0."""
    for dtype in DTYPES:
        exact.assert_exact("ffn", exact.integers("ffn", dtype, "cpu", 3), backend, backward=True)


def dropout_masks(backend, hidden, p):
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


def views(backend, dtype):
    """Views give the bits of contiguous tensors."""
    invariance.assert_view_equals_contiguous("ffn", block(9, 40, 24, 16, dtype, gated=True), backend)


def nothing_of_something(backend, sizes, recompute):
    """Sums over nothing are 0, and so are their gradients: as the reference has it."""
    rows, width, hidden, out = sizes
    shapes = {"x": (rows, width), "w1": (hidden, width), "b1": (hidden,), "w2": (out, hidden), "b2": (out,)}

    def run(backend):
        leaves = {name: randn(*s, seed=i).requires_grad_() for i, (name, s) in enumerate(shapes.items())}
        y = tfk.ops.ffn(**leaves, activation="gelu", recompute=recompute, backend=backend)
        return y, *torch.autograd.grad(y.sum(), list(leaves.values()))

    for found, expected in zip(run(backend), run("reference"), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def any_subset_of_gradients(backend, gated):
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


def opcheck(backend, gated):
    """torch.library.opcheck of both operators."""
    checked = assert_opcheck("ffn", block(9, 20, 33, 12, gated=gated), backend)
    assert checked == [f"tfm_kernels::ffn_fwd_{backend}", f"tfm_kernels::ffn_bwd_{backend}"]


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
