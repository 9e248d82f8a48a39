"""A call of attention or attention_varlen as dense problems: who sees whom and what dropout keeps, written out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .. import dropout
from ..mask import Mask


@dataclass(frozen=True)
class Problem:
    """One dense attention: storage tensors (B, H, T, D) and everything else written out per (B, Hq, Tq, Tk)."""

    query: Tensor
    key: Tensor
    value: Tensor
    attend: Tensor
    bias: Tensor | None
    scale: float
    keep: Tensor | None  # dropout's, or None without dropout
    dropout_p: float


def problem_of(inputs: Mapping[str, Any]) -> Problem:
    """The problem of a dense call."""
    query, key = inputs["query"], inputs["key"]
    (batch, heads, tq, d), tk = query.shape, key.shape[2]
    mask, bias = inputs.get("mask"), inputs.get("bias")
    if isinstance(mask, Tensor) and mask.is_floating_point():  # added to the scores, as in torch
        if bias is not None:
            raise ValueError("judge: attention: a floating mask is a bias; give one of the two")
        mask, bias = None, mask
    elif isinstance(mask, Tensor):
        mask = Mask.keep(mask)
    attend = (mask or Mask()).dense(batch, heads, tq, tk, query.device)
    p, keep = inputs.get("dropout_p", 0.0), None
    if p > 0.0:
        keep = dropout.keep_mask(inputs["seed"], p, dropout.attention_rows(batch, heads, tq, query.device), tk)
    return Problem(query, key, inputs["value"], attend, bias, scale_of(inputs, d), keep, p)


@dataclass(frozen=True)
class Rows:
    """Where one segment lies in the packed tensors."""

    query: slice
    key: slice


def segments_of(inputs: Mapping[str, Any]) -> list[tuple[Rows, Problem]]:
    """The problem of each segment of a packed call."""
    query, key, value = inputs["query"], inputs["key"], inputs["value"]
    heads, d = query.shape[1:]
    mask, p = inputs.get("mask") or Mask(), inputs.get("dropout_p", 0.0)
    ends_q, ends_k = inputs["cu_seqlens_q"].tolist(), inputs["cu_seqlens_k"].tolist()
    segments = []
    for b in range(len(ends_q) - 1):
        rows = Rows(slice(ends_q[b], ends_q[b + 1]), slice(ends_k[b], ends_k[b + 1]))
        tq, tk = ends_q[b + 1] - ends_q[b], ends_k[b + 1] - ends_k[b]
        attend, keep = mask.dense(1, heads, tq, tk, query.device), None
        if p > 0.0:
            numbers = dropout.attention_rows(b + 1, heads, inputs["max_seqlen_q"], query.device)[b:, :, :tq]
            keep = dropout.keep_mask(inputs["seed"], p, numbers, tk)
        parts = packed(query, rows.query), packed(key, rows.key), packed(value, rows.key)
        segments.append((rows, Problem(*parts, attend, None, scale_of(inputs, d), keep, p)))
    return segments


def packed(tensor: Tensor, rows: slice) -> Tensor:
    """(total, H, D) -> (1, H, T, D)."""
    return tensor[rows].transpose(0, 1).unsqueeze(0)


def scale_of(inputs: Mapping[str, Any], width: int) -> float:
    """The scale of a call, 1 / sqrt(D) by default."""
    scale = inputs.get("scale")
    return width**-0.5 if scale is None else scale
