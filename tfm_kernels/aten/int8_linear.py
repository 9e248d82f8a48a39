"""Backend "aten" of int8_linear: PyTorch's own functions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .._autocast import beyond_autocast
from ._int8 import dynamic_linear


@beyond_autocast
def int8_linear(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dynamic: bool, differentiable: bool
) -> Tensor:
    """(M, K) -> (M, N); the arguments are those of ops.int8_linear, already checked, and whether to differentiate."""
    compute = torch.promote_types(x.dtype, torch.float32)
    if dynamic:
        return dynamic_linear(x.to(compute), weight, scale, bias, differentiable).to(x.dtype)
    # scaled first: sums of the integers could overflow float16
    return F.linear(x, (weight.to(compute) * scale[:, None]).to(x.dtype), bias)
