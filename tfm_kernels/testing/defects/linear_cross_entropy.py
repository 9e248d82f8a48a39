"""Mistakes of linear_cross_entropy kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from ..data import draw
from ..emulations import Emulation
from .defect import (
    NARROW,
    Build,
    Defect,
    Inputs,
    in_16_bits,
    in_tf32,
    lost_in_last_tile,
    missing,
    one,
    only_last_tile,
    planter,
    times,
    truncated,
)


def _inputs(dtype: torch.dtype, rows: int = 130, width: int = 64, classes: int = 200, **options) -> Inputs:
    """Every seventh row is ignored; the class with that number is one of the others' too."""
    generator = torch.Generator().manual_seed(17)
    target = torch.randint(classes, (rows,), generator=generator)
    target[::7] = 5
    inputs: Inputs = {
        "x": draw("randn", (rows, width), dtype, generator),
        "weight": (torch.randn(classes, width, generator=generator) / width**0.5).to(dtype),
        "target": target,
        "bias": draw("randn", (classes,), dtype, generator),
    }
    return {**inputs, "ignore_index": 5, "label_smoothing": 0.1, "reduction": "none", **options}


def _with(**options) -> Build:
    return lambda dtype: _inputs(dtype, **options)


_mean = _with(reduction="mean")
_sharp = _with(label_smoothing=0.0)
_tall = _with(rows=600)
_far = lambda dtype: _inputs(dtype, bias=torch.full((200,), 100.0, dtype=dtype))  # noqa: E731


def _next(t: Tensor, run: Emulation) -> Tensor:
    return t + 1


def _everyone(t: Tensor, run: Emulation) -> Tensor:
    return torch.ones_like(t)


def _all_rows(t: Tensor, run: Emulation) -> Tensor:
    return torch.full_like(t, 130)


def _one_fewer(t: int, run: Emulation) -> int:
    return t - 1


def _without_maximum(t: Tensor, run: Emulation) -> Tensor:
    """The exponentials of the logits as they are, which overflow float32 beyond 88."""
    return t.exp().log()


def _without_last(t: list, run: Emulation) -> list:
    """A loop over whole tiles alone, forward."""
    return t if run.backward else t[:-1]


_plant = planter("linear_cross_entropy")

LINEAR_CROSS_ENTROPY: tuple[Defect, ...] = (
    _plant("last tile of classes lost from lse", _inputs, "part", lost_in_last_tile),
    _plant("last tile of classes not visited", _inputs, "tiles", _without_last),
    _plant("sum not rescaled to the new maximum", _inputs, "rescale", one),
    _plant("sum overwritten by each tile", _inputs, "kept", times(0.0)),
    _plant("no maximum subtracted", _far, "lse", _without_maximum),
    _plant("sum of exponentials in 16 bits", _inputs, "total", in_16_bits),
    _plant("logits in 16 bits", _inputs, "z", in_16_bits),
    _plant("lse in 16 bits", _inputs, "lse", in_16_bits),
    _plant("bias missing", _inputs, "bias", missing),
    _plant("bias missing in the backward's logits", _inputs, "bias_bwd", missing),
    _plant("target off by one", _inputs, "target", _next),
    _plant("smoothing missing", _inputs, "smoothing", times(0.0)),
    _plant("smoothing over one class fewer", _inputs, "classes", _one_fewer),
    _plant("smoothing's last tile lost", _inputs, "sums_part", lost_in_last_tile),
    _plant("smoothing missing in the backward", _inputs, "even", times(0.0)),
    _plant("target's share whole in spite of smoothing", _inputs, "share", one),
    _plant("target's share whole in the backward", _inputs, "share_bwd", one),
    _plant("target missing in the backward", _sharp, "share_bwd", times(0.0)),
    _plant("ignored rows in the loss", _inputs, "counted_loss", _everyone),
    _plant("ignored rows in the mean's count", _mean, "count", _all_rows),
    _plant("ignored rows in the gradients", _inputs, "counted_dz", _everyone),
    _plant("output gradient of the first row for all", _inputs, "dloss", lambda t, run: t[:1].expand_as(t)),
    _plant("softmax in 16 bits", _inputs, "p", in_16_bits, (torch.float32,)),
    _plant("logits' gradient truncates", _tall, "low", truncated, NARROW),
    _plant("logits' gradient in tf32", _inputs, "dz", in_tf32, (torch.float32,)),
    _plant("dx of the last tile alone", _inputs, "dx_kept", times(0.0)),
    _plant("dx without the last tile", _inputs, "dx_part", lost_in_last_tile),
    _plant("dx accumulated in 16 bits", _with(classes=1000), "dx_acc", in_16_bits),
    _plant("dx truncates", _tall, "dx", truncated, NARROW),
    _plant("dx +1 %", _tall, "dx", times(1.01)),
    _plant("dweight of the last rows alone", _inputs, "dweight_part", only_last_tile),
    _plant("dweight accumulated in 16 bits", _tall, "dweight_acc", in_16_bits),
    _plant("dweight +1 %", _tall, "dweight", times(1.01)),
    _plant("dbias without the last rows", _inputs, "dbias_part", lost_in_last_tile),
    _plant("dbias accumulated in 16 bits", _with(rows=600, classes=500), "dbias_acc", in_16_bits),
    _plant("loss +0.1 %", _inputs, "loss", times(1.001)),
    _plant("mean +0.1 %", _mean, "loss", times(1.001)),
)
