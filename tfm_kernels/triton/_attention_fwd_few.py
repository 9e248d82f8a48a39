"""attention_fwd of few queries against many keys, as in decoding with a cache of keys and values: A.1 to A.4.

Owns:    one program = the queries of a group's heads, which share their keys, as rows of one tile, against one part of
         the keys; row r is query r // G of the group's head r % G. The keys that a tile sees are parted so that
         sequences, key heads and parts fill the multiprocessors; parts that a sequence does not reach end at once.
Method:  online softmax as in attention_fwd.py. Where there is more than one part, each leaves in float32 what it would
         go on with: the sum of the values, the sum of the weights and the largest score. (lse would not do: beside a
         large score it loses the sum.) A second kernel, one row a program, adds the parts up in their order.
         Keys that no row of the tile sees are not loaded, so that NaN in padding reaches nothing.
Traffic: reads k and v once for every block_m rows of a group, without those that keep or bias hide; with parts writes
         and reads (Dv + 2) floats for each row and part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import _launch
from ._attention import (
    band,
    finish,
    kernel,
    keys_met,
    load_at,
    near,
    sequence,
    start,
    store_at,
    tiles_met,
    weigh,
)
from ._attention_call import Call, Config, rows_aligned
from ._attention_pairs import kept_pairs, shown_pairs
from ._tile import keep_tile, sum_of_rows

FEW = 16  # queries: more fill tiles of one head's
MANY = 64  # keys: fewer are one tile
MOST_PARTS = 256
SHARE = tl.constexpr(16)  # parts that are added up at once
RESIDENT = 8  # warps that a multiprocessor holds at once: they take some 200 registers a thread
WAVES = 4
# in tiles of keys: what a program costs before its first one, and what the second kernel costs
BEGIN, MERGE = 2, 4
# Compilations for one combination of storage types and of optional arguments, whatever the shapes: five head widths, 16
# or 32 rows, results whose rows start at multiples of 16 bytes, others, and parts; the second kernel knows no kinds.
MAX_COMPILATIONS = {"attention_fwd_few_kernel": 30, "attention_fwd_merge_kernel": 10}


@dataclass(frozen=True)
class FewConfig(Config):
    """As Config, of a tile of block_m rows: the group's heads times their queries.

    Attributes:
        parts: into how many the keys are parted.
        part_tiles: how many tiles of keys a part has; the last may have fewer.
    """

    parts: int = 1
    part_tiles: int = 0

    def arguments(self) -> dict[str, Any]:
        """What the kernels are launched with."""
        return {**super().arguments(), "PARTS": self.parts, "PART_TILES": self.part_tiles}


def pick_config(
    dim: int, group: int, queries: int, keys: int, reach: int, units: int, extras: str, dtype: torch.dtype,
    capability: tuple[int, int],
) -> FewConfig | None:  # fmt: skip
    """The launch for few queries against many keys, None for other calls.

    Args:
        dim: the larger of D and Dv.
        group: query heads that share a key head.
        queries: of the longest sequence.
        keys: likewise.
        reach: the most keys that the band shows to a sequence, as Call.reach() says.
        units: pairs of a sequence and a key head.
        extras: "none", or what a tile of scores meets, as Call.extras() says.
        dtype: the storage type.
        capability: of the device, which tells how many multiprocessors it has.

    16 bits: 64 keys at once, of which as many are on their way as two programs have room for; ``extras``, which are
    asked for before the keys, take registers. float32 multiplies without matrix units: tiles of what a thread can hold.
    """
    if not 0 < queries <= FEW or min(keys, reach) <= MANY:
        return None
    block_d = max(16, _launch.next_power_of_2(dim))
    block_m = 16 if group * queries <= 16 else 32
    if dtype == torch.float32:
        block_n, chunk, num_stages = 16, 16, 1
    else:
        block_n, chunk = 64 if block_d < 256 else 32 if block_m == 16 or extras == "none" else 16, 0
        num_stages = 4 if block_d <= 64 else 3 if capability[0] >= 9 and not _launch.small_shared(capability) else 2
        num_stages = num_stages if extras == "none" else 2
    num_warps = 8 if block_m == 32 and block_d >= (128 if extras == "none" else 64) else 4
    tiles = _launch.cdiv(keys, block_n)
    if reach < keys:
        tiles = min(tiles, _launch.cdiv(reach, block_n) + 1)  # they may begin anywhere in a tile
    places = RESIDENT // num_warps * _launch.MULTIPROCESSORS.get(capability[0], 132)
    parts = part(_launch.cdiv(group * queries, block_m) * units, tiles, places)
    return FewConfig(block_m, block_n, block_d, chunk, num_warps, num_stages, 255, *parts)


def part(units: int, tiles: int, places: int) -> tuple[int, int]:
    """(parts, tiles of each) for ``units`` times so many tiles, ``places`` programs running at once: the soonest end.

    Tried are one part, and as many as fill the places once, twice and so on.
    """
    best = _launch.cdiv(units, places) * (tiles + BEGIN), 1, tiles
    for waves in range(1, WAVES + 1):
        each = _launch.cdiv(tiles, max(1, min(MOST_PARTS, tiles, waves * places // units)))
        parts = _launch.cdiv(tiles, each)
        best = min(best, (_launch.cdiv(units * parts, places) * (each + BEGIN) + MERGE, parts, each))
    return best[1:]


@triton.jit
def keys_of(row_tile, tq, live, low, high, G, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(begin, end, first, last): the keys that some row of a tile sees, and the tiles that they lie in."""
    m0 = row_tile * BLOCK_M // G
    m1 = tl.minimum((row_tile * BLOCK_M + BLOCK_M - 1) // G + 1, tq)
    begin, end, _, _ = keys_met(m0, m1, live, low, high, BLOCK_M)
    first, _, _, last = tiles_met(begin, end, begin, end, BLOCK_N)
    return begin, end, first, last


@triton.jit
def load_row_pairs(ptr, offsets, exist, n0, tk, stride_d, other, BLOCK_N: tl.constexpr):
    """As load_pairs, of the rows that begin at ``offsets``."""
    columns = tl.arange(0, BLOCK_N)
    mask = exist[:, None] & (columns < near(tk - n0, 4096))[None, :]
    ptrs = ptr + n0 * stride_d + offsets[:, None] + (columns * stride_d)[None, :]
    return tl.load(ptrs, mask=mask, other=other)


@triton.jit
def row_dots(
    q, q_ptr, q_offsets, exist, k_ptr, k_offsets, chosen, D, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(BLOCK_M, BLOCK_N) as dots, of rows that begin at these offsets."""
    if CHUNK == 0:
        found = tl.dot(q, tl.trans(load_at(k_ptr, k_offsets, chosen, D, BLOCK_D)), input_precision=PRECISION)
    else:
        found = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for d in range(0, D, CHUNK):
            left = load_at(q_ptr + d, q_offsets, exist, D - d, CHUNK)
            right = load_at(k_ptr + d, k_offsets, chosen, D - d, CHUNK)
            found = tl.dot(left, tl.trans(right), found, input_precision=PRECISION)
    return found


@kernel
def attention_fwd_few_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, keep_ptr, lengths_ptr, cu_q_ptr, cu_k_ptr, seed_ptr, out_ptr, lse_ptr, parts_ptr,
    numbers_ptr, H: tl.int32, G: tl.int32, Tq: tl.int32, Tk: tl.int32, PARTS: tl.int32, PART_TILES: tl.int32,
    total_q: tl.int64, total_k: tl.int64, row_step: tl.int64, part_step: tl.int64, D: tl.int32, DV: tl.int32,
    OUT_D: tl.int32,
    q_stride_b: tl.int64, q_stride_h: tl.int64, q_stride_t: tl.int64,
    k_stride_b: tl.int64, k_stride_h: tl.int64, k_stride_t: tl.int64,
    v_stride_b: tl.int64, v_stride_h: tl.int64, v_stride_t: tl.int64,
    out_stride_b: tl.int64, out_stride_h: tl.int64, out_stride_t: tl.int64,
    lse_stride_b: tl.int64, lse_stride_h: tl.int64,
    bias_stride_b: tl.int64, bias_stride_h: tl.int64, bias_stride_t: tl.int64, bias_stride_d: tl.int64,
    keep_stride_b: tl.int64, keep_stride_h: tl.int64, keep_stride_t: tl.int64, keep_stride_d: tl.int64,
    low: tl.int64, high: tl.int64, end_low: tl.int64, end_high: tl.int64,
    scale, step, unit, keep_scale, last_dropped: tl.int32,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, OUT_ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr, SHIELDED: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A tile of rows against one part of their keys; those that read the same keys follow each other."""
    tiles = (Tq * G + BLOCK_M - 1) // BLOCK_M
    row_tile = tl.program_id(0) % tiles
    kv = (tl.program_id(0) // tiles % (H // G)).to(tl.int64)
    part = tl.program_id(0) // tiles // (H // G) % PARTS
    b = (tl.program_id(0) // tiles // (H // G) // PARTS).to(tl.int64)
    q0, k0, tq, tk, live = sequence(b, Tq, Tk, total_q, total_k, lengths_ptr, cu_q_ptr, cu_k_ptr)
    low, high = band(tq, tk, low, high, end_low, end_high)
    begin, end, first, last = keys_of(row_tile, tq, live, low, high, G, BLOCK_M, BLOCK_N)
    here = first + part * PART_TILES
    if (row_tile * BLOCK_M >= tq * G) | ((here >= last) & (part > 0)):  # the first part speaks for rows without keys
        return
    rows = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    i = rows // G
    h = kv * G + rows % G
    exist = i < tq
    k_ptr += b * k_stride_b + kv * k_stride_h + k0 * k_stride_t
    v_ptr += b * v_stride_b + kv * v_stride_h + k0 * v_stride_t
    q_ptr += b * q_stride_b + q0 * q_stride_t
    q_offsets = h * q_stride_h + i * q_stride_t
    q = rows  # read where it is used
    if CHUNK == 0:
        q = load_at(q_ptr, q_offsets, exist, D, BLOCK_D)
    if bias_ptr is not None:
        bias_ptr += b * bias_stride_b
    if keep_ptr is not None:
        keep_ptr += b * keep_stride_b
    offs_n = tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    sums = tl.zeros((BLOCK_M,), tl.float32)
    tops = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    for c in tl.range(here, tl.minimum(here + PART_TILES, last), num_stages=STAGES):
        n0 = start(c, tk, BLOCK_N)
        shown = shown_pairs(i[:, None], offs_n[None, :], 0, n0, live, low, high) & exist[:, None]
        chosen = (offs_n >= near(begin - n0, 4096)) & (offs_n < near(end - n0, 4096))
        if keep_ptr is not None:
            offsets = h * keep_stride_h + i * keep_stride_t
            keep = load_row_pairs(keep_ptr, offsets, exist, n0, tk, keep_stride_d, 0, BLOCK_N)
            shown = kept_pairs(shown, keep, keep_stride_t, SHIELDED)
        if bias_ptr is not None:
            offsets = h * bias_stride_h + i * bias_stride_t
            bias = load_row_pairs(bias_ptr, offsets, exist, n0, tk, bias_stride_d, float("-inf"), BLOCK_N)
            bias = bias.to(tl.float32)
            shown = shown & (bias != float("-inf"))
        if bias_ptr is not None or keep_ptr is not None:
            chosen = chosen & (tl.max(shown.to(tl.int32), 0) > 0)
        x = row_dots(
            q, q_ptr, q_offsets, exist, k_ptr + n0 * k_stride_t, offs_n * k_stride_t, chosen, D, BLOCK_D, BLOCK_M,
            BLOCK_N, CHUNK, PRECISION,
        )  # fmt: skip
        if bias_ptr is not None:
            x = tl.fma(x, scale, bias)
        p, sums, tops, decay = weigh(tl.where(shown, x, float("-inf")), sums, tops, step, False)
        if seed_ptr is not None:
            numbers = (b * H + h) * row_step + i
            p = tl.where(keep_tile(seed_ptr, numbers, n0, last_dropped, BLOCK_M, BLOCK_N), p, 0.0)
        v = load_at(v_ptr + n0 * v_stride_t, offs_n * v_stride_t, chosen, DV, BLOCK_D)
        acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)
    places = b * lse_stride_b + h * lse_stride_h + q0 + i
    if parts_ptr is not None:
        places += part * part_step
        store_at(acc, parts_ptr, places * BLOCK_D, exist, DV, BLOCK_D, True)
        tl.store(numbers_ptr + places * 2, tops, mask=exist)
        tl.store(numbers_ptr + places * 2 + 1, sums, mask=exist)
    else:
        out, lse = finish(acc, sums, tops, unit, keep_scale)
        out_ptr += b * out_stride_b + q0 * out_stride_t
        store_at(out, out_ptr, h * out_stride_h + i * out_stride_t, exist, OUT_D, BLOCK_D, OUT_ALIGNED)
        tl.store(lse_ptr + places, lse, mask=exist)


@kernel
def attention_fwd_merge_kernel(
    parts_ptr, numbers_ptr, lengths_ptr, cu_q_ptr, cu_k_ptr, out_ptr, lse_ptr, H: tl.int32, G: tl.int32, Tq: tl.int32,
    Tk: tl.int32, PART_TILES: tl.int32, total_q: tl.int64, total_k: tl.int64, part_step: tl.int64, DV: tl.int32,
    OUT_D: tl.int32,
    out_stride_b: tl.int64, out_stride_h: tl.int64, out_stride_t: tl.int64,
    lse_stride_b: tl.int64, lse_stride_h: tl.int64,
    low: tl.int64, high: tl.int64, end_low: tl.int64, end_high: tl.int64, step, unit, keep_scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One row: the sum of the parts that its tile of rows wrote."""
    i = tl.program_id(0) % Tq
    h = (tl.program_id(0) // Tq % H).to(tl.int64)
    b = (tl.program_id(0) // Tq // H).to(tl.int64)
    q0, _, tq, tk, live = sequence(b, Tq, Tk, total_q, total_k, lengths_ptr, cu_q_ptr, cu_k_ptr)
    if i >= tq:
        return
    low, high = band(tq, tk, low, high, end_low, end_high)
    row_tile = (i * G + tl.program_id(0) // Tq % G) // BLOCK_M
    _, _, first, last = keys_of(row_tile, tq, live, low, high, G, BLOCK_M, BLOCK_N)
    parts = tl.maximum((last - first + PART_TILES - 1) // PART_TILES, 1)
    place = b * lse_stride_b + h * lse_stride_h + q0 + i
    offs_d = tl.arange(0, BLOCK_D)
    most = tl.full((1,), float("-inf"), tl.float32)
    for first_part in range(0, parts, SHARE):
        offs_p = first_part + tl.arange(0, SHARE)
        places = place + offs_p * part_step
        tops = tl.load(numbers_ptr + places * 2, mask=offs_p < parts, other=float("-inf"))
        most = tl.maximum(most, tl.max(tops, 0))
    shift = tl.where(most == float("-inf"), 0.0, most)
    acc = tl.zeros((1, BLOCK_D), tl.float32)
    sums = tl.zeros((1,), tl.float32)
    for first_part in range(0, parts, SHARE):
        offs_p = first_part + tl.arange(0, SHARE)
        places = place + offs_p * part_step
        tops = tl.load(numbers_ptr + places * 2, mask=offs_p < parts, other=float("-inf"))
        weights = tl.exp2((tops - shift) * step)
        sums += tl.sum(weights * tl.load(numbers_ptr + places * 2 + 1, mask=offs_p < parts, other=0.0), 0)
        values = load_at(parts_ptr, places * BLOCK_D, offs_p < parts, DV, BLOCK_D)
        acc += sum_of_rows(weights[:, None] * values, SHARE, BLOCK_D)[None, :]
    out, lse = finish(acc, sums, most, unit, keep_scale)
    ptrs = out_ptr + b * out_stride_b + h * out_stride_h + (q0 + i) * out_stride_t + offs_d
    tl.store(ptrs[None, :], out.to(out_ptr.dtype.element_ty), mask=(offs_d < OUT_D)[None, :])
    tl.store(lse_ptr + place + tl.arange(0, 1), lse)


def attend_few(call: Call, config: FewConfig, out: Tensor, lse: Tensor) -> None:
    """Writes out and lse, by one kernel or, where the keys are parted, by two."""
    pairs = call.batch * call.kv_heads
    programs = config.parts * pairs * _launch.cdiv(call.queries * call.heads // call.kv_heads, config.block_m)
    given: dict[str, Any] = {**call.strides("out", out), "OUT_D": call.value_dim, "part_step": lse.numel()}
    given["SHIELDED"] = call.shielded(config.block_m)
    if config.parts == 1:
        call.launch(
            attention_fwd_few_kernel, programs, config, **given, out_ptr=out, lse_ptr=lse, parts_ptr=None,
            numbers_ptr=None, OUT_ALIGNED=rows_aligned(out),
        )  # fmt: skip
        return
    sizes = config.parts, lse.numel()
    given["parts_ptr"] = torch.empty((*sizes, config.block_d), dtype=torch.float32, device=out.device)
    given["numbers_ptr"] = torch.empty((*sizes, 2), dtype=torch.float32, device=out.device)
    call.launch(attention_fwd_few_kernel, programs, config, **given, out_ptr=None, lse_ptr=None, OUT_ALIGNED=True)
    rows = call.batch * call.heads * call.queries
    call.launch(attention_fwd_merge_kernel, rows, config, **given, out_ptr=out, lse_ptr=lse)
