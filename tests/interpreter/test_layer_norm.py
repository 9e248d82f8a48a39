"""The norms' Triton kernels, interpreted: the numeric contract, dropout masks, tracing, refusals."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tfm_kernels as tfk
from tests.cases import CASES, report_case
from tfm_kernels import _library, dropout
from tfm_kernels.ops.layer_norm import BWD, FWD
from tfm_kernels.testing import assert_contract, invariance
from tfm_kernels.testing.derivative import assert_opcheck
from tfm_kernels.triton import layer_norm_bwd, layer_norm_fwd

OPS = ("layer_norm", "add_layer_norm", "rms_norm", "add_rms_norm")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SEED = torch.tensor(2**40 + 20261121)
NORMS = [case for case in CASES if case.op in OPS and case.levels["dtype"] != "f64"]
FIRST = 120  # all pairs have come several times by then


def elements(case):
    return torch.Size(case.levels["rows"]).numel() * case.levels["width"]


def marked(index, case):
    slow = index >= FIRST or elements(case) > 40_000
    return pytest.param(case, id=case.id, marks=pytest.mark.slow if slow else ())


@pytest.mark.parametrize("case", [marked(index, case) for index, case in enumerate(NORMS)])
def test_contract(case):
    report_case(case, "triton").raise_broken()


def test_there_are_enough_cases():
    quick = [case for index, case in enumerate(NORMS) if not marked(index, case).marks]
    assert len(quick) >= 100 and len(NORMS) >= 300
    assert {case.op for case in quick} == set(OPS)


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def calls(width, dtype, rows):
    x, w = randn(rows, width, dtype=dtype), randn(width, dtype=dtype, seed=1)
    residual = randn(rows, width, seed=2)
    yield "rms_norm", {"x": x, "weight": w}
    yield "layer_norm", {"x": x, "bias": w, "unbiased": True}
    yield "add_rms_norm", {"x": x, "residual": residual.to(dtype), "weight": w.float()}
    yield "add_layer_norm", {"x": x, "residual": residual, "weight": w.float(), "dropout_p": 0.3, "seed": SEED}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_n, width", [(64, 129), (64, 136), (256, 200)])
def test_walks_and_shared_rows(block_n, width, dtype, monkeypatch):
    """Long rows in pieces, many rows to one program: by small launches, since the interpreter is slow."""
    forward = layer_norm_fwd.Config(1 if block_n < width else 2, block_n, num_warps=1)
    backward = layer_norm_bwd.Config(forward.block_m, block_n, num_warps=1, num_stages=2, programs=3)
    monkeypatch.setattr(layer_norm_fwd, "pick_config", lambda *_: forward)
    monkeypatch.setattr(layer_norm_bwd, "pick_config", lambda *_: backward)
    for op, inputs in calls(width, dtype, rows=7):
        assert_contract(op, inputs, "triton")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [16385, 32769, 65536])
def test_rows_longer_than_registers(width, dtype):
    for op, inputs in calls(width, dtype, rows=2):
        assert_contract(op, inputs, "triton")


@pytest.mark.parametrize("width", [7, 64, 130])
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

    for backend in ("triton", "cpu", "reference"):
        assert all(torch.equal(mask, keep) for mask in masks(backend)), backend


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_views_give_the_bits_of_contiguous_tensors(op, dtype):
    inputs = {"x": randn(9, 40, dtype=dtype), "weight": randn(40, dtype=dtype, seed=1)}
    if op.startswith("add"):
        inputs["residual"] = randn(9, 40, dtype=dtype, seed=2)
    invariance.assert_view_equals_contiguous(op, inputs, "triton")


@pytest.mark.parametrize("op", OPS)
def test_opcheck(op):
    inputs = {"x": randn(9, 36), "weight": randn(36, seed=1)}
    if op.startswith("add"):
        inputs |= {"residual": randn(9, 36, seed=2), "dropout_p": 0.25, "seed": SEED}
    checked = assert_opcheck(op, inputs, "triton")
    assert checked == ["tfm_kernels::layer_norm_fwd_triton", "tfm_kernels::layer_norm_bwd_triton"]


def step(x, residual, weight):
    options = {"dropout_p": 0.1, "seed": None, "backend": "triton"}
    y, z = tfk.ops.add_layer_norm(x, residual, weight, **{**options, "seed": torch.full((), 3, device=x.device)})
    return tfk.ops.rms_norm(y, backend="triton") + z


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
        dx, _, dweight, dbias = BWD["triton"](x, None, x, row, row, weight, False, False, 0.0, None, None, True, False)
        assert dx.device.type == dweight.device.type == "cuda" and (dx.shape, dweight.shape) == (x.shape, weight.shape)
        assert dweight.dtype == torch.float32 and dbias.shape == (0,)


def test_backward_of_another_backend():
    """What the forward saves means the same to every backend."""
    x, dy, weight = randn(40, 100), randn(40, 100, seed=1), randn(100, seed=2)
    saved = {name: FWD[name](x, None, weight, None, 1e-5, False, False, 0.0, None, None) for name in ("cpu", "triton")}
    options = (weight, False, False, 0.0, None, None, True, True)
    expected = BWD["cpu"](dy, None, x, *saved["cpu"][2:], *options)
    for forward, backward in (("cpu", "triton"), ("triton", "cpu"), ("triton", "triton")):
        found = BWD[backward](dy, None, x, *saved[forward][2:], *options)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


X = torch.randn(4, 8)
ROW = torch.ones(4)
DIRECT = [
    lambda: FWD["triton"](X, X[:2], None, None, 1e-5, False, False, 0.0, None, None),
    lambda: FWD["triton"](X, None, torch.ones(3), None, 1e-5, False, False, 0.0, None, None),
    lambda: FWD["triton"](X.long(), None, None, None, 1e-5, False, False, 0.0, None, None),
    lambda: FWD["triton"](X.double(), None, None, None, 1e-5, False, False, 0.0, None, None),
    lambda: FWD["triton"](X, X, None, None, 1e-5, False, False, 0.5, None, None),
    lambda: FWD["triton"](X, X, None, None, 1e-5, False, False, 1.5, SEED, None),
    lambda: FWD["triton"](X, X, None, None, 1e-5, False, False, 0.5, SEED, torch.arange(2)),
    lambda: FWD["triton"](torch.ones(()), None, None, None, 1e-5, False, False, 0.0, None, None),
    lambda: FWD["triton"](torch.ones(1, 65537), None, None, None, 1e-5, False, False, 0.0, None, None),
    lambda: BWD["triton"](X, None, X, X[0], X[0], None, False, False, 0.0, None, None, True, True),
    lambda: BWD["triton"](X[:2], None, X, ROW, ROW, None, False, False, 0.0, None, None, True, True),
    lambda: BWD["triton"](X, None, X, ROW.double(), ROW, None, False, False, 0.0, None, None, True, True),
]


@pytest.mark.parametrize("index", range(len(DIRECT)))
def test_the_operators_themselves_refuse_what_would_read_outside(index):
    with pytest.raises(ValueError, match="layer_norm_[fb]wd_triton: "):
        DIRECT[index]()


def test_float64_is_refused_in_words():
    with pytest.raises(tfk.BackendError, match="has no float64 kernels"):
        tfk.ops.layer_norm(X.double(), backend="triton")
    assert _library.triton_interprets() and "-> aten" in tfk.explain("layer_norm", X)
