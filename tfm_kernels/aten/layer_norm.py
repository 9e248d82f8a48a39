"""PyTorch's own best for the layer_norm family: F.layer_norm, F.rms_norm, and a sum before them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import dropout
from .._autocast import beyond_autocast


@beyond_autocast
def norm(z: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *, rms: bool = False) -> Tensor:
    """F.layer_norm or F.rms_norm over the last dimension, in the dtype of ``z``.

    Args:
        z: (..., N).
        weight: (N,) or None, any floating dtype.
        bias: (N,) or None.
        eps: added inside the square root.
        rms: RMSNorm instead of LayerNorm.
    """
    shape = (z.shape[-1],)
    if rms:
        return F.rms_norm(z, shape, None if weight is None else weight.to(z.dtype), eps)
    dtype = z.dtype
    if (weight is None or weight.dtype == dtype) and (bias is None or bias.dtype == dtype):
        return torch.layer_norm(z, shape, weight, bias, eps)  # F.layer_norm without its 1 us of Python
    if not (z.device.type == "cpu" and z.dtype in (torch.float16, torch.bfloat16)):
        weight, bias = (None if p is None else p.to(z.dtype) for p in (weight, bias))
    else:  # torch's CPU kernel takes float32 parameters, both of them
        weight = torch.ones(shape) if weight is None else weight.float()
        bias = torch.zeros(shape) if bias is None else bias.float()
    return F.layer_norm(z, shape, weight, bias, eps)


def add(x: Tensor, residual: Tensor, dropout_p: float, seed: Tensor | None, rows: Tensor | None) -> Tensor:
    """z = residual + dropout(x), by the project's random rule; arguments as in ``reference.layer_norm.add``."""
    if dropout_p > 0.0:
        assert seed is not None
        if rows is None:
            rows = torch.arange(x.numel() // max(x.shape[-1], 1), device=x.device)
        keep = dropout.keep_mask(seed, dropout_p, rows, x.shape[-1]).view(x.shape)
        x = torch.where(keep, x * dropout.keep_scale(dropout_p), 0.0)
    return residual + x
