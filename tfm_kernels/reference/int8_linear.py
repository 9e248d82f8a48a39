"""Backend "reference" of int8_linear: the equations INT8_LINEAR.1 and .2 as they stand, the integers of x in the type
that defines them, the rest in float64, rounded once at the end.
"""

from __future__ import annotations

import torch
from torch import Tensor

ZERO_BELOW = 2.0**-119


def int8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dynamic: bool) -> Tensor:
    """(M, K) -> (M, N); the arguments are those of ops.int8_linear, already checked."""
    given = x.double()
    if dynamic:
        given = given + (_quantized(x) - given).detach()  # the rounding has no gradient of its own
    y = given @ weight.double().T * scale.double()
    if bias is not None:
        y = y + bias.double()
    return y.to(x.dtype)


def _quantized(x: Tensor) -> Tensor:
    """What is left of x: its integers times the step of each row, in float64."""
    wide = x if x.dtype == torch.float64 else x.float()
    largest = wide.abs().amax(1, keepdim=True) if x.shape[1] else wide.new_zeros(x.shape[0], 1)
    integers = torch.round(wide * (torch.full_like(largest, 127) / largest))
    integers = torch.where(largest < ZERO_BELOW, 0.0, integers)
    step = torch.where(largest.isfinite(), largest, torch.nan).double() / 127
    return torch.where(step.isfinite(), integers.double() * step, torch.nan)
