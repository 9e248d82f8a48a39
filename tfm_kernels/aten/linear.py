"""Backend "aten" of linear: PyTorch's own."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from .._autocast import beyond_autocast
from ._rows import closed


@beyond_autocast
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(..., K) -> (..., N); the arguments are those of ops.linear, already checked."""
    return F.linear(closed(x), weight, bias)
