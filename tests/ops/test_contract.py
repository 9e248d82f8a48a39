"""The numeric contract: every case of tests/cases.py on every backend, each by name.

pytest tests/ops/test_contract.py --backend cuda,triton --device cuda
"""

import pytest
import torch

from tests.cases import CASES, report_case
from tfm_kernels import BackendError, Mask, ops
from tfm_kernels.testing import exact, invariance
from tfm_kernels.testing.contract import CONSTANTS, FORWARD_ONLY
from tfm_kernels.testing.data import draw
from tfm_kernels.testing.derivative import assert_gradcheck, assert_opcheck
from tfm_kernels.testing.judge import COMPOSED

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NORMS = ("layer_norm", "add_layer_norm", "rms_norm", "add_rms_norm")
OPS = (*NORMS, "attention", "attention_varlen", "ffn", "linear_cross_entropy", "rotary")


def test_case(case, judged_backend, device):
    try:
        report = report_case(case, judged_backend, device)
    except BackendError as refusal:
        if judged_backend in ("cpu", "reference"):  # they have no limits
            raise
        pytest.skip(str(refusal))
    report.raise_broken()


NO_DROPOUT = "F.scaled_dot_product_attention draws dropout from torch's generator"
BANDS = (
    Mask.causal(),
    Mask.causal("bottom_right"),
    Mask.window(3, 0),
    Mask.window(5, 2, "bottom_right"),
    Mask.window(None, 4),
    Mask.causal() & Mask.window(9, None, "bottom_right"),
)


def masks(batch, heads, tq, tk):
    """Every kind of mask, and combinations of all of them."""
    g = torch.Generator().manual_seed(4)
    keep = lambda *shape: Mask.keep(torch.rand(shape, generator=g) < 0.6)
    lengths = Mask.lengths(torch.randint(0, tk + 1, (batch,), generator=g))
    yield Mask()
    yield from BANDS
    yield lengths
    yield from (keep(tq, tk), keep(batch, 1, 1, tk), keep(batch, 1, tq, tk), keep(1, heads, 1, tk))
    yield keep(batch, heads, tq, tk)
    yield from (band & lengths & keep(batch, 1, tq, tk) for band in BANDS)


