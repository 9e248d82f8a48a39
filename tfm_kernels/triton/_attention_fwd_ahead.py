"""attention_fwd of 16-bit heads on GPUs of compute capability 9, in Gluon.

Method:  as attention_fwd.py, but the next tile's scores are multiplied while this one's weights are computed: Triton's
         own compiler waits for a product where it begins. What is asked of pairs is in
         _attention_ahead_pairs.py and _attention_ahead_dropout.py.
Order:   tiles that the band cuts come first, then those that all rows see; with a keep matrix those of the lists of
         _attention_tiles.py. Keys and values pass through rings of three tiles.
Limits:  float16, bfloat16; heads of 33 to 128; rows of bias and keep matrix at multiples of 16 bytes.
Source:  own work, after Shah et al. 2024, arXiv:2407.08608, section 3.2.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ._ahead import barrier, by_16_bytes
from ._attention import band, finish, is_finite, keys_met, sequence, tiles_met, weigh
from ._attention_ahead_dropout import kept_weights
from ._attention_ahead_pairs import scored, seen_keys, words_of
from ._attention_ahead_rows import AS_THEY_ARE, BY_FOUR, copy_rows, listed_tile_of, store_rows
from ._attention_call import Config
from ._tile import near

RING = gl.constexpr(3)  # tiles of keys, and of values, that have a place at once: the stages of all launches


def pick_config(
    dim: int, queries: int, extras: str, biased: bool, dtype: torch.dtype, capability: tuple[int, int]
) -> Config | None:
    """The launch for heads of ``dim`` (the larger of D and Dv); None for calls that the kernel cannot do.

    Not measured yet. Heads of 64: three programs a multiprocessor without ``extras`` (Call.extras()) and with a bias,
    four with dropout or a keep matrix.
    """
    if capability[0] != 9 or extras == "unaligned" or dtype == torch.float32 or not 32 < dim <= 128:
        return None
    block_d = 64 if dim <= 64 else 128
    if extras != "none":
        return Config(64, 32, block_d, 0, 4, 3, (168 if biased else 128) if block_d == 64 else None)
    if queries <= 64 or block_d == 64:
        return Config(64, 64, block_d, 0, 4, 3, 168 if block_d == 64 else None)
    return Config(128, 64, block_d, 0, num_warps=8, num_stages=3)


@gluon.jit
def weights_of(
    x, sums, tops, bias_ptr, keep_ptr, seed_ptr, bias_words, more_bias, keep_words, first_row, m0, n0, live, low, high,
    scale, step, last_dropped, kind: gl.constexpr, scores: gl.constexpr, sums_of: gl.constexpr, MASKED: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """(p, sums, tops, decay): A.3 of a tile of products, p as a factor and decay as rows of acc."""
    x = scored(
        x, bias_ptr, keep_ptr, bias_words, more_bias, keep_words, m0, n0, live, low, high, scale, MASKED, scores,
        BLOCK_M, BLOCK_N,
    )  # fmt: skip
    p, sums, tops, decay = weigh(x, sums, tops, step, not MASKED and bias_ptr is None)
    if seed_ptr is not None:
        p = gl.where(
            kept_weights(gl.load(seed_ptr), None, 0, first_row, m0, n0, last_dropped, scores, BLOCK_M, BLOCK_N), p, 0.0
        )
    p = gl.convert_layout(p.to(kind), gl.DotOperandLayout(0, sums_of, 2))
    return p, sums, tops, gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, sums_of)), 1)


@gluon.jit
def attend(
    x, acc, sums, tops, bias_words, more_bias, keep_words, tile0, tile1, tile2, from_c, to_c, count, first, full_first,
    full_last, last, list_ptr, q, k, v, k_ptr, v_ptr, bias_ptr, keep_ptr, seed_ptr, first_row, m0, begin, end, tq, tk,
    live, low, high, D, DV, k_stride_t, v_stride_t, bias_stride_t, keep_stride_t, scale, step, last_dropped, none,
    nothing, kind: gl.constexpr, scores: gl.constexpr, sums_of: gl.constexpr, MASKED: gl.constexpr, BLOCK_M:
    gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Tiles from_c..to_c - 1 of keys, of which none is the last: begins the next one's products, and adds to acc.

    x, bias_words, more_bias and keep_words are the next tile's, and tile0 its number; then tile1 and tile2 follow.
    """
    for c in range(from_c, to_c):
        tile3 = listed_tile_of(c + 3, count, first, full_first, full_last, last, list_ptr)
        async_copy.wait_group(1)  # this tile's values and the next one's keys
        barrier()
        fence_async_shared()
        to = (c + RING - 1) % RING
        copied = gl.where(c + RING - 1 < count, end, begin)
        copy_rows(k.index(to), k_ptr, tile2 * BLOCK_N, begin, copied, k_stride_t, D, BY_FOUR, BLOCK_N, BLOCK_D, WARPS)
        copy_rows(v.index(to), v_ptr, tile2 * BLOCK_N, begin, copied, v_stride_t, DV, BY_FOUR, BLOCK_N, BLOCK_D, WARPS)
        next_x = warpgroup_mma(q, k.index((c + 1) % RING).permute((1, 0)), nothing, use_acc=False, is_async=True)
        next_bias, next_more, next_keep = words_of(
            bias_ptr, keep_ptr, m0, tile1 * BLOCK_N, tq, tk, bias_stride_t, keep_stride_t, none, scores, BLOCK_M,
            BLOCK_N
        )  # fmt: skip
        p, sums, tops, decay = weights_of(
            x, sums, tops, bias_ptr, keep_ptr, seed_ptr, bias_words, more_bias, keep_words, first_row, m0, tile0 *
            BLOCK_N, live, low, high, scale, step, last_dropped, kind, scores, sums_of, MASKED, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        next_acc = warpgroup_mma(p, v.index(c % RING), acc * decay, is_async=True)
        x, acc = warpgroup_mma_wait(0, [next_x, next_acc])
        bias_words, more_bias, keep_words = next_bias, next_more, next_keep
        tile0, tile1, tile2 = tile1, tile2, tile3
    return x, acc, sums, tops, bias_words, more_bias, keep_words, tile0, tile1, tile2


@gluon.jit
def attend_carefully(
    q, k, v, k_ptr, v_ptr, bias_ptr, keep_ptr, seed_ptr, list_ptr, count, first, full_first, full_last, last, first_row,
    m0, begin, end, tq, tk, live, low, high, D, DV, k_stride_t, v_stride_t, bias_stride_t, keep_stride_t, scale, step,
    last_dropped, none, nothing, kind: gl.constexpr, scores: gl.constexpr, sums_of: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """(acc, sums, tops) once more, tile by tile, with those values as 0 that no row of the tile sees.

    sums and tops, in the same layout and order, are those of before to the bit: kept, they would take registers.
    """
    by: gl.constexpr = by_16_bytes(BLOCK_D, WARPS)
    sums = gl.zeros([BLOCK_M], gl.float32, gl.SliceLayout(1, scores))
    tops = gl.full([BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(1, scores))
    acc = gl.zeros([BLOCK_M, BLOCK_D], gl.float32, sums_of)
    for c in range(0, count):
        n0 = listed_tile_of(c, count, first, full_first, full_last, last, list_ptr) * BLOCK_N
        barrier()
        copy_rows(k.index(0), k_ptr, n0, begin, end, k_stride_t, D, BY_FOUR, BLOCK_N, BLOCK_D, WARPS)
        copy_rows(v.index(0), v_ptr, n0, begin, end, v_stride_t, DV, BY_FOUR, BLOCK_N, BLOCK_D, WARPS)
        bias_words, more_bias, keep_words = words_of(
            bias_ptr, keep_ptr, m0, n0, tq, tk, bias_stride_t, keep_stride_t, none, scores, BLOCK_M, BLOCK_N
        )
        async_copy.wait_group(0)
        barrier()
        fence_async_shared()
        x = warpgroup_mma(q, k.index(0).permute((1, 0)), nothing, use_acc=False)
        seen = scored(
            x, bias_ptr, keep_ptr, bias_words, more_bias, keep_words, m0, n0, live, low, high, scale, True, scores,
            BLOCK_M, BLOCK_N,
        )  # fmt: skip
        seen = seen_keys(seen != float("-inf"), m0, tq, scores, BLOCK_M)
        values = v.index(0).load(by)
        seen = gl.expand_dims(gl.convert_layout(seen, gl.SliceLayout(1, by)), 1)
        v.index(0).store(gl.where(seen > 0, values, gl.zeros([BLOCK_N, BLOCK_D], kind, by)))
        p, sums, tops, decay = weights_of(
            x, sums, tops, bias_ptr, keep_ptr, seed_ptr, bias_words, more_bias, keep_words, first_row, m0, n0, live,
            low, high, scale, step, last_dropped, kind, scores, sums_of, True, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        fence_async_shared()
        barrier()
        acc = warpgroup_mma(p, v.index(0), acc * decay)
    return acc, sums, tops


_RUNTIME = (
    "q_ptr", "k_ptr", "v_ptr", "bias_ptr", "keep_ptr", "counts_ptr", "tiles_ptr", "lengths_ptr", "cu_q_ptr", "cu_k_ptr",
    "seed_ptr", "out_ptr", "lse_ptr", "H", "G", "Tq", "Tk", "total_q", "total_k", "row_step", "D", "DV", "OUT_D",
    "q_stride_b", "q_stride_h", "q_stride_t", "k_stride_b", "k_stride_h", "k_stride_t", "v_stride_b", "v_stride_h",
    "v_stride_t", "out_stride_b", "out_stride_h", "out_stride_t", "lse_stride_b", "lse_stride_h", "bias_stride_b",
    "bias_stride_h", "bias_stride_t", "keep_stride_b", "keep_stride_h", "keep_stride_t", "list_stride_b",
    "list_stride_h", "list_width", "low", "high", "end_low", "end_high", "scale", "step", "unit", "keep_scale",
    "last_dropped",
)  # fmt: skip


@gluon.jit(do_not_specialize=_RUNTIME)
def attention_fwd_ahead_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, keep_ptr, counts_ptr, tiles_ptr, lengths_ptr, cu_q_ptr, cu_k_ptr, seed_ptr, out_ptr,
    lse_ptr, H: gl.int32, G: gl.int32, Tq: gl.int32, Tk: gl.int32, total_q: gl.int64, total_k: gl.int64,
    row_step: gl.int64, D: gl.int32, DV: gl.int32, OUT_D: gl.int32,
    q_stride_b: gl.int64, q_stride_h: gl.int64, q_stride_t: gl.int64,
    k_stride_b: gl.int64, k_stride_h: gl.int64, k_stride_t: gl.int64,
    v_stride_b: gl.int64, v_stride_h: gl.int64, v_stride_t: gl.int64,
    out_stride_b: gl.int64, out_stride_h: gl.int64, out_stride_t: gl.int64,
    lse_stride_b: gl.int64, lse_stride_h: gl.int64,
    bias_stride_b: gl.int64, bias_stride_h: gl.int64, bias_stride_t: gl.int64,
    keep_stride_b: gl.int64, keep_stride_h: gl.int64, keep_stride_t: gl.int64,
    list_stride_b: gl.int64, list_stride_h: gl.int64, list_width: gl.int64,
    low: gl.int64, high: gl.int64, end_low: gl.int64, end_high: gl.int64,
    scale, step, unit, keep_scale, last_dropped: gl.int32,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, OUT_ALIGNED: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """A tile of queries of one head; the last tile, which sees most where a mask is causal, comes first."""
    kind: gl.constexpr = q_ptr.dtype.element_ty
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_N, 16])
    sums_of: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_D, 16])
    rows_of_scores: gl.constexpr = gl.SliceLayout(1, scores)
    rows_of_sums: gl.constexpr = gl.SliceLayout(1, sums_of)
    queries: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_D], kind)
    keys: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_D], kind)

    tiles = (Tq + BLOCK_M - 1) // BLOCK_M
    row_tile = tiles - 1 - gl.program_id(0) % tiles
    b = (gl.program_id(0) // tiles // H).to(gl.int64)
    h = (gl.program_id(0) // tiles % H).to(gl.int64)
    q0, k0, tq, tk, live = sequence(b, Tq, Tk, total_q, total_k, lengths_ptr, cu_q_ptr, cu_k_ptr)
    low, high = band(tq, tk, low, high, end_low, end_high)
    m0 = row_tile * BLOCK_M
    if m0 >= tq:
        return
    kv = h // G
    q_ptr += b * q_stride_b + h * q_stride_h + q0 * q_stride_t
    k_ptr += b * k_stride_b + kv * k_stride_h + k0 * k_stride_t
    v_ptr += b * v_stride_b + kv * v_stride_h + k0 * v_stride_t
    begin, end, full_begin, full_end = keys_met(m0, tq, live, low, high, BLOCK_M)
    first, full_first, full_last, last = tiles_met(begin, end, full_begin, full_end, BLOCK_N)
    count = last - first
    cut = count - (full_last - full_first)
    list_ptr = None
    if bias_ptr is not None:
        bias_ptr += b * bias_stride_b + h * bias_stride_h
    if keep_ptr is not None:
        keep_ptr += b * keep_stride_b + h * keep_stride_h
        slot = b * list_stride_b + h * list_stride_h + row_tile
        count = gl.load(counts_ptr + slot)
        cut = count
        list_ptr = tiles_ptr + slot * list_width
    first_row = (b * H + h) * row_step
    none = gl.zeros([1], gl.int32, gl.SliceLayout(1, scores))
    nothing = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, scores)

    q = gl.allocate_shared_memory(kind, [BLOCK_M, BLOCK_D], queries)
    k = gl.allocate_shared_memory(kind, [RING, BLOCK_N, BLOCK_D], keys)
    v = gl.allocate_shared_memory(kind, [RING, BLOCK_N, BLOCK_D], keys)
    copy_rows(q, q_ptr, m0, m0, tq, q_stride_t, D, AS_THEY_ARE, BLOCK_M, BLOCK_D, WARPS)
    for place in gl.static_range(2):
        n0 = listed_tile_of(place, count, first, full_first, full_last, last, list_ptr) * BLOCK_N
        copied = gl.where(place < count, end, begin)
        copy_rows(k.index(place), k_ptr, n0, begin, copied, k_stride_t, D, BY_FOUR, BLOCK_N, BLOCK_D, WARPS)
        copy_rows(v.index(place), v_ptr, n0, begin, copied, v_stride_t, DV, BY_FOUR, BLOCK_N, BLOCK_D, WARPS)

    sums = gl.zeros([BLOCK_M], gl.float32, rows_of_scores)
    tops = gl.full([BLOCK_M], float("-inf"), gl.float32, rows_of_scores)
    acc = gl.zeros([BLOCK_M, BLOCK_D], gl.float32, sums_of)
    if count > 0:
        tile0 = listed_tile_of(0, count, first, full_first, full_last, last, list_ptr)
        tile1 = listed_tile_of(1, count, first, full_first, full_last, last, list_ptr)
        tile2 = listed_tile_of(2, count, first, full_first, full_last, last, list_ptr)
        bias_words, more_bias, keep_words = words_of(
            bias_ptr, keep_ptr, m0, tile0 * BLOCK_N, tq, tk, bias_stride_t, keep_stride_t, none, scores, BLOCK_M,
            BLOCK_N
        )  # fmt: skip
        async_copy.wait_group(3)  # the queries and the first keys
        barrier()
        fence_async_shared()
        x = warpgroup_mma(q, k.index(0).permute((1, 0)), nothing, use_acc=False)
        stop = gl.minimum(cut, count - 1)
        x, acc, sums, tops, bias_words, more_bias, keep_words, tile0, tile1, tile2 = attend(
            x, acc, sums, tops, bias_words, more_bias, keep_words, tile0, tile1, tile2, 0, stop, count, first,
            full_first, full_last, last, list_ptr, q, k, v, k_ptr, v_ptr, bias_ptr, keep_ptr, seed_ptr, first_row, m0,
            begin, end, tq, tk, live, low, high, D, DV, k_stride_t, v_stride_t, bias_stride_t, keep_stride_t, scale,
            step, last_dropped, none, nothing, kind, scores, sums_of, True, BLOCK_M, BLOCK_N, BLOCK_D, WARPS,
        )  # fmt: skip
        if keep_ptr is None:
            x, acc, sums, tops, bias_words, more_bias, keep_words, tile0, tile1, tile2 = attend(
                x, acc, sums, tops, bias_words, more_bias, keep_words, tile0, tile1, tile2, stop, count - 1, count,
                first, full_first, full_last, last, list_ptr, q, k, v, k_ptr, v_ptr, bias_ptr, keep_ptr, seed_ptr,
                first_row, m0, begin, end, tq, tk, live, low, high, D, DV, k_stride_t, v_stride_t, bias_stride_t,
                keep_stride_t, scale, step, last_dropped, none, nothing, kind, scores, sums_of, False, BLOCK_M, BLOCK_N,
                BLOCK_D, WARPS,
            )  # fmt: skip
        async_copy.wait_group(0)
        barrier()
        fence_async_shared()
        p, sums, tops, decay = weights_of(
            x, sums, tops, bias_ptr, keep_ptr, seed_ptr, bias_words, more_bias, keep_words, first_row, m0, tile0 *
            BLOCK_N, live, low, high, scale, step, last_dropped, kind, scores, sums_of, True, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        acc = warpgroup_mma(p, v.index((count - 1) % RING), acc * decay)
        if bias_ptr is not None or keep_ptr is not None:
            if not is_finite(acc):
                acc, sums, tops = attend_carefully(
                    q, k, v, k_ptr, v_ptr, bias_ptr, keep_ptr, seed_ptr, list_ptr, count, first, full_first, full_last,
                    last, first_row, m0, begin, end, tq, tk, live, low, high, D, DV, k_stride_t, v_stride_t,
                    bias_stride_t, keep_stride_t, scale, step, last_dropped, none, nothing, kind, scores, sums_of,
                    BLOCK_M, BLOCK_N, BLOCK_D, WARPS,
                )  # fmt: skip
    async_copy.wait_group(0)  # what is still on its way is nobody's, but its place is the compiler's from here on
    barrier()

    sums, tops = gl.convert_layout(sums, rows_of_sums), gl.convert_layout(tops, rows_of_sums)
    out, lse = finish(acc, sums, tops, unit, keep_scale)
    offs_m = gl.arange(0, BLOCK_M, rows_of_sums)
    lse_ptr += b * lse_stride_b + h * lse_stride_h + q0 + m0
    gl.store(lse_ptr + offs_m, lse, mask=offs_m < near(tq - m0, 4096))
    out_ptr += b * out_stride_b + h * out_stride_h + q0 * out_stride_t
    store_rows(out, out_ptr, m0, tq, out_stride_t, OUT_D, AS_THEY_ARE, OUT_ALIGNED, BLOCK_M, BLOCK_D, WARPS)
