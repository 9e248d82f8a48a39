"""Backend "reference" of linear_cross_entropy: LCE.1 to LCE.3 as they stand, in float64, rounded once at the end."""

from __future__ import annotations

import torch
from torch import Tensor


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
    counted = target != ignore_index
    # what stands in a row that is ignored reaches nothing, NaN neither
    logits = torch.where(counted.unsqueeze(1), x.double(), 0.0) @ weight.double().T
    if bias is not None:
        logits = logits + bias.double()
    of_target = logits.gather(1, torch.where(counted, target, 0).unsqueeze(1)).squeeze(1)
    loss = logits.logsumexp(1) - (1.0 - label_smoothing) * of_target
    if label_smoothing > 0.0:
        loss = loss - label_smoothing * logits.mean(1)
    loss = torch.where(counted, loss, 0.0)
    if reduction != "none":
        loss = loss.sum()
    if reduction == "mean":
        loss = loss / counted.sum()
    return loss.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
