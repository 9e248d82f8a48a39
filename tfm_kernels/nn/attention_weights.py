"""Attention with its weights, for modules that return both."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _backend, dropout, ops
from .._autocast import beyond_autocast
from ..mask import Mask


def with_weights(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None,
    bias: Tensor | None,
    p: float,
    average: bool,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    """(out, weights), out from the fused attention where a backend with lse runs, weights recomputed from lse.

    The weights are differentiable. PyTorch's own attention has no lse: in its place stands the written-out formula.
    """
    seed = dropout.draw_seed(q.device) if p > 0.0 else None
    options: dict[str, Any] = {"bias": bias, "dropout_p": p, "seed": seed}
    entry = _backend.OPS["attention"]
    named = backend if backend is not None else _backend._forced
    chosen = named or _backend.select(entry, entry.describe(q, k, v, mask, **options, return_lse=True), None)
    if named == "aten" or (named is None and chosen == "reference"):
        return _composed(q, k, v, mask, average=average, **options)
    out, lse = ops.attention(q, k, v, mask, **options, return_lse=True, backend=chosen)
    return out, ops.attention_weights(q, k, lse, mask, **options, average=average)


@beyond_autocast
def _composed(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, bias: Tensor | None, dropout_p: float, seed: Tensor | None,
    average: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, weights) by the equations of ops.attention in torch's functions; what no query sees is kept out of them."""
    sizes = q.shape[0], q.shape[1], q.shape[2], k.shape[2]
    visible = (Mask() if mask is None else mask).dense(*sizes, q.device)
    if bias is not None:
        visible = visible & (bias != -torch.inf)
    sees, seen = visible.any(-1, keepdim=True), visible.any(-2).unsqueeze(-1)
    q, k, v = q.masked_fill(~sees, 0.0), k.masked_fill(~seen, 0.0), v.masked_fill(~seen, 0.0)
    x = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    if bias is not None:
        x = x + bias.masked_fill(bias == -torch.inf, 0.0)
    x = x.masked_fill(~visible & sees, -torch.inf)
    weights = x.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).masked_fill(~visible, 0.0)
    if seed is not None:
        keep = dropout.keep_mask(seed, dropout_p, dropout.attention_rows(*sizes[:3], q.device), sizes[3])
        weights = weights * keep * dropout.keep_scale(dropout_p)
    weights = weights.to(q.dtype)
    out = (weights @ v).transpose(1, 2).contiguous().transpose(1, 2)
    return out, weights.mean(1) if average else weights
