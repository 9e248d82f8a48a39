"""The norms' CUDA kernels on the CPU: the numeric contract, dropout masks, tracing, refusals."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tfm_kernels as tfk
from tests.cases import CASES, report_case
from tfm_kernels import dropout
from tfm_kernels.ops.layer_norm import BWD, FWD
from tfm_kernels.testing import assert_contract, invariance
from tfm_kernels.testing.derivative import assert_opcheck

OPS = ("layer_norm", "add_layer_norm", "rms_norm", "add_rms_norm")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SEED = torch.tensor(2**40 + 20261121)
NORMS = [case for case in CASES if case.op in OPS and case.levels["dtype"] != "f64"]
FIRST = 150  # all pairs have come several times by then


def marked(index, case):
    return pytest.param(case, id=case.id, marks=pytest.mark.slow if index >= FIRST else ())


@pytest.mark.parametrize("case", [marked(index, case) for index, case in enumerate(NORMS)])
def test_contract(case, simt):
    before = simt.launches()
    report_case(case, "cuda").raise_broken()
    assert simt.launches() - before == (4 if 0 not in case.levels["rows"] else 0)  # both ways, twice


def test_there_are_enough_cases():
    quick = NORMS[:FIRST]
    assert len(quick) >= 80 and len(NORMS) >= 300 and {case.op for case in quick} == set(OPS)


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def calls(width, dtype, rows):
    x, w = randn(rows, width, dtype=dtype), randn(width, dtype=dtype, seed=1)
    residual = randn(rows, width, seed=2)
    yield "rms_norm", {"x": x, "weight": w}
    yield "layer_norm", {"x": x, "bias": w, "unbiased": True}
    yield "add_rms_norm", {"x": x, "residual": residual.to(dtype), "weight": w.float()}
    yield "add_layer_norm", {"x": x, "residual": residual, "weight": w.float(), "dropout_p": 0.3, "seed": SEED}


LAUNCHES = [
    (37, 40), (5, 509), (5, 512), (37, 520), (5, 1023), (7, 1024), (3, 1025), (5, 2056), (3, 8192), (3, 8193),
    (2, 16384), (3, 16392), (2, 16385),
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows, width", LAUNCHES)
def test_every_launch(rows, width, dtype, simt):
    """Either side of where pick() changes, rows that start at whole packs and rows that do not, more than blocks."""
    simt.configure(seed=width, multiprocessors=2, resident=3)
    for op, inputs in calls(width, dtype, rows):
        assert_contract(op, inputs, "cuda")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [32767, 65536])
def test_the_longest_rows(width, dtype):
    for op, inputs in calls(width, dtype, rows=3):
        assert_contract(op, inputs, "cuda")


@pytest.mark.parametrize("x, residual", [(a, b) for a in DTYPES for b in DTYPES if a != b], ids=str)
@pytest.mark.parametrize("width", [200, 203, 1028])
def test_mixed_types(width, x, residual):
    inputs = {"x": randn(5, width, dtype=x), "residual": randn(5, width, dtype=residual, seed=1)}
    assert_contract("add_layer_norm", {**inputs, "weight": randn(width, seed=2)}, "cuda")


@pytest.mark.parametrize("width", [7, 64, 130, 1030])
@pytest.mark.parametrize("p", [2.0**-33, 0.1, 0.5, 0.9999, 1.0])
def test_dropout_masks_are_those_of_the_other_backends(width, p):
    x, zeros = torch.ones(70, width), torch.zeros(70, width)
    rows = torch.cat([torch.arange(69), torch.tensor([2**33 + 7])])
    keep = dropout.keep_mask(SEED, p, rows, width)

    def masks(backend):
        leaves = x.clone().requires_grad_(), zeros.clone().requires_grad_()
        options = {"dropout_p": p, "seed": SEED, "dropout_rows": rows, "backend": backend}
        _, z = tfk.ops.add_layer_norm(*leaves, **options)
        dx, dresidual = torch.autograd.grad(z.sum(), leaves)
        assert torch.equal(dresidual, x)
        return z != 0, dx != 0

    for backend in ("cuda", "cpu", "reference"):
        assert all(torch.equal(mask, keep) for mask in masks(backend)), backend


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_views_give_the_bits_of_contiguous_tensors(op, dtype):
    inputs = {"x": randn(9, 40, dtype=dtype), "weight": randn(40, dtype=dtype, seed=1)}
    if op.startswith("add"):
        inputs["residual"] = randn(9, 40, dtype=dtype, seed=2)
    invariance.assert_view_equals_contiguous(op, inputs, "cuda")


@pytest.mark.parametrize("op", OPS)
def test_opcheck(op):
    inputs = {"x": randn(9, 36), "weight": randn(36, seed=1)}
    if op.startswith("add"):
        inputs |= {"residual": randn(9, 36, seed=2), "dropout_p": 0.25, "seed": SEED}
    checked = assert_opcheck(op, inputs, "cuda")
    assert checked == ["tfm_kernels::layer_norm_fwd_cuda", "tfm_kernels::layer_norm_bwd_cuda"]


def step(x, residual, weight):
    seed = torch.full((), 3, device=x.device)
    y, z = tfk.ops.add_layer_norm(x, residual, weight, dropout_p=0.1, seed=seed, backend="cuda")
    return tfk.ops.rms_norm(y, backend="cuda") + z


def test_compiled():
    """fullgraph=True, forward and backward; an inductor graph calls the operators as they are."""
    leaves = randn(4, 16).requires_grad_(), randn(4, 16, seed=1), randn(16, seed=2).requires_grad_()
    eager = step(*leaves)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(*leaves)
    torch.testing.assert_close(compiled, eager)
    torch.testing.assert_close(
        torch.autograd.grad(compiled.sum(), leaves[::2]), torch.autograd.grad(eager.sum(), leaves[::2])
    )


def test_traced_for_a_gpu_that_is_not_there():
    """Without gradients: torch's autograd ends the process where a CPU build meets a CUDA device."""
    with FakeTensorMode():
        shapes = (4, 16), (4, 16), (16,)
        x, residual, weight = (torch.empty(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
        out = torch.compile(step, fullgraph=True, backend="eager")(x, residual, weight)
        assert out.device.type == "cuda" and out.shape == x.shape and out.dtype == torch.bfloat16
        row = torch.empty(4, device="cuda")
        dx, _, dweight, dbias = BWD["cuda"](x, None, x, row, row, weight, False, False, 0.0, None, None, True, False)
        assert dx.device.type == dweight.device.type == "cuda" and (dx.shape, dweight.shape) == (x.shape, weight.shape)
        assert dweight.dtype == torch.float32 and dbias.shape == (0,)


def test_backward_of_another_backend():
    """What the forward saves means the same to every backend."""
    x, dy, weight = randn(40, 100), randn(40, 100, seed=1), randn(100, seed=2)
    saved = {name: FWD[name](x, None, weight, None, 1e-5, False, False, 0.0, None, None) for name in ("cpu", "cuda")}
    options = (weight, False, False, 0.0, None, None, True, True)
    expected = BWD["cpu"](dy, None, x, *saved["cpu"][2:], *options)
    for forward, backward in (("cpu", "cuda"), ("cuda", "cpu"), ("cuda", "cuda")):
        found = BWD[backward](dy, None, x, *saved[forward][2:], *options)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


X = torch.randn(4, 8)
ROW = torch.ones(4)
DIRECT = {
    "residual has the wrong shape": lambda: FWD["cuda"](X, X[:2], None, None, 1e-5, False, False, 0.0, None, None),
    "weight has the wrong": lambda: FWD["cuda"](X, None, torch.ones(3), None, 1e-5, False, False, 0.0, None, None),
    "weight must be BFloat16, got Half": lambda: FWD["cuda"](
        X.bfloat16(), None, torch.ones(8).half(), None, 1e-5, False, False, 0.0, None, None
    ),
    "float32, got Long": lambda: FWD["cuda"](X.long(), None, None, None, 1e-5, False, False, 0.0, None, None),
    "float32, got Double": lambda: FWD["cuda"](X.double(), None, None, None, 1e-5, False, False, 0.0, None, None),
    "seed must be an int64 tensor": lambda: FWD["cuda"](X, X, None, None, 1e-5, False, False, 0.5, None, None),
    "dropout_p must lie in": lambda: FWD["cuda"](X, X, None, None, 1e-5, False, False, 1.5, SEED, None),
    "dropout_rows has the wrong shape": lambda: FWD["cuda"](
        X, X, None, None, 1e-5, False, False, 0.5, SEED, torch.arange(2)
    ),
    "features, got 0": lambda: FWD["cuda"](torch.ones(()), None, None, None, 1e-5, False, False, 0.0, None, None),
    "features, got 65537": lambda: FWD["cuda"](
        torch.ones(1, 65537), None, None, None, 1e-5, False, False, 0.0, None, None
    ),
    "mean has the wrong shape": lambda: BWD["cuda"](
        X, None, X, X[0], X[0], None, False, False, 0.0, None, None, True, True
    ),
    "dy has the wrong shape": lambda: BWD["cuda"](
        X[:2], None, X, ROW, ROW, None, False, False, 0.0, None, None, True, True
    ),
    "mean must be Float": lambda: BWD["cuda"](
        X, None, X, ROW.double(), ROW, None, False, False, 0.0, None, None, True, True
    ),
}


@pytest.mark.parametrize("words", DIRECT)
def test_the_operators_themselves_refuse_what_would_read_outside(words):
    with pytest.raises(RuntimeError, match=f"layer_norm_[fb]wd_cuda: .*{words}"):
        DIRECT[words]()


def test_float64_is_refused_in_words():
    with pytest.raises(tfk.BackendError, match="has no float64 kernels"):
        tfk.ops.layer_norm(X.double(), backend="cuda")
    assert "-> aten" in tfk.explain("layer_norm", X)
