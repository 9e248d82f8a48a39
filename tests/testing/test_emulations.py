"""First meta-test: what honest kernels round passes the contract on every data class. No false alarm."""

import pytest
import torch

from tests.case_inputs import SMALL
from tfm_kernels import Mask
from tfm_kernels.testing import judge
from tfm_kernels.testing.contract import draw_douts
from tfm_kernels.testing.data import CLASSES, draw
from tfm_kernels.testing.emulations import emulate

SEED = torch.tensor(5)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TILES = ((64, False), (128, True))  # keys at a time, lazy rescale


def attention(data, dtype, g, tq=100, tk=130, d=32, kv_heads=2, **options):
    draw_ = lambda heads, t: draw(data, (2, heads, t, d), dtype, g)
    inputs = {"query": draw_(4, tq), "key": draw_(kv_heads, tk), "value": draw_(kv_heads, tk), "return_lse": True}
    if "bias" in options:
        options["bias"] = draw("randn", options["bias"], dtype, g)
    return "attention", {**inputs, **options, "seed": SEED}


def packed(data, dtype, g):
    ends = torch.tensor([0, 40, 40, 41, 170], dtype=torch.int32)
    inputs = {name: draw(data, (170, 2, 24), dtype, g) for name in ("query", "key", "value")}
    options = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 130, "max_seqlen_k": 130, "return_lse": True}
    return "attention_varlen", {**inputs, **options, "mask": Mask.causal()}


def norm(op, data, dtype, g, rows, width):
    inputs = {"x": draw(data, (rows, width), dtype, g)}
    if op.startswith("add"):  # two extremes may overflow in z
        inputs["residual"] = draw("randn" if data == "extremes" else data, (rows, width), dtype, g)
        inputs |= {"dropout_p": 0.3, "seed": SEED}
    inputs["weight"] = draw("randn", (width,), dtype, g)
    if op.endswith("layer_norm"):
        inputs["bias"] = draw("randn", (width,), dtype, g)
    return op, inputs


def ffn(data, dtype, g, activation, gated):
    small = {"extremes": 2.0**-11, "mean_1000": 2.0**-7}.get(
        data, 1.0
    )  # products of two hidden numbers must fit in fp16
    weight = lambda o, i: (torch.randn(o, i, generator=g) * small / i**0.5).to(dtype)
    inputs = {"x": draw(data, (60, 48), dtype, g), "w1": weight(160, 48), "b1": draw("randn", (160,), dtype, g)}
    inputs |= {"w2": weight(48, 160), "b2": draw("randn", (48,), dtype, g), "activation": activation}
    if gated:
        inputs |= {"gate": weight(160, 48), "dropout_p": 0.2, "seed": SEED}
    return "ffn", inputs


def linear_cross_entropy(data, dtype, g, classes, **options):
    small = SMALL.get(data, 1.0)
    target = torch.randint(classes, (60,), generator=g)
    target[::5] = -100
    inputs = {"x": draw(data, (60, 48), dtype, g), "target": target}
    inputs["weight"] = (torch.randn(classes, 48, generator=g) * small / 48**0.5).to(dtype)
    return "linear_cross_entropy", {**inputs, **options}


def calls(data, dtype, g):
    yield attention(data, dtype, g)
    mask = Mask.causal() & Mask.lengths(torch.tensor([70, 0]))
    # out must not overflow in fp16, or every gradient does
    p = 0.0 if data == "extremes" else 0.2
    yield attention(data, dtype, g, mask=mask, bias=(1, 4, 100, 130), dropout_p=p)
    yield attention(data, dtype, g, tq=7, tk=5, d=5, kv_heads=4, scale=0.7)
    yield packed(data, dtype, g)
    for op in ("layer_norm", "add_layer_norm", "rms_norm", "add_rms_norm"):
        for rows, width in ((60, 96), (5, 7), (1, 1030)):
            yield norm(op, data, dtype, g, rows, width)
    for activation, gated in (("relu", False), ("gelu", False), ("gelu_tanh", False), ("silu", True)):
        yield ffn(data, dtype, g, activation, gated)
    bias = lambda classes: draw("randn", (classes,), dtype, g)
    yield linear_cross_entropy(data, dtype, g, 300, bias=bias(300), label_smoothing=0.1, reduction="none")
    yield linear_cross_entropy(data, dtype, g, 1000, reduction="mean")
    yield linear_cross_entropy(data, dtype, g, 130, bias=bias(130) + 50, label_smoothing=1.0, reduction="sum")
    yield linear_cross_entropy(data, dtype, g, 2, label_smoothing=0.3, reduction="none")
    yield linear_cross_entropy(data, dtype, g, 1, bias=bias(1), label_smoothing=0.3)


@pytest.mark.parametrize("data", CLASSES)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("seed", (0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)))
def test_no_false_alarm(data, dtype, seed):
    g = torch.Generator().manual_seed(seed)
    for op, inputs in calls(data, dtype, g):
        outputs, _ = emulate(op, inputs, {})
        douts = draw_douts(outputs, seed)
        if data == "extremes":  # ordinary gradients of such inputs overflow fp16
            douts = {name: (t * 2.0**-16).to(t.dtype) for name, t in douts.items()}
        for tile, lazy in TILES[:1] if op.endswith("norm") else TILES:
            outputs, grads = emulate(op, inputs, douts, tile=tile, lazy=lazy)
            judge(op, inputs, outputs, grads, douts, backend=f"emulation, tile {tile}, lazy {lazy}").raise_broken()