@pytest.mark.parametrize("shape", [(2, 3, 70, 70), (2, 2, 33, 129), (1, 2, 129, 66), (1, 1, 1, 65)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_visible_pairs_are_exact(shape, dtype, dropout_p, any_backend, device):
    if any_backend == "aten" and dropout_p > 0.0:
        pytest.skip(NO_DROPOUT)
    for mask in masks(*shape):
        exact.assert_mask_support(any_backend, mask, shape, dtype=dtype, device=device, dropout_p=dropout_p, seed=77)


def test_bias_hides_exactly_its_minus_infinities(any_backend, device):
    g = torch.Generator().manual_seed(5)
    for shape in ((2, 3, 40, 66), (1, 3, 40, 66), (2, 1, 1, 66), (1, 1, 40, 66)):
        bias = torch.zeros(shape).masked_fill(torch.rand(shape, generator=g) < 0.4, -torch.inf).to(device)
        exact.assert_mask_support(any_backend, Mask.causal(), (2, 3, 40, 66), bias=bias, device=device)


@pytest.mark.parametrize("dtype", (*DTYPES, torch.float64), ids=str)
@pytest.mark.parametrize("op", ["ffn", "attention"])
def test_small_integers_are_exact(op, dtype, any_backend, device):
    for seed in range(4):
        inputs = exact.integers(op, dtype, device, seed)
        exact.assert_exact(op, inputs, any_backend, backward=op == "ffn")
        if op == "attention":
            invariance.assert_key_order_free(inputs, any_backend)


def small_inputs(op, device, dtype=torch.float32):
    g = torch.Generator().manual_seed(6)
    new = lambda *shape: draw("randn", shape, dtype, g).to(device)
    if op == "attention":
        return {"query": new(3, 4, 33, 24), "key": new(3, 2, 70, 24), "value": new(3, 2, 70, 16)}
    if op == "attention_varlen":
        ends = torch.tensor([0, 5, 5, 40], dtype=torch.int32, device=device)
        inputs = {"query": new(40, 4, 8), "key": new(40, 2, 8), "value": new(40, 2, 8)}
        return {**inputs, "cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 35, "max_seqlen_k": 35}
    if op == "ffn":
        return {
            "x": new(9, 20),
            "w1": new(33, 20),
            "b1": new(33),
            "w2": new(20, 33),
            "b2": new(20),
            "gate": new(33, 20),
        }
    if op == "linear":
        return {"x": new(9, 20), "weight": new(33, 20), "bias": new(33)}
    if op == "int8_ffn":
        weights = [torch.randint(-128, 128, shape, generator=g) for shape in ((33, 20), (20, 33))]
        w1, w2 = (weight.to(device, torch.int8) for weight in weights)
        scale1, scale2 = (torch.full((size,), 0.01, device=device) for size in (33, 20))
        first, second = {"w1": w1, "scale1": scale1, "b1": new(33)}, {"w2": w2, "scale2": scale2, "b2": new(20)}
        return {"x": new(9, 20), **first, **second, "activation": "gelu", "dynamic": True}
    if op == "int8_linear":
        weight = torch.randint(-128, 128, (33, 20), generator=g, dtype=torch.int8).to(device)
        scale = (0.01 + torch.rand(33, generator=g) / 100).to(device)
        return {"x": new(9, 20), "weight": weight, "scale": scale, "bias": new(33), "dynamic": True}
    if op == "linear_cross_entropy":
        target = torch.tensor([0, 32, 7, -100, 5, 5, 31, -100, 1], device=device)
        inputs = {"x": new(9, 20), "weight": new(33, 20), "target": target, "bias": new(33)}
        return {**inputs, "label_smoothing": 0.1, "reduction": "none"}
    if op == "rotary":
        return {"x": new(2, 3, 9, 20), "cos": new(2, 9, 16), "sin": new(2, 9, 16)}
    inputs = {"x": new(9, 36), "weight": new(36)}
    if op.startswith("add"):
        inputs["residual"] = new(9, 36)
    return inputs


def outputs_and_gradients(op, inputs, autocast, backend, function=None):
    """What the op gives, and the gradients of what can have one; the kernels of linear layers have none."""
    names = [name for name, t in inputs.items() if isinstance(t, torch.Tensor) and t.is_floating_point()]
    names = [] if op in FORWARD_ONLY and backend == "cpu" else [n for n in names if n not in CONSTANTS.get(op, ())]
    leaves = {name: inputs[name].detach().clone().requires_grad_() for name in names}
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        outputs = (function or getattr(ops, op))(**(inputs | leaves), backend=backend)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    if names:
        outputs += torch.autograd.grad(outputs, list(leaves.values()), [torch.ones_like(out) for out in outputs])
    return outputs


@pytest.mark.parametrize("op", [*OPS, *FORWARD_ONLY])
@pytest.mark.parametrize("backend", ["reference", "aten", "cpu", None])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_autocast_casts_no_op(op, backend, dtype):
    """An op has the dtype of its tensors; the modules of nn cast them before."""
    plain, cast = (
        outputs_and_gradients(op, small_inputs(op, "cpu", dtype), autocast, backend) for autocast in (False, True)
    )
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(plain, cast, strict=True))
    is_loss = op == "linear_cross_entropy"
    assert plain[0].dtype == (torch.promote_types(dtype, torch.float32) if is_loss else dtype)
    assert {t.dtype for t in plain[1:]} <= {dtype, *([torch.float32] if op.startswith("int8") else [])}  # steps


@pytest.mark.parametrize("op", sorted({*OPS, *FORWARD_ONLY} - {"attention_varlen"}))  # aten's cannot be compiled
def test_autocast_casts_no_compiled_op(op):
    compiled = torch.compile(getattr(ops, op), fullgraph=True, backend="eager")
    inputs = small_inputs(op, "cpu")
    plain = outputs_and_gradients(op, inputs, False, "aten")
    cast = outputs_and_gradients(op, inputs, True, "aten", compiled)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(plain, cast, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_views_give_the_bits_of_contiguous_tensors(op, dtype, any_backend, device):
    if any_backend == "aten":
        pytest.skip("PyTorch's functions sum tensors of another layout in another order")
    invariance.assert_view_equals_contiguous(op, small_inputs(op, device, dtype), any_backend)


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm", "ffn", "attention_varlen", "linear_cross_entropy"])
@pytest.mark.parametrize("backend", ["reference", "aten", "cpu"])
def test_results_are_contiguous_whatever_the_strides(op, backend):
    inputs = small_inputs(op, "cpu")
    name, tensor = next(iter(inputs.items()))
    for strided in (tensor, tensor.transpose(0, 1).contiguous().transpose(0, 1)):
        assert getattr(ops, op)(**inputs | {name: strided}, backend=backend).is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_padding_is_not_read(dtype, any_backend, device):
    lengths = torch.tensor([70, 33, 0], device=device)
    invariance.assert_padding_unread(small_inputs("attention", device, dtype), lengths, any_backend)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_batch_and_heads_are_independent(dtype, any_backend, device):
    invariance.assert_batch_and_heads_independent(small_inputs("attention", device, dtype), any_backend)


def tiny_inputs(op, device):
    """A few elements of each tensor: gradcheck calls the op twice for every one."""
    g = torch.Generator().manual_seed(8)
    new = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64).to(device)
    if op == "attention":
        bias, mask = new(1, 2, 3, 4), Mask.causal("bottom_right") & Mask.lengths(torch.tensor([3], device=device))
        return {"query": new(1, 2, 3, 2), "key": new(1, 1, 4, 2), "value": new(1, 1, 4, 3), "bias": bias, "mask": mask}
    if op == "attention_varlen":
        ends = torch.tensor([0, 2, 5], dtype=torch.int32, device=device)
        inputs = {"query": new(5, 2, 2), "key": new(5, 1, 2), "value": new(5, 1, 2)}
        return {**inputs, "cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 3, "max_seqlen_k": 3}
    if op == "ffn":
        inputs = {"x": new(3, 2), "w1": new(4, 2), "b1": new(4), "w2": new(3, 4), "b2": new(3), "gate": new(4, 2)}
        return {**inputs, "activation": "gelu"}
    if op == "linear_cross_entropy":
        inputs = {"x": new(4, 2), "weight": new(5, 2), "target": torch.tensor([4, 1, -100, 0], device=device)}
        return {**inputs, "bias": new(5), "label_smoothing": 0.2}
    if op == "rotary":
        return {"x": new(1, 2, 3, 5), "cos": new(3, 4), "sin": new(3, 4)}
    inputs = {"x": new(3, 5), "weight": new(5)}
    if op.endswith("layer_norm"):
        inputs["bias"] = new(5)
    if op.startswith("add"):
        inputs["residual"] = new(3, 5)
    return inputs


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dropped", [False, True])
def test_gradcheck(op, dropped, any_backend, device):
    inputs = tiny_inputs(op, device)
    if any_backend == "aten" and dropped and op.startswith("attention"):
        pytest.skip(NO_DROPOUT)
    if dropped and op not in ("layer_norm", "rms_norm", "linear_cross_entropy", "rotary"):
        inputs |= {"dropout_p": 0.4, "seed": torch.tensor(9, device=device)}
    if op.startswith("attention"):
        inputs["return_lse"] = any_backend != "aten"  # F.scaled_dot_product_attention returns none
    assert_gradcheck(op, inputs, any_backend)


@pytest.mark.parametrize("op", OPS)
def test_opcheck(op, any_backend, device):
    checked = assert_opcheck(op, small_inputs(op, device), any_backend)
    ways = set() if any_backend in COMPOSED else {"fwd", "bwd"}  # PyTorch's operators are not ours to check
    assert {name.split("_")[-2] for name in checked} == ways


def test_every_public_op_is_judged():
    """A new op joins the list here or stands in this list of functions that are not kernels' own."""
    fronts = {"attention_weights", "scaled_dot_product_attention"}
    public = {name for name in dir(ops) if not name.startswith("_") and callable(getattr(ops, name))}
    assert public - fronts - set(FORWARD_ONLY) == set(OPS) == {case.op for case in CASES}
