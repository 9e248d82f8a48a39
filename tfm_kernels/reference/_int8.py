"""What rounding to int8 leaves of numbers, INT8_LINEAR.2's n and step, for the ops that multiply integers."""

from __future__ import annotations

import torch
from torch import Tensor

ZERO_BELOW = 2.0**-119


def rounded(x: Tensor) -> Tensor:
    """The integers of each row of ``x`` (M, K), float32 or float64, times the row's step, in float64.

    The gradient is that of ``x`` itself: the rounding has none of its own.
    """
    largest = x.abs().amax(1, keepdim=True) if x.shape[1] else x.new_zeros(x.shape[0], 1)
    integers = torch.round(x * (torch.full_like(largest, 127) / largest))
    integers = torch.where(largest < ZERO_BELOW, 0.0, integers)
    step = torch.where(largest.isfinite(), largest, torch.nan).double() / 127
    value = torch.where(step.isfinite(), integers.double() * step, torch.nan)
    return x.double() + (value - x.double()).detach()
