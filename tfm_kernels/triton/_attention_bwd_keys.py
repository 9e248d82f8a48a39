"""dk and dv of attention: A.5 and A.9.

Owns:    one program = block_n keys of one key head; the tile of keys and values stays, tiles of queries pass, head
         after head of the group: every sum has a fixed order, and no two programs add to one number.
Method:  scores are recomputed transposed, (keys, queries), so that weights and dx are left factors as they stand.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._attention import (
    band,
    dots,
    edges_first,
    is_finite,
    kernel,
    load_chosen_rows,
    load_rows,
    near,
    queries_met,
    sequence,
    start,
    store_rows,
    tiles_met,
)
from ._attention_bwd_tile import DELTA, OFFSET, SHIFT, TOP, gradient_tile, load_statistics, statistic
from ._tile import anew, settled


@triton.jit
def meet(
    dk, dv, k, v, q_ptr, k_ptr, v_ptr, dout_ptr, bias_ptr, keep_ptr, seed_ptr, statistics_ptr, first_row, m0, n0, begin,
    end, tq, tk, live, low, high, D, DV, q_stride_t, k_stride_t, v_stride_t, dout_stride_t, bias_stride_t,
    bias_stride_d, keep_stride_t, keep_stride_d, scale, step, keep_scale, last_dropped, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PAIRS_ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
    SHIELDED: tl.constexpr, CHUNK: tl.constexpr, PART: tl.constexpr, MASKED: tl.constexpr, CAREFUL: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """One tile of queries: adds to dk (without the scale) and dv."""
    statistics = load_statistics(statistics_ptr, m0, tq, BLOCK_M, MASKED)
    delta = statistic(statistics, DELTA)
    offset = delta
    top = delta
    shift = delta
    if CAREFUL:
        top = statistic(statistics, TOP)
        shift = statistic(statistics, SHIFT)
    else:
        offset = statistic(statistics, OFFSET)
    if CAREFUL:  # what sees nothing counts as 0, and a query of NaN reaches the keys that it sees through dx alone
        q = load_chosen_rows(q_ptr, m0, tl.abs(top) < float("inf"), tq, q_stride_t, D, BLOCK_M, BLOCK_D)
        dout = load_chosen_rows(dout_ptr, m0, top != float("inf"), tq, dout_stride_t, DV, BLOCK_M, BLOCK_D)
    else:
        q = load_rows(q_ptr, m0, begin, end, q_stride_t, D, BLOCK_M, BLOCK_D, MASKED)
        dout = load_rows(dout_ptr, m0, begin, end, dout_stride_t, DV, BLOCK_M, BLOCK_D, MASKED)
    x = dots(
        k, k_ptr, n0, n0, live, k_stride_t, q, q_ptr, m0, begin, end, q_stride_t, D, BLOCK_N, BLOCK_M, CHUNK, PRECISION
    )  # fmt: skip
    products = x
    if PART != "dv":
        products = dots(
            v, v_ptr, n0, n0, live, v_stride_t, dout, dout_ptr, m0, begin, end, dout_stride_t, DV, BLOCK_N, BLOCK_M,
            CHUNK, PRECISION,
        )  # fmt: skip
    p, dx, _ = gradient_tile(
        x, products, top, shift, offset, delta, bias_ptr, keep_ptr, seed_ptr, first_row, m0, n0, tq, tk, live, low,
        high, bias_stride_t, bias_stride_d, keep_stride_t, keep_stride_d, scale, step, keep_scale, last_dropped,
        BLOCK_M, BLOCK_N, PAIRS_ALIGNED, MASKED, True, CAREFUL, SHIELDED, AHEAD,
    )  # fmt: skip
    if PART != "dk":
        dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION)
    if PART != "dv":
        dk = tl.dot(dx.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def gather(
    k, v, q_ptr, k_ptr, v_ptr, dout_ptr, bias_ptr, keep_ptr, counts_ptr, tiles_ptr, seed_ptr, statistics_ptr, b, kv, n0,
    slot, list_stride_h, list_width, H, G, row_step, tq, tk, live, low, high, D, DV, q_stride_h, q_stride_t, k_stride_t,
    v_stride_t, dout_stride_h, dout_stride_t, lse_stride_h, bias_stride_h, bias_stride_t, bias_stride_d, keep_stride_h,
    keep_stride_t, keep_stride_d, scale, step, keep_scale, last_dropped, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, PAIRS_ALIGNED: tl.constexpr, PRECISION: tl.constexpr, SHIELDED: tl.constexpr,
    CHUNK: tl.constexpr, PART: tl.constexpr, STAGES: tl.constexpr, CAREFUL: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """(dk, dv) of a tile of keys, over all the queries of its group that see it; pointers are those of sequence b.

    WHOLE: whether tiles of queries that all see the keys have a loop of their own; else they come last in the one.
    """
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    begin, end, full_begin, full_end = queries_met(n0, tq, live, low, high, BLOCK_N)
    if bias_ptr is not None:  # else what they follow from stays in registers beside them
        begin, end = anew(begin), anew(end)
    first, full_first, full_last, last = tiles_met(begin, end, full_begin, full_end, BLOCK_M)
    edges = last - (full_last - full_first) if WHOLE else last
    # what does not change from head to head stays in this loop: it takes too many registers
    for g in tl.range(0, G, disable_licm=True):
        h = kv * G + g
        q_head = settled(q_ptr + h * q_stride_h)
        dout_head = settled(dout_ptr + h * dout_stride_h)
        statistics_head = settled(statistics_ptr + h * lse_stride_h * 8)
        first_row = (b * H + h) * row_step
        bias_head = bias_ptr
        if bias_ptr is not None:
            bias_head = settled(bias_ptr + h * bias_stride_h)
        if keep_ptr is not None:
            keep_head = settled(keep_ptr + h * keep_stride_h)
            list_slot = slot + h * list_stride_h
            for c in tl.range(0, tl.load(counts_ptr + list_slot), num_stages=STAGES):
                m0 = start(tl.load(tiles_ptr + list_slot * list_width + c), tq, BLOCK_M)
                dk, dv = meet(
                    dk, dv, k, v, q_head, k_ptr, v_ptr, dout_head, bias_head, keep_head, seed_ptr, statistics_head,
                    first_row, m0, n0, begin, end, tq, tk, live, low, high, D, DV, q_stride_t, k_stride_t, v_stride_t,
                    dout_stride_t, bias_stride_t, bias_stride_d, keep_stride_t, keep_stride_d, scale, step, keep_scale,
                    last_dropped, BLOCK_M, BLOCK_N, BLOCK_D, PAIRS_ALIGNED, PRECISION, SHIELDED, CHUNK, PART, True,
                    CAREFUL, STAGES > 1,
                )  # fmt: skip
        else:
            for c in tl.range(first, edges, num_stages=STAGES):
                m0 = start(edges_first(c, full_first, full_last, last, WHOLE), tq, BLOCK_M)
                dk, dv = meet(
                    dk, dv, k, v, q_head, k_ptr, v_ptr, dout_head, bias_head, None, seed_ptr, statistics_head,
                    first_row, m0, n0, begin, end, tq, tk, live, low, high, D, DV, q_stride_t, k_stride_t, v_stride_t,
                    dout_stride_t, bias_stride_t, bias_stride_d, keep_stride_t, keep_stride_d, scale, step, keep_scale,
                    last_dropped, BLOCK_M, BLOCK_N, BLOCK_D, PAIRS_ALIGNED, PRECISION, SHIELDED, CHUNK, PART, True,
                    CAREFUL, STAGES > 1,
                )  # fmt: skip
            if WHOLE:
                for c in tl.range(full_first, full_last, num_stages=STAGES):
                    dk, dv = meet(
                        dk, dv, k, v, q_head, k_ptr, v_ptr, dout_head, bias_head, None, seed_ptr, statistics_head,
                        first_row, start(c, tq, BLOCK_M), n0, begin, end, tq, tk, live, low, high, D, DV, q_stride_t,
                        k_stride_t, v_stride_t, dout_stride_t, bias_stride_t, bias_stride_d, keep_stride_t,
                        keep_stride_d, scale, step, keep_scale, last_dropped, BLOCK_M, BLOCK_N, BLOCK_D, PAIRS_ALIGNED,
                        PRECISION, SHIELDED, CHUNK, PART, False, CAREFUL, STAGES > 1,
                    )  # fmt: skip
    return dk, dv


@kernel
def attention_bwd_keys_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, keep_ptr, counts_ptr, tiles_ptr, lengths_ptr, cu_q_ptr, cu_k_ptr, seed_ptr, dout_ptr,
    statistics_ptr, dk_ptr, dv_ptr, H: tl.int32, G: tl.int32, Tq: tl.int32, Tk: tl.int32,
    total_q: tl.int64, total_k: tl.int64, row_step: tl.int64, D: tl.int32, DV: tl.int32, DK_D: tl.int32, DV_D: tl.int32,
    q_stride_b: tl.int64, q_stride_h: tl.int64, q_stride_t: tl.int64,
    k_stride_b: tl.int64, k_stride_h: tl.int64, k_stride_t: tl.int64,
    v_stride_b: tl.int64, v_stride_h: tl.int64, v_stride_t: tl.int64,
    dout_stride_b: tl.int64, dout_stride_h: tl.int64, dout_stride_t: tl.int64,
    dk_stride_b: tl.int64, dk_stride_h: tl.int64, dk_stride_t: tl.int64,
    dv_stride_b: tl.int64, dv_stride_h: tl.int64, dv_stride_t: tl.int64,
    lse_stride_b: tl.int64, lse_stride_h: tl.int64,
    bias_stride_b: tl.int64, bias_stride_h: tl.int64, bias_stride_t: tl.int64, bias_stride_d: tl.int64,
    keep_stride_b: tl.int64, keep_stride_h: tl.int64, keep_stride_t: tl.int64, keep_stride_d: tl.int64,
    list_stride_b: tl.int64, list_stride_h: tl.int64, list_width: tl.int64,
    low: tl.int64, high: tl.int64, end_low: tl.int64, end_high: tl.int64,
    scale, step, keep_scale, last_dropped: tl.int32,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, OUT_ALIGNED: tl.constexpr,
    PAIRS_ALIGNED: tl.constexpr, PRECISION: tl.constexpr, SHIELDED: tl.constexpr, CHUNK: tl.constexpr,
    PART: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A tile of keys of one key head; the first tile, which most see where a mask is causal, comes first."""
    tiles = (Tk + BLOCK_N - 1) // BLOCK_N
    key_tile = tl.program_id(0) % tiles
    b = (tl.program_id(0) // tiles // (H // G)).to(tl.int64)
    kv = (tl.program_id(0) // tiles % (H // G)).to(tl.int64)
    q0, k0, tq, tk, live = sequence(b, Tq, Tk, total_q, total_k, lengths_ptr, cu_q_ptr, cu_k_ptr)
    low, high = band(tq, tk, low, high, end_low, end_high)
    n0 = key_tile * BLOCK_N
    if n0 >= tk:
        return
    q_ptr += b * q_stride_b + q0 * q_stride_t
    dout_ptr += b * dout_stride_b + q0 * dout_stride_t
    k_ptr += b * k_stride_b + kv * k_stride_h + k0 * k_stride_t
    v_ptr += b * v_stride_b + kv * v_stride_h + k0 * v_stride_t
    statistics_ptr += (b * lse_stride_b + q0) * 8
    if bias_ptr is not None:
        bias_ptr += b * bias_stride_b
    if keep_ptr is not None:
        keep_ptr += b * keep_stride_b
    slot = b * list_stride_b + key_tile
    k = n0
    v = n0
    if CHUNK == 0:
        k = load_rows(k_ptr, n0, n0, live, k_stride_t, D, BLOCK_N, BLOCK_D, True)
        v = load_rows(v_ptr, n0, n0, live, v_stride_t, DV, BLOCK_N, BLOCK_D, True)
    # wide heads, and a bias with dropout, leave no registers for two ways: they take the careful one at once
    ONE_WAY: tl.constexpr = BLOCK_D == 256 or (seed_ptr is not None and bias_ptr is not None)
    dk, dv = gather(
        k, v, q_ptr, k_ptr, v_ptr, dout_ptr, bias_ptr, keep_ptr, counts_ptr, tiles_ptr, seed_ptr, statistics_ptr, b, kv,
        n0, slot, list_stride_h, list_width, H, G, row_step, tq, tk, live, low, high, D, DV, q_stride_h, q_stride_t,
        k_stride_t, v_stride_t, dout_stride_h, dout_stride_t, lse_stride_h, bias_stride_h, bias_stride_t, bias_stride_d,
        keep_stride_h, keep_stride_t, keep_stride_d, scale, step, keep_scale, last_dropped, BLOCK_M, BLOCK_N, BLOCK_D,
        PAIRS_ALIGNED, PRECISION, SHIELDED, CHUNK, PART, STAGES, ONE_WAY, True,
    )  # fmt: skip
    if not ONE_WAY:
        if not (is_finite(dk) and is_finite(dv)):
            dk, dv = gather(
                k, v, q_ptr, k_ptr, v_ptr, dout_ptr, bias_ptr, keep_ptr, counts_ptr, tiles_ptr, seed_ptr,
                statistics_ptr, b, kv, n0, slot, list_stride_h, list_width, H, G, row_step, tq, tk, live, low, high, D,
                DV, q_stride_h, q_stride_t, k_stride_t, v_stride_t, dout_stride_h, dout_stride_t, lse_stride_h,
                bias_stride_h, bias_stride_t, bias_stride_d, keep_stride_h, keep_stride_t, keep_stride_d, scale, step,
                keep_scale, last_dropped, BLOCK_M, BLOCK_N, BLOCK_D, PAIRS_ALIGNED, PRECISION, SHIELDED, CHUNK, PART,
                1, True, False,
            )  # fmt: skip
    b, kv, n0 = anew(b), anew(kv), anew(n0)
    alive = (tl.arange(0, BLOCK_N) < near(live - n0, 4096))[:, None]
    dk_ptr += b * dk_stride_b + kv * dk_stride_h + k0 * dk_stride_t
    dv_ptr += b * dv_stride_b + kv * dv_stride_h + k0 * dv_stride_t
    dk = tl.where(alive, dk * scale, 0.0)
    if PART != "dv":
        store_rows(dk, dk_ptr, n0, tk, dk_stride_t, DK_D, BLOCK_N, BLOCK_D, OUT_ALIGNED)
    if PART != "dk":
        store_rows(tl.where(alive, dv, 0.0), dv_ptr, n0, tk, dv_stride_t, DV_D, BLOCK_N, BLOCK_D, OUT_ALIGNED)
