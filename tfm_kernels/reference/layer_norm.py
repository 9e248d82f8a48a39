"""The reference of the layer_norm family: plain PyTorch in float64, rounded once. To be read, and to judge by."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import dropout


def norm(
    z: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    eps_outside: float = 0.0,
    *,
    rms: bool = False,
    unbiased: bool = False,
) -> Tensor:
    """LayerNorm (or RMSNorm) over the last dimension, rounded to the dtype of ``z``.

    Args:
        z: (..., N), any floating dtype.
        weight: (N,) or None.
        bias: (N,) or None.
        eps: added inside the square root.
        eps_outside: added to the root.
        rms: divide by the root mean square and do not subtract the mean.
        unbiased: divide the sum of squares by N - 1 instead of N.

    Returns:
        (..., N), dtype of ``z``, contiguous. Differentiable, also twice.
    """
    wide = z.double()
    if rms:
        variance = wide.square().mean(-1, keepdim=True)
        centred = wide
    else:
        centred = wide - wide.mean(-1, keepdim=True)
        variance = centred.square().sum(-1, keepdim=True) / (z.shape[-1] - (1 if unbiased else 0))
    y = centred / (_root(variance + eps) + eps_outside)
    if weight is not None:
        y = y * weight.double()
    if bias is not None:
        y = y + bias.double()
    return y.to(z.dtype).contiguous()


def _root(squared: Tensor) -> Tensor:
    """The square root, whose gradient at 0 is 0: a row of equal numbers has one."""
    zero = squared == 0
    return torch.where(zero, 0.0, torch.sqrt(torch.where(zero, 1.0, squared)))


def add(x: Tensor, residual: Tensor, dropout_p: float, seed: Tensor | None, rows: Tensor | None) -> Tensor:
    """z = residual + dropout(x), rounded once to the promoted dtype of both.

    Args:
        x: (..., N).
        residual: as ``x``, may differ in dtype.
        dropout_p: probability to drop.
        seed: () int64, or None where dropout_p is 0.
        rows: (M,) int64 row numbers of the random rule, or None to count from 0.
    """
    wide = x.double()
    if dropout_p > 0.0:
        assert seed is not None
        count = x.numel() // x.shape[-1] if x.numel() else 0
        if rows is None:
            rows = torch.arange(count, device=x.device)
        keep = dropout.keep_mask(seed, dropout_p, rows, x.shape[-1]).view(x.shape)
        wide = torch.where(keep, wide * dropout.keep_scale(dropout_p), 0.0)
    return (residual.double() + wide).to(torch.promote_types(x.dtype, residual.dtype))
