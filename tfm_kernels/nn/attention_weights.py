"""Attention with its weights, for modules that return both."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _backend, dropout, ops
from .._autocast import beyond_autocast
from ..mask import Mask
from ..ops.attention_call import AttentionCall
from ..ops.attention_watch import tell


def with_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | Tensor | None,
    *,
    bias: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    average: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, weights), out from the fused attention where a backend with lse runs, weights recomputed from lse.

    The weights are differentiable. PyTorch's own attention has no lse: in its place stands the written-out formula.
    """
    seed = dropout.draw_seed(query.device) if dropout_p > 0.0 else None
    options: dict[str, Any] = {"bias": bias, "scale": scale, "dropout_p": dropout_p, "seed": seed}
    entry = _backend.OPS["attention"]
    named = backend if backend is not None else _backend._forced
    chosen = named or _backend.select(entry, entry.describe(query, key, value, mask, **options, return_lse=True), None)
    if named == "aten" or (named is None and chosen == "reference"):
        call = entry.describe(query, key, value, mask, **options)
        result = _composed(query, call, average)
        tell(call, None)
        return result
    out, lse = ops.attention(query, key, value, mask, **options, return_lse=True, backend=chosen)
    return out, ops.attention_weights(query, key, lse, mask, **options, average=average)


@beyond_autocast
def _composed(query: Tensor, call: AttentionCall, average: bool) -> tuple[Tensor, Tensor]:
    """(out, weights) by the equations of ops.attention in torch's functions; what no query sees is kept out of them."""
    bias, seed = call.bias, call.seed
    k, v = call.key, call.value
    sizes = query.shape[0], query.shape[1], query.shape[2], k.shape[2]
    if k.shape[1] != sizes[1]:  # several heads of queries share one of keys
        k, v = (t.repeat_interleave(sizes[1] // t.shape[1], dim=1) for t in (k, v))
    visible = call.mask.dense(*sizes, query.device)
    if bias is not None:
        visible = visible & (bias != -torch.inf)
    sees, seen = visible.any(-1, keepdim=True), visible.any(-2).unsqueeze(-1)
    q, k, v = query.masked_fill(~sees, 0.0), k.masked_fill(~seen, 0.0), v.masked_fill(~seen, 0.0)
    x = (q * call.scale) @ k.transpose(-1, -2)
    if bias is not None:
        x = x + bias.masked_fill(bias == -torch.inf, 0.0)
    x = x.masked_fill(~visible & sees, -torch.inf)
    weights = x.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).masked_fill(~visible, 0.0)
    if seed is not None:
        keep = dropout.keep_mask(seed, call.dropout_p, dropout.attention_rows(*sizes[:3], q.device), sizes[3])
        weights = weights * keep * dropout.keep_scale(call.dropout_p)
    weights = weights.to(q.dtype)
    out = (weights @ v).transpose(1, 2).contiguous().transpose(1, 2)
    return out, weights.mean(1) if average else weights
