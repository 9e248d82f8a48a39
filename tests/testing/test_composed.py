"""reference and aten are judged too: reference as strictly as a kernel, aten by what roundings can explain at all."""

import pytest
import torch

from tfm_kernels import Mask
from tfm_kernels.testing import judge
from tfm_kernels.testing.contract import draw_douts
from tfm_kernels.testing.data import CLASSES, draw
from tfm_kernels.testing.emulations import emulate
from tfm_kernels.testing.judge import COMPOSED

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
ENDS = torch.tensor([0, 30, 30, 70], dtype=torch.int32)


def calls(data, dtype):
    g = torch.Generator().manual_seed(1)
    new = lambda *shape: draw(data, shape, dtype, g)
    plain = lambda *shape: draw("randn", shape, dtype, g)
    dense = {"query": new(2, 4, 40, 32), "key": new(2, 2, 70, 32), "value": new(2, 2, 70, 32)}
    yield "attention", {**dense, "mask": Mask.causal("bottom_right"), "return_lse": True}
    packed = {"query": new(70, 4, 32), "key": new(70, 2, 32), "value": new(70, 2, 32), "return_lse": True}
    lengths = {"cu_seqlens_q": ENDS, "cu_seqlens_k": ENDS, "max_seqlen_q": 40, "max_seqlen_k": 40}
    yield "attention_varlen", packed | lengths
    yield "layer_norm", {"x": new(60, 96), "weight": plain(96), "bias": plain(96)}
    residual = plain(60, 96) if data == "extremes" else new(60, 96)  # two extremes may overflow in z
    yield "add_rms_norm", {"x": new(60, 96), "residual": residual, "weight": plain(96)}
    small = {"extremes": 2.0**-11, "mean_1000": 2.0**-7}.get(data, 0.1)  # hidden products have to fit in fp16
    weights = {name: plain(*shape) * small for name, shape in (("w1", (160, 48)), ("w2", (48, 160)))}
    yield "ffn", {"x": new(60, 48), "activation": "gelu", "b1": plain(160), "b2": plain(48), **weights}
    target = torch.randint(100, (60,), generator=g)
    weights = {"weight": plain(100, 48) * small, "bias": plain(100), "target": target}
    yield "linear_cross_entropy", {"x": new(60, 48), **weights, "label_smoothing": 0.1}


def honest(op, inputs, data, **planted):
    """Outputs, gradients and output gradients of the emulated kernel."""
    outputs, _ = emulate(op, inputs, {})
    factor = 2.0**-16 if data == "extremes" else 1.0  # ordinary gradients of such inputs overflow fp16
    douts = {name: (t * factor).to(t.dtype) for name, t in draw_douts(outputs).items()}
    return *emulate(op, inputs, douts, **planted), douts


def noise(results):
    """Normal numbers of the size that the results have."""
    g = torch.Generator().manual_seed(2)
    size = lambda t: t.double().nan_to_num(0.0, 0.0, 0.0).square().mean().sqrt()
    return {name: (torch.randn(t.shape, generator=g) * size(t)).to(t.dtype) for name, t in results.items()}


def scaled(results):
    return {name: t * 1.5 for name, t in results.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("data", CLASSES)
@pytest.mark.parametrize("backend", COMPOSED)
def test_noise_and_a_wrong_scale_are_caught(backend, data, dtype):
    for op, inputs in calls(data, dtype):
        outputs, grads, douts = honest(op, inputs, data)
        judge(op, inputs, outputs, grads, douts, backend=backend).raise_broken()
        for wrong in (noise, scaled):
            report = judge(op, inputs, wrong(outputs), wrong(grads), douts, backend=backend)
            assert not report.passed, f"{wrong.__name__}: {report}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tensor", ["y", "dx", "dweight"])
@pytest.mark.parametrize("data", ["randn", "randn4", "outlier", "mean_1000"])
@pytest.mark.parametrize("backend", COMPOSED)
def test_noise_in_one_tensor_is_caught(backend, data, tensor, dtype):
    for op, inputs in calls(data, dtype):
        if op == "layer_norm":
            outputs, grads, douts = honest(op, inputs, data)
            results = outputs if tensor in outputs else grads
            name = tensor.removeprefix("d")
            results[name] = noise({name: results[name]})[name]
            broken = judge(op, inputs, outputs, grads, douts, backend=backend).broken
            assert {finding.tensor for finding in broken} == {tensor}


def last_key_lost(attend, run):
    """Who sees whom, without the last key of each row."""
    return attend & (attend.cumsum(-1) < attend.sum(-1, keepdim=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("data", ["randn", "randn4", "outlier"])
@pytest.mark.parametrize("backend", COMPOSED)
def test_a_lost_key_is_caught(backend, data, dtype):
    for op, inputs in calls(data, dtype):
        if op.startswith("attention"):
            report = judge(op, inputs, *honest(op, inputs, data, hooks={"attend": last_key_lost}), backend=backend)
            wanted = {"out", "lse", "dvalue"} if data == "randn" else {"dvalue"}  # elsewhere other keys may take all
            assert wanted <= {finding.tensor for finding in report.broken}
