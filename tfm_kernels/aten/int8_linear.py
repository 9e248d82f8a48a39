"""Backend "aten" of int8_linear: PyTorch's own functions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .._autocast import beyond_autocast

_ZERO_BELOW = 2.0**-119
_EXACT_ON_CPU: bool = (
    torch.cpu._is_vnni_supported()
)  # without, oneDNN adds pairs of products in 16 bits, which saturate


@beyond_autocast
def int8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dynamic: bool) -> Tensor:
    """(M, K) -> (M, N); the arguments are those of ops.int8_linear, already checked."""
    compute = torch.promote_types(x.dtype, torch.float32)
    if not dynamic:
        # scaled first: sums of the integers could overflow float16
        return F.linear(x, (weight.to(compute) * scale[:, None]).to(x.dtype), bias)
    wide = x.to(compute)
    integers, step = _quantized(wide.detach())
    if torch.is_grad_enabled() and (x.requires_grad or scale.requires_grad):
        wide = wide + (integers * step - wide).detach()  # the rounding has no gradient of its own
        y = F.linear(wide, weight.to(wide.dtype)) * scale
    else:
        y = _product(integers, weight) * (step * scale)
    if bias is not None:
        y = y + bias
    return y.to(x.dtype)


def _quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """The integers of x, in its type, and the step of each row, (M, 1)."""
    largest = x.abs().amax(1, keepdim=True) if x.shape[1] else x.new_zeros(x.shape[0], 1)
    integers = torch.round(x * (torch.full_like(largest, 127) / largest)).masked_fill(largest < _ZERO_BELOW, 0.0)
    finite = largest.isfinite()
    return integers.masked_fill(~finite, 0.0), (largest / 127).masked_fill(~finite, torch.nan)


def _product(integers: Tensor, weight: Tensor) -> Tensor:
    """By the matrix library's product of int8 where it takes the shape and is exact, else by one of floats."""
    rows, width = integers.shape
    if integers.is_cuda:  # what cuBLAS asks for
        taken = rows > 16 and width % 8 == 0 and weight.shape[0] % 8 == 0
    else:
        taken = _EXACT_ON_CPU and integers.device.type == "cpu" and min(rows, width, weight.shape[0]) > 0
    if taken:
        return torch._int_mm(integers.to(torch.int8), weight.T).to(integers.dtype)
    return F.linear(integers, weight.to(integers.dtype))
