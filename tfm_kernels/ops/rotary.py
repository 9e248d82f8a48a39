"""Rotary positions: pairs of a head's features, turned by angles that grow with the position.

For features i and j of a pair, position t, with a factor for every feature:

    y_i = x_i cos_ti - x_j sin_ti,    y_j = x_j cos_tj + x_i sin_tj                       (ROTARY.1)
    dx_i = dy_i cos_ti + dy_j sin_tj,   dx_j = dy_j cos_tj - dy_i sin_ti                   (ROTARY.2)

cos and sin have R columns, which turn the first R of D features; the others stay as they are. The pairs are (i, i + R /
2) or, interleaved, (2 i, 2 i + 1). Computed in float32 (float64 for float64), rounded once.

Source: Su et al. 2021, "RoFormer", arXiv:2104.09864, section 3.4.2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import _autograd, _backend, _check, _library, _measured
from ..aten import rotary as aten
from ..reference import rotary as reference


@dataclass(frozen=True)
class Call:
    """What the choice of a backend depends on."""

    device: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    turned: int
    interleaved: bool
    training: bool
    trains_angles: bool


def _cpu(call: Call) -> str | None:
    return "computes no gradients of cos and sin" if call.trains_angles else None


def _triton(call: Call) -> str | None:
    return _backend.no_float64(call) or _cpu(call)


KERNELS = {"cpu": _cpu, "triton": _triton}
SUPPORT = _backend.support("rotary", KERNELS)


def prefer(call: Call) -> tuple[str, ...]:
    """Backends in the order of automatic choice."""
    if call.device != "cpu":  # H200: 0.1 of aten's time, but 145 us of the host's, not 90
        return _backend.on_gpu(*(("triton",) if _library.certain(math.prod(call.shape) >= 1 << 23) else ()))
    return _backend.cpu_first(call.device, not torch.compiler.is_compiling())  # a compiler makes one pass of aten's


def describe(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Call:
    """Checks the arguments of rotary()."""
    tensors = {"x": x, "cos": cos, "sin": sin}
    for name, value in tensors.items():
        _check.tensor("rotary", name, value)
    _check.floating("rotary", **tensors)
    if cos.dtype != sin.dtype or cos.dtype not in (x.dtype, torch.float32):
        allowed = " or ".join(dict.fromkeys((_check.dtype_name(x), "float32")))
        given = ", ".join(f"{name} {_check.dtype_name(value)}" for name, value in tensors.items())
        raise ValueError(f"rotary: cos and sin must both be {allowed} to go with x, got {given}")
    _check.same_device("rotary", **tensors)
    _check.dense("rotary", **tensors)
    if not isinstance(interleaved, bool):
        raise TypeError(f"rotary: interleaved must be a bool, got {type(interleaved).__name__}")
    if x.dim() != 4:
        raise ValueError(f"rotary: x must have shape (B, H, T, D), got {tuple(x.shape)}")
    batch, _, length, width = x.shape
    if cos.dim() not in (2, 3) or cos.shape[-2] != length or cos.shape[:-2] not in ((), (1,), (batch,)):
        allowed = " or ".join(f"({lead}{length}, R)" for lead in dict.fromkeys(("", "1, ", f"{batch}, ")))
        raise ValueError(f"rotary: cos must have shape {allowed} to go with x {tuple(x.shape)}, got {tuple(cos.shape)}")
    _check.shape("rotary", "sin", sin, cos.shape, "cos", cos)
    if cos.shape[-1] % 2 or cos.shape[-1] > width:
        raise ValueError(f"rotary: cos must have an even number of columns, at most {width}, got {cos.shape[-1]}")
    training, angles = _check.records_graph(*tensors.values()), _check.records_graph(cos, sin)
    return Call(x.device.type, x.dtype, tuple(x.shape), cos.shape[-1], interleaved, training, angles)


def bucket(call: Call) -> tuple[str, str]:
    """The device, and what a measured time depends on."""
    *leading, width = call.shape
    return call.device, _measured.bucket(
        call.dtype,
        rows=_measured.rounded(math.prod(leading)), width=width, turned=call.turned, interleaved=call.interleaved,
        training=call.training,
    )  # fmt: skip


def _stand_in(call: Call) -> _backend.StandIn:
    given: dict[str, Any] = {"dtype": call.dtype, "device": call.device}
    x, angles = torch.randn(call.shape, **given), torch.randn(call.shape[2], call.turned, **given)
    cos, sin = angles.cos(), angles.sin()
    return _backend.StandIn(
        lambda backend: (rotary(x, cos, sin, interleaved=call.interleaved, backend=backend),),
        [x.requires_grad_()] if call.training else [],
    )


OP = _backend.register(_backend.Op("rotary", SUPPORT, prefer, describe, bucket, _stand_in))
_CHOICES = _backend.Choices()
FWD = _library.declare(
    "rotary_fwd",
    "(Tensor x, Tensor cos, Tensor sin, bool interleaved) -> Tensor y",
    lambda x, cos, sin, interleaved: torch.empty_like(x),
    KERNELS,
)
BWD = _library.declare(
    "rotary_bwd",
    "(Tensor dy, Tensor cos, Tensor sin, bool interleaved) -> Tensor dx",
    lambda dy, cos, sin, interleaved: torch.empty_like(dy),
    KERNELS,
)
_apply = _autograd.differentiate(FWD, BWD)


def rotary(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, backend: str | None = None) -> Tensor:
    """Turns queries or keys by their positions.

    y_i = x_i cos_ti - x_j sin_ti,  y_j = x_j cos_tj + x_i sin_tj for the pairs (i, j) of features (ROTARY.1)

    Args:
        x: (B, H, T, D), float16 | bfloat16 | float32 | float64. Any strides.
        cos: (T, R), (1, T, R) or (B, T, R), a factor for every feature, as transformers has it: R is even and at most
            D, and the features from R on stay as they are. dtype of ``x`` or float32.
        sin: shape and dtype of ``cos``.
        interleaved: the pairs are (0, 1), (2, 3), ... and not (0, R / 2), (1, R / 2 + 1), ...
        backend: "reference" | "aten" | "cpu" | "triton", or None to choose automatically.

    Returns:
        (B, H, T, D), dtype, device and, where x has no gaps, strides of ``x``.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: shapes, dtypes or devices disagree (the message names argument, expected, got).
        BackendError: ``backend`` was named and cannot run this call; "cpu" and "triton" compute no gradients of
            cos and sin.

    Numerics: float32 (float64 for float64), rounded once. Deterministic.
    Cost: reads x and writes y once, 4 B H T R operations; keeps cos and sin for the backward, and not x.
    Source: Su et al. 2021, "RoFormer", arXiv:2104.09864, section 3.4.2.

    Example:
        >>> frequencies = 10000.0 ** (-torch.arange(0, 64, 2) / 64)
        >>> angles = torch.outer(torch.arange(128.0), frequencies).repeat(1, 2)  # interleaved: repeat_interleave(2, 1)
        >>> rotary(torch.randn(2, 8, 128, 64), angles.cos(), angles.sin()).shape
        torch.Size([2, 8, 128, 64])
    """
    key = _library.signature(backend, x, cos, sin, interleaved)
    name = _CHOICES.get(key)
    if name is None:
        name = _CHOICES.keep(key, _backend.select(OP, describe(x, cos, sin, interleaved=interleaved), backend))
    if name in FWD:
        return _apply(name, x, cos, sin, interleaved)
    module: Any = aten if name == "aten" else reference
    return module.rotary(x, cos, sin, interleaved)
