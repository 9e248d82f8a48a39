"""Attention by PyTorch's own best, F.scaled_dot_product_attention, with what lies in padding kept out.

Two lines of the semantics are not kept here. A query row of NaN gives NaN on every other backend, and 0 from PyTorch's
CPU kernel where its keys are fewer than one vector register holds (seen in 2.13: 15 or less in float32 with AVX-512).
Looking for NaN would cost a pass over the queries. And where a bias gives all keys of a row one large finite number, as
-1e9, which swallows the scores, the gradients of that kernel are as many times too large as there are keys.

PyTorch's fused attention knows no forward-mode differentiation: asked for it, its written-out formula runs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from .._autocast import beyond_autocast
from ..mask import Band, Mask


@beyond_autocast
def plain_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """out of a dense call without mask and bias; a scale of None is 1 / sqrt(D)."""
    return _attend(q, k, v, scale)


@beyond_autocast
def attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, bias: Tensor | None, scale: float | None) -> Tensor:
    """out of a dense call; a scale of None is 1 / sqrt(D)."""
    if bias is None and not mask.hides():
        return plain_attention(q, k, v, scale)
    batch, heads, queries, _ = q.shape
    key_heads, keys = k.shape[1], k.shape[2]
    if mask.key_lengths is None and mask.keep_matrix is None and bias is None:
        band = mask.band(queries, keys)
        if band.high >= keys and band.low <= -queries:
            return _attend(q, k, v, scale)
        if band == Band(high=0):  # keys behind the last query are seen by none: leave them out
            k, v = k[:, :, :queries], v[:, :, :queries]
            return _attend(q, k, v, scale, is_causal=True)
    visible = mask.visible(queries, keys, q.device, bias)
    assert visible is not None  # a call in which nothing is hidden is plain
    seen = visible.any(-2).unsqueeze(-1)  # (B or 1, Hq or 1, Tk or 1, 1)
    sees = visible.any(-1, keepdim=True)  # (B or 1, Hq or 1, Tq or 1, 1)
    if seen.shape[1] > 1 and heads != key_heads:
        k, v = (t.repeat_interleave(heads // key_heads, dim=1) for t in (k, v))
    q, k, v = q.masked_fill(~sees, 0.0), k.masked_fill(~seen, 0.0), v.masked_fill(~seen, 0.0)
    added = visible if bias is None else bias.masked_fill(~visible, -torch.inf)
    out = _attend(q, k, v, scale, added)
    if bias is not None and 0 in (batch, queries, keys):  # PyTorch leaves bias without a gradient: it is 0
        out = out + bias[..., :0].sum()
    return out.masked_fill(~sees, 0.0)


@beyond_autocast
def attention_varlen(
    query: Tensor,  # (total_q, Hq, D)
    key: Tensor,  # (total_k, Hk, D)
    value: Tensor,  # (total_k, Hk, Dv)
    mask: Mask,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    scale: float,
) -> Tensor:
    """out of a packed call, contiguous: one dense call per segment."""
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (query, key, value))
    ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    parts = [q[:, :, :0] @ k[:, :1, :0].transpose(-1, -2) @ v[:, :1, :0]]  # no row; keeps an empty call differentiable
    for i0, i1, j0, j1 in zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False):
        if i1 > i0:
            parts.append(attention(q[:, :, i0:i1], k[:, :, j0:j1], v[:, :, j0:j1], mask, None, scale))
    return torch.cat([part.squeeze(0).transpose(0, 1) for part in parts])


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, added: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    grouped = bool(q.shape[1] != k.shape[1])  # sizes are tensors while torch.jit traces
    if added is not None and added.is_floating_point() and torch.is_grad_enabled() and _is_mapped(added):
        # vmap hides from PyTorch that a bias wants its gradient, and it would take a kernel that has none for it
        return _written_out(q, k, v, added, is_causal, scale, grouped)
    try:
        return F.scaled_dot_product_attention(q, k, v, added, is_causal=is_causal, scale=scale, enable_gqa=grouped)
    except NotImplementedError:
        if forward_ad._current_level < 0:
            raise
    return _written_out(q, k, v, added, is_causal, scale, grouped)


def _is_mapped(x: Tensor) -> bool:
    return not torch.compiler.is_compiling() and torch._C._functorch.is_batchedtensor(x)


def _written_out(
    q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, is_causal: bool, scale: float | None, grouped: bool
) -> Tensor:
    if added is not None and added.dtype == torch.bool:  # which the written-out one takes for 0 and 1
        added = torch.zeros_like(added, dtype=q.dtype).masked_fill(~added, -torch.inf)
    written_out = torch._scaled_dot_product_attention_math
    return written_out(q, k, v, added, is_causal=is_causal, scale=scale, enable_gqa=grouped)[0]
