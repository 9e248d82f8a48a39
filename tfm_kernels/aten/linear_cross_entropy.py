"""Backend "aten" of linear_cross_entropy: PyTorch's own linear layer and loss, as autocast runs them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .._autocast import beyond_autocast
from ._rows import closed


@beyond_autocast
def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
) -> Tensor:
    """(M, K) -> () or (M,); the arguments are those of ops.linear_cross_entropy, already checked."""
    logits = F.linear(closed(x), weight, bias)
    logits = logits if x.dtype == torch.float64 else logits.float()
    return F.cross_entropy(
        logits, target, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=reduction
    )
