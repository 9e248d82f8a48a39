"""Mistakes of attention kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from ... import dropout
from ...mask import Mask
from ..attention_problem import Problem
from ..data import draw
from ..emulations import Emulation, Hook
from .defect import (
    NARROW,
    Build,
    Defect,
    Inputs,
    in_16_bits,
    in_tf32,
    in_type,
    lost_in_last_tile,
    missing,
    neighbour,
    one,
    planter,
    times,
    truncated,
)

B, HQ, HK, TQ, TK, D = 2, 4, 2, 96, 150, 32


def _inputs(dtype: torch.dtype, data: str = "randn", heads: int = HK, **options) -> Inputs:
    generator = torch.Generator().manual_seed(11)
    inputs: Inputs = {
        "query": draw(data, (B, HQ, TQ, D), dtype, generator),
        "key": draw(data, (B, heads, TK, D), dtype, generator),
        "value": draw(data, (B, heads, TK, D), dtype, generator),
        "return_lse": True,
        **options,
    }
    if "bias" in options:
        inputs["bias"] = draw("randn", options["bias"], dtype, generator)
    if "dropout_p" in options:
        inputs["seed"] = torch.tensor(3)
    return inputs


def _large(dtype: torch.dtype) -> Inputs:
    """Enough elements for C3."""
    generator = torch.Generator().manual_seed(12)
    inputs: Inputs = {name: draw("randn", (2, 4, 128, 64), dtype, generator) for name in ("query", "key", "value")}
    return {**inputs, "return_lse": True}


def _long(dtype: torch.dtype) -> Inputs:
    """Many tiles of keys: what is rounded once a tile adds up."""
    generator = torch.Generator().manual_seed(13)
    shapes = {"query": (1, 2, 96, 32), "key": (1, 2, 1200, 32), "value": (1, 2, 1200, 32)}
    return {name: draw("randn", shape, dtype, generator) for name, shape in shapes.items()}


def _packed(dtype: torch.dtype, **options) -> Inputs:
    generator = torch.Generator().manual_seed(14)
    ends = torch.tensor([0, 40, 40, 75, 90], dtype=torch.int32)
    inputs: Inputs = {name: draw("randn", (90, 2, 32), dtype, generator) for name in ("query", "key", "value")}
    inputs |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 48, "max_seqlen_k": 40}
    return {**inputs, **options}


def _packed_with(**options) -> Build:
    return lambda dtype: _packed(dtype, **options)


def _packed_with_nan(dtype: torch.dtype) -> Inputs:
    """The values of the third segment are NaN."""
    inputs = _packed(dtype)
    inputs["value"][40:75] = torch.nan
    return inputs


def _with(**options) -> Build:
    return lambda dtype: _inputs(dtype, **options)


_sharp = _with(data="randn4")
_causal = _with(mask=Mask.causal())
_padded = _with(mask=Mask.lengths(torch.tensor([130, 61])))
_hidden = _with(mask=Mask.lengths(torch.tensor([150, 0])))
_biased = _with(bias=(1, HQ, TQ, TK))
_dropped = _with(dropout_p=0.1)
_causal_at_the_end = _with(mask=Mask.causal("bottom_right"))
_window_at_the_end = _with(mask=Mask.window(9, 4, "bottom_right"))
_packed_dropped = _packed_with(dropout_p=0.2, seed=torch.tensor(3))


def _shifted(by: int) -> Hook:
    """The mask of the neighbouring query."""
    return lambda t, run: torch.roll(t, by, -2)


def _corner(align: Literal["top_left", "bottom_right"]) -> Hook:
    return lambda t, run: Mask.causal(align).dense(*t.shape)


def _leaky(t: Tensor, run: Emulation) -> Tensor:
    """The first padding key of each sequence is seen."""
    return t | (torch.arange(t.shape[-1]) == t.sum(-1, keepdim=True))


def _one_key_less(t: Tensor, run: Emulation) -> Tensor:
    return t & (torch.arange(t.shape[-1]) != 77)


def _row_sum_of_kept(t: Tensor, run: Emulation) -> Tensor:
    return run.context["kept"].sum(-1, keepdim=True)


def _first_heads_mask(t: Tensor, run: Emulation) -> Tensor:
    """A dropout row counter that forgets batch and head."""
    return t[:1, :1].expand(t.shape)


def _first_of_group(t: Tensor, run: Emulation) -> Tensor:
    return t * (torch.arange(t.shape[2]) == 0).view(-1, 1, 1)


def _strided_heads(t: Tensor, run: Emulation) -> Tensor:
    """Query head h reads key head h % Hk in place of h // (Hq / Hk)."""
    return t.unflatten(1, (HK, HQ // HK)).transpose(1, 2).flatten(1, 2)


def _first_batch(t: Tensor, run: Emulation) -> Tensor:
    return t * (torch.arange(t.shape[0]) == 0).view(-1, 1, 1, 1)


def _first_keys_only(t: Tensor, run: Emulation) -> Tensor:
    return t * (torch.arange(t.shape[-1]) < 128)


def _empty_rows_hold(number: float) -> Hook:
    return lambda t, run: torch.where(t == 0, number, t)


def _short_segment(inputs: Inputs, run: Emulation) -> Inputs:
    ends = inputs["cu_seqlens_k"].clone()
    ends[1] -= 1
    return {**inputs, "cu_seqlens_k": ends}


def _without(name: str) -> Hook:
    """An argument of the packed call that nobody looks at."""
    return lambda inputs, run: {**inputs, name: None}


def _rows_by_the_longest(inputs: Inputs, run: Emulation) -> Inputs:
    """Dropout's rows go by the longest segment there is, not by max_seqlen_q."""
    return {**inputs, "max_seqlen_q": 40}


def _rows_of_its_own(problem: Problem, run: Emulation) -> Problem:
    """Dropout's rows begin anew with each segment."""
    heads, queries = problem.query.shape[1:3]
    rows = dropout.attention_rows(1, heads, queries, problem.query.device)
    keep = dropout.keep_mask(torch.tensor(3), problem.dropout_p, rows, problem.key.shape[2])
    return replace(problem, keep=keep)


def _one_long_sequence(t: Tensor, run: Emulation) -> Tensor:
    """What a segment does not see is taken 0 times, which is NaN for a NaN."""
    return t + 0 * t.sum(0)


_plant = planter("attention")
_plant_packed = planter("attention_varlen")


ATTENTION: tuple[Defect, ...] = (
    _plant("causal mask shows one future key", _causal, "attend", _shifted(-1)),
    _plant("causal mask hides the present key", _causal, "attend", _shifted(1)),
    _plant("causal measured from the other corner", _causal, "attend", _corner("bottom_right")),
    _plant("bottom-right mask shows one future key", _causal_at_the_end, "attend", _shifted(-1)),
    _plant("bottom-right mask hides the present key", _causal_at_the_end, "attend", _shifted(1)),
    _plant("bottom-right mask measured from the top left", _causal_at_the_end, "attend", _corner("top_left")),
    _plant("window off by one", _with(mask=Mask.window(9, 4)), "attend", _shifted(1)),
    _plant("bottom-right window off by one", _window_at_the_end, "attend", _shifted(-1)),
    _plant("padding key leaks", _padded, "attend", _leaky),
    _plant("one visible key dropped", _inputs, "attend", _one_key_less),
    _plant("last tile of keys lost", _inputs, "tiles", lambda t, run: t[:-1]),
    _plant("first tile of keys lost", _inputs, "tiles", lambda t, run: t[1:]),
    _plant("row sum misses the last tile", _inputs, "row_sum", lost_in_last_tile),
    _plant("scale +1 %", _sharp, "scale", times(1.01)),
    _plant("scale +0.1 %", _sharp, "scale", times(1.001)),
    _plant("out +1 %", _large, "out", times(1.01)),
    _plant("out +0.1 %", _large, "out", times(1.001)),
    _plant("dq +0.2 %", _large, "dq", times(1.002)),
    _plant("dq not scaled", _inputs, "dq", times(D**0.5)),
    _plant("stores truncate", _large, "store", truncated, NARROW),
    _plant("P and dS truncate", _large, "low", truncated, NARROW),
    Defect("out accumulated in 16 bits", "attention", _long, {"acc": in_16_bits}, tile=16),
    Defect("dq accumulated in 16 bits", "attention", _long, {"dq_acc": in_16_bits}, tile=8),
    _plant("row sum in 16 bits", _inputs, "total", in_16_bits),
    _plant("scores in 16 bits", _sharp, "scores", in_16_bits),
    _plant("P in bfloat16", _inputs, "p", in_type(torch.bfloat16), (torch.float16, torch.float32)),
    _plant("exp good to 2^-11", _inputs, "p", in_type(torch.float16), (torch.float32,)),
    _plant("scores in tf32", _inputs, "scores", in_tf32, (torch.float32,)),
    _plant("output not rescaled when the maximum grows", _inputs, "alpha", one),
    _plant("row sum not rescaled when the maximum grows", _inputs, "alpha_total", one),
    _plant("dropout scale missing", _dropped, "grow", one),
    _plant("dropout differs in the backward", _dropped, "keep_bwd", neighbour),
    _plant("dropout of all heads alike", _dropped, "keep_bwd", _first_heads_mask),
    _plant("row sum counts dropped keys out", _dropped, "row_sum", _row_sum_of_kept),
    _plant("dk of a group's first head alone", _inputs, "dk_group", _first_of_group),
    _plant("dv of a group's first head alone", _inputs, "dv_group", _first_of_group),
    _plant("query heads read the wrong key head", _inputs, "heads", _strided_heads),
    _plant("dlse ignored", _inputs, "dlse", missing),
    _plant("delta missing", _inputs, "delta", times(0.0)),
    _plant("delta +1 %", _large, "delta", times(1.01), (torch.float16, torch.float32)),
    _plant("delta +3 %", _large, "delta", times(1.03)),  # 1 % drowns in bfloat16's own rounding of dS
    _plant("lse in base 2", _inputs, "lse", times(1.4426950408889634)),
    _plant("lse in 16 bits", _inputs, "lse", in_16_bits),
    _plant("lse off by 0.001", _inputs, "lse", lambda t, run: t - 0.001),
    _plant("bias ignored in the last tile", _biased, "bias", _first_keys_only),
    _plant("bias scaled like the scores", _biased, "bias", times(D**-0.5)),
    _plant("dbias of the first batch alone", _biased, "dbias_full", _first_batch),
    _plant("dbias averaged", _biased, "dbias_full", times(0.5)),
    _plant("row without keys is not 0", _hidden, "empty", _empty_rows_hold(0.1)),
    _plant("row without keys is NaN", _hidden, "empty", _empty_rows_hold(torch.nan)),
    _plant_packed("segment one key short", _packed, "segments", _short_segment),
    _plant_packed("mask of segments ignored", _packed_with(mask=Mask.causal()), "segments", _without("mask")),
    _plant_packed("scale of segments ignored", _packed_with(scale=0.3), "segments", _without("scale")),
    _plant_packed("dropout rows by the longest segment", _packed_dropped, "segments", _rows_by_the_longest),
    _plant_packed("dropout rows of each segment alike", _packed_dropped, "segment", _rows_of_its_own),
    _plant_packed("NaN crosses segments", _packed_with_nan, "packed", _one_long_sequence),
)
