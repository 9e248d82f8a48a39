"""Attention with its weights, for modules that return both."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _backend, dropout, ops
from .._autocast import beyond_autocast
from .._library import transformed
from ..mask import Mask
from ..ops.attention_call import AttentionCall, on_host
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

    The weights are differentiable. PyTorch's own attention has no lse: in its place stands the written-out formula,
    which automatic choice takes as well where it is faster.
    """
    seed = dropout.draw_seed(query.device, dropout_p) if dropout_p > 0.0 else None
    options: dict[str, Any] = {"bias": bias, "scale": scale, "dropout_p": dropout_p, "seed": seed}
    entry = _backend.OPS["attention"]
    named = backend if backend is not None else _backend.forced()
    chosen = "aten" if named is None and _is_composed(query, dropout_p) else named
    if chosen is None:
        fused = entry.describe(query, key, value, mask, **options, return_lse=True)
        chosen = _backend.select(entry, fused, None)
    if chosen == "aten" or (named is None and chosen == "reference"):
        call = entry.describe(query, key, value, mask, **options)
        result = _composed(query, call, average)
        tell(call, None)
        return result
    out, lse = ops.attention(query, key, value, mask, **options, return_lse=True, backend=chosen)
    return out, ops.attention_weights(query, key, lse, mask, **options, average=average)


def _is_composed(query: Tensor, dropout_p: float) -> bool:
    """Whether PyTorch's functions are faster where weights are asked for, as they are by default in torch.nn.

    On a CPU and in float32 (float64, which checks gradients, goes the same way) the formula takes 0.35 to 0.6 of the
    time of fused attention and of weights made anew from its lse; dropout it would draw in plain torch, and 16 bits it
    would round more often.
    """
    return query.device.type == "cpu" and query.dtype in (torch.float32, torch.float64) and dropout_p == 0.0


@beyond_autocast
def _composed(query: Tensor, call: AttentionCall, average: bool) -> tuple[Tensor, Tensor]:
    """(out, weights) by the equations of ops.attention in torch's functions; what no query sees is kept out of them."""
    bias, seed = call.bias, call.seed
    q, k, v = query, call.key, call.value
    batch, heads, queries, keys = *q.shape[:3], k.shape[2]
    if k.shape[1] != heads:  # several heads of queries share one of keys
        k, v = (t.repeat_interleave(heads // t.shape[1], dim=1) for t in (k, v))
    visible = call.mask.visible(queries, keys, q.device, bias)
    blind = None
    if visible is not None:
        blind, unseen = ~visible.any(-1, keepdim=True), ~visible.any(-2).unsqueeze(-1)
        q, k, v = q.masked_fill(blind, 0.0), k.masked_fill(unseen, 0.0), v.masked_fill(unseen, 0.0)
    x = (q * call.scale) @ k.transpose(-1, -2)
    if bias is not None:
        x = x + bias.masked_fill(bias == -torch.inf, 0.0)
    if visible is not None and blind is not None:
        x = x.masked_fill(~(visible | blind), -torch.inf)
    statistics = torch.promote_types(q.dtype, torch.float32)
    if x.dtype == statistics and not x.requires_grad and not torch.compiler.is_compiling() and not transformed():
        weights = torch.softmax(x, -1, out=x)  # new memory costs as much as the powers
    else:
        weights = x.softmax(-1, dtype=statistics)
    if blind is not None and not (on_host(blind) and not blind.any()):
        weights = weights.masked_fill(blind, 0.0)
    if seed is not None:
        keep = dropout.keep_mask(seed, call.dropout_p, dropout.attention_rows(batch, heads, queries, q.device), keys)
        weights = weights * keep * dropout.keep_scale(call.dropout_p)
    weights = weights.to(q.dtype)
    out = (weights @ v).transpose(1, 2).contiguous().transpose(1, 2)
    return out, weights.mean(1) if average else weights
