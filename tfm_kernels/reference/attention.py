"""Attention in plain PyTorch, float64 inside, rounded once: the judge of the other backends.

Differentiable by torch's autograd, as often as one likes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import dropout
from ..mask import Mask


def attention(
    query: Tensor,  # (B, Hq, Tq, D)
    key: Tensor,  # (B, Hk, Tk, D)
    value: Tensor,  # (B, Hk, Tk, Dv)
    mask: Mask,
    bias: Tensor | None,  # broadcasts to (B, Hq, Tq, Tk)
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of a dense call."""
    batch, heads, queries, _ = query.shape
    keys = key.shape[2]
    factors = None
    if seed is not None:
        rows = dropout.attention_rows(batch, heads, queries, query.device)
        factors = dropout.keep_mask(seed, dropout_p, rows, keys).double() * dropout.keep_scale(dropout_p)
    visible = mask.dense(batch, heads, queries, keys, query.device)
    out, lse = _attend(query, key, value, visible, bias, scale, factors)
    return out.transpose(1, 2).contiguous().transpose(1, 2), lse


def attention_varlen(
    query: Tensor,  # (total_q, Hq, D)
    key: Tensor,  # (total_k, Hk, D)
    value: Tensor,  # (total_k, Hk, Dv)
    mask: Mask,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of a packed call, as the dense one of padded segments: what they hold then lies in no one sum."""
    heads, longest = query.shape[1], (min(max_seqlen_q, query.shape[0]), min(max_seqlen_k, key.shape[0]))
    q_places, k_places = _places(cu_seqlens_q, query.shape[0]), _places(cu_seqlens_k, key.shape[0])
    q = _padded(query, cu_seqlens_q, q_places, longest[0])
    k, v = (_padded(t, cu_seqlens_k, k_places, longest[1]) for t in (key, value))
    lengths_q, lengths_k = (ends.long().diff()[:, None, None] for ends in (cu_seqlens_q, cu_seqlens_k))
    i, j = (torch.arange(length, device=query.device) for length in longest)
    step = j - i.unsqueeze(1)  # (longest query, longest key)
    from_end = step - (lengths_k - lengths_q)  # (B, ...): from the segment's own bottom-right corner
    visible = (i.unsqueeze(1) < lengths_q) & (j < lengths_k)
    visible = visible & (step >= mask.top_left.low) & (step <= mask.top_left.high)
    visible = visible & (from_end >= mask.bottom_right.low) & (from_end <= mask.bottom_right.high)
    factors = None
    if seed is not None:
        first = torch.arange(q.shape[0] * heads, device=query.device).view(-1, heads, 1) * max_seqlen_q
        kept = dropout.keep_mask(seed, dropout_p, first + i, longest[1])  # (B, Hq, longest query, longest key)
        factors = kept.double() * dropout.keep_scale(dropout_p)
    out, lse = _attend(q, k, v, visible.unsqueeze(1).expand(-1, heads, -1, -1), None, scale, factors)
    segment, place = q_places
    return out[segment, :, place], lse.transpose(0, 1)[:, segment, place]


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,  # (B, Hq, Tq, Tk) bool
    bias: Tensor | None,
    scale: float,
    factors: Tensor | None,  # dropout's
) -> tuple[Tensor, Tensor]:
    heads, keys = visible.shape[1], visible.shape[3]
    if bias is not None:
        visible = visible & (bias != -torch.inf)
    sees = visible.any(-1, keepdim=True)  # (B, Hq, Tq, 1): the row sees a key
    seen = visible.any(-2).unsqueeze(-1)  # (B, Hq, Tk, 1): the key is seen by a row

    group = heads // key.shape[1] if key.shape[1] else 1
    q = query.double().masked_fill(~sees, 0.0)
    k = key.double().repeat_interleave(group, dim=1).masked_fill(~seen, 0.0)
    v = value.double().repeat_interleave(group, dim=1).masked_fill(~seen, 0.0)

    sound = (q * 0.0).sum(-1, keepdim=True)  # NaN for a row of NaN or inf, else 0; what hides hides it too
    x = (q.where(sound == 0.0, 0.0) @ k.transpose(-1, -2)) * scale + sound  # A.1
    if bias is not None:
        x = x + bias.double().masked_fill(bias == -torch.inf, 0.0)
    x = x.masked_fill(~visible, -torch.inf)
    shift = x.detach().amax(-1, keepdim=True) if keys else x.detach().sum(-1, keepdim=True)
    shift = shift.masked_fill(~sees, 0.0)
    e = (x - shift).exp()
    total = e.sum(-1, keepdim=True).masked_fill(~sees, 1.0)
    lse = (shift + total.log()).masked_fill(~sees, -torch.inf).squeeze(-1)  # A.2
    p = (e / total).masked_fill(~visible, 0.0)  # A.3
    if factors is not None:
        p = p * factors
    out = (p @ v).masked_fill(~sees, 0.0)  # A.4
    return out.to(query.dtype), lse.to(torch.float64 if query.dtype == torch.float64 else torch.float32)


def _places(cu_seqlens: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """(total,) int64 each: the segment of every token, and its place there."""
    cu_seqlens = cu_seqlens.long()
    token = torch.arange(total, device=cu_seqlens.device)
    segment = torch.bucketize(token, cu_seqlens[1:], right=True)
    return segment, token - cu_seqlens[segment]


def _padded(packed: Tensor, cu_seqlens: Tensor, places: tuple[Tensor, Tensor], longest: int) -> Tensor:
    """(total, H, D) as (B, H, longest, D), with zeros behind each segment."""
    empty = packed.new_zeros(cu_seqlens.shape[0] - 1, longest, *packed.shape[1:])
    return empty.index_put(places, packed).transpose(1, 2)
