"""attention and attention_varlen beside F.scaled_dot_product_attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F

from ...mask import Mask
from ..shapes import GRID, Attention
from ..subject import BACKWARD, BOTH, FORWARD, Eager, Subject, drawer


def arguments(case: Attention, dtype: str, device: str = "cpu") -> dict[str, Any]:
    """Tensors as projections leave them: (B, T, H, D) in memory, seen as (B, H, T, D); packed ones (total, H, D)."""
    draw = drawer(case.queries * 10007 + case.kv_length, dtype, device)
    if case.packed:
        given = _packed(case, draw)
    else:
        given = {
            "query": draw(case.batch, case.queries, case.heads, case.dim).transpose(1, 2),
            "key": draw(case.batch, case.kv_length, case.kv_heads, case.dim).transpose(1, 2),
            "value": draw(case.batch, case.kv_length, case.kv_heads, case.dim).transpose(1, 2),
        }
    masks = [Mask.causal()] * case.causal + [Mask.lengths(torch.tensor(case.lengths))] * case.padded
    if masks:
        given["mask"] = masks[0] if len(masks) == 1 else masks[0] & masks[1]
    if case.bias:
        given["bias"] = draw(1, case.heads, case.queries, case.kv_length)
    if case.dropout_p:
        given["dropout_p"] = case.dropout_p
    return given


def _packed(case: Attention, draw: Any) -> dict[str, Any]:
    total = sum(case.lengths)
    ends = torch.tensor([0, *accumulate(case.lengths)])
    given = {name: draw(total, case.heads, case.dim) for name in ("query", "key", "value")}
    longest = {"max_seqlen_q": case.queries, "max_seqlen_k": case.kv_length}
    return {**given, "cu_seqlens_q": ends, "cu_seqlens_k": ends, **longest}


def eager(case: Attention, given: Mapping[str, Any]) -> Eager:
    """SDPA with the mask a model would build once for all its layers, outside of the timing.

    Packed calls meet SDPA on tensors that are padded already: what a model without packing runs.
    """
    leaves = {name: given[name] for name in ("query", "key", "value")}
    device = given["query"].device
    if case.packed:
        shape = (case.batch, case.heads, case.queries, case.dim)
        leaves = {name: torch.randn(shape, device=device).to(value.dtype) for name, value in leaves.items()}
    attend = None
    if case.padded or case.packed:
        mask = Mask.lengths(torch.tensor(case.lengths))
        attend = mask.dense(case.batch, 1, 1, case.kv_length, device)
        if case.causal:
            mask = mask & Mask.causal()
            attend = mask.dense(case.batch, 1, case.queries, case.kv_length, device).contiguous()
    options = {"is_causal": case.causal and attend is None, "enable_gqa": case.kv_heads != case.heads}

    def attention(query, key, value, bias=None):
        added = attend if bias is None else bias
        return F.scaled_dot_product_attention(query, key, value, added, case.dropout_p, **options)

    return attention, leaves | ({"bias": given["bias"]} if case.bias else {})


def proof(case: Attention) -> Attention:
    """Fewer sequences and heads; the same lengths, so the same tiles at the same edges."""
    group = case.heads // case.kv_heads
    heads, key_heads = (group, 1) if group > 1 else (2, 0)
    return replace(case, batch=min(case.batch, 2), heads=heads, key_heads=key_heads)


def visible(case: Attention) -> int:
    """How many (query, key) pairs of one head attend, over the batch."""
    total = 0
    for keys in case.lengths:
        queries = keys if case.packed else case.queries
        if not case.causal:
            total += queries * keys
        else:
            corner = min(queries, keys)
            total += corner * (corner + 1) // 2 + (queries - corner) * keys
    return total


def flops(case: Attention, direction: str) -> int:
    """Two products over the visible pairs forward, five backward."""
    products = {FORWARD: 2, BACKWARD: 5, BOTH: 7}[direction]
    return 2 * products * case.heads * case.dim * visible(case)


def bytes_moved(case: Attention, itemsize: int, direction: str) -> int:
    """Forward q, live k and v in, out; backward q, k, v, out, dout in, dq, dk, dv out; bias in and dbias out."""
    rows = sum(case.lengths) if case.packed else case.batch * case.queries
    q, kv = rows * case.heads * case.dim, sum(case.lengths) * case.kv_heads * case.dim
    bias = case.heads * case.queries * case.kv_length if case.bias else 0
    forward, backward = 2 * q + 2 * kv + bias, 4 * q + 4 * kv + 2 * bias
    return {FORWARD: forward, BACKWARD: backward, BOTH: forward + backward}[direction] * itemsize


SUBJECT = Subject(
    "attention", GRID["attention"], arguments, eager, proof, flops, bytes_moved,
    lambda case: not (case.dropout_p or case.packed),
)  # fmt: skip
