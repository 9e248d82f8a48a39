"""dq of attention, A.8, and dx itself where that is the gradient of a bias that is broadcast along nothing, A.10.

Owns:    one program = block_m queries of one head; tiles of keys and values pass, as in the forward.
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
    keys_met,
    load_chosen_rows,
    load_rows,
    sequence,
    start,
    store_rows,
    tiles_met,
)
from ._attention_bwd_tile import DELTA, SHIFT, TOP, gradient_tile, load_statistics, statistic
from ._attention_pairs import pair_mask, pair_tile
from ._tile import anew, settled, unknown


@triton.jit
def meet(
    dq, q, dout, top, shift, delta, q_ptr, k_ptr, v_ptr, dout_ptr, bias_ptr, dbias_ptr, keep_ptr, seed_ptr, first_row,
    m0, n0, begin, end, tq, tk, live, low, high, D, DV, q_stride_t, k_stride_t, v_stride_t, dout_stride_t,
    bias_stride_t, bias_stride_d, dbias_stride_t, keep_stride_t, keep_stride_d, scale, step, keep_scale, last_dropped,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PAIRS_ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr, SHIELDED: tl.constexpr, CHUNK: tl.constexpr, MASKED: tl.constexpr, CAREFUL: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """One tile of keys: dq (without the scale) and what it adds to it."""
    k = load_rows(k_ptr, n0, begin, end, k_stride_t, D, BLOCK_N, BLOCK_D, MASKED)
    v = load_rows(v_ptr, n0, begin, end, v_stride_t, DV, BLOCK_N, BLOCK_D, MASKED) if CHUNK == 0 else k
    x = dots(
        q, q_ptr, m0, m0, tq, q_stride_t, k, k_ptr, n0, begin, end, k_stride_t, D, BLOCK_M, BLOCK_N, CHUNK, PRECISION
    )  # fmt: skip
    products = dots(
        dout, dout_ptr, m0, m0, tq, dout_stride_t, v, v_ptr, n0, begin, end, v_stride_t, DV, BLOCK_M, BLOCK_N, CHUNK,
        PRECISION,
    )  # fmt: skip
    _, dx, hidden = gradient_tile(
        x, products, top, shift, top, delta, bias_ptr, keep_ptr, seed_ptr, first_row, m0, n0, tq, tk, live, low, high,
        bias_stride_t, bias_stride_d, keep_stride_t, keep_stride_d, scale, step, keep_scale, last_dropped, BLOCK_M,
        BLOCK_N, PAIRS_ALIGNED, MASKED, False, True, SHIELDED, AHEAD,
    )  # fmt: skip
    if dbias_ptr is not None:
        ptrs = pair_tile(dbias_ptr, m0, n0, dbias_stride_t, dbias_stride_t * 0 + 1, BLOCK_M, BLOCK_N, False, False)
        mask = pair_mask(m0, n0, tq, tk, BLOCK_M, BLOCK_N, False, False)
        tl.store(ptrs, dx.to(dbias_ptr.dtype.element_ty), mask=mask)
    if CAREFUL:
        seen = tl.max((~hidden).to(tl.int32), 0)
        k = load_chosen_rows(k_ptr, n0, seen > 0, end, k_stride_t, D, BLOCK_N, BLOCK_D)
    return tl.dot(dx.to(k.dtype), k, dq, input_precision=PRECISION)


@triton.jit
def gather(
    q, dout, top, shift, delta, q_ptr, k_ptr, v_ptr, dout_ptr, bias_ptr, dbias_ptr, keep_ptr, counts_ptr, tiles_ptr,
    seed_ptr, first_row, slot, list_width, m0, tq, tk, live, low, high, D, DV, q_stride_t, k_stride_t, v_stride_t,
    dout_stride_t, bias_stride_t, bias_stride_d, dbias_stride_t, keep_stride_t, keep_stride_d, scale, step, keep_scale,
    last_dropped, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PAIRS_ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr, SHIELDED: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr, CAREFUL: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """dq of a tile of queries, over all the keys that it sees.

    WHOLE: whether tiles of keys that all rows see have a loop of their own; else they come last in the one.
    """
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    begin, end, full_begin, full_end = keys_met(m0, tq, live, low, high, BLOCK_M)
    first, full_first, full_last, last = tiles_met(begin, end, full_begin, full_end, BLOCK_N)
    edges = last - (full_last - full_first) if WHOLE else last
    # what does not change from tile to tile stays in the loops where it takes too many registers
    CROWDED: tl.constexpr = BLOCK_D == 256
    if keep_ptr is not None:
        if not CAREFUL:
            dq = unknown(dq)
        for c in tl.range(0, tl.load(counts_ptr + slot), num_stages=STAGES, disable_licm=CROWDED):
            n0 = start(tl.load(tiles_ptr + slot * list_width + c), tk, BLOCK_N)
            dq = meet(
                dq, q, dout, top, shift, delta, q_ptr, k_ptr, v_ptr, dout_ptr, bias_ptr, dbias_ptr, keep_ptr, seed_ptr,
                first_row, m0, n0, begin, end, tq, tk, live, low, high, D, DV, q_stride_t, k_stride_t, v_stride_t,
                dout_stride_t, bias_stride_t, bias_stride_d, dbias_stride_t, keep_stride_t, keep_stride_d, scale, step,
                keep_scale, last_dropped, BLOCK_M, BLOCK_N, BLOCK_D, PAIRS_ALIGNED, PRECISION, SHIELDED, CHUNK, True,
                CAREFUL, STAGES > 1,
            )  # fmt: skip
    else:
        for c in tl.range(first, edges, num_stages=STAGES, disable_licm=CROWDED):
            n0 = start(edges_first(c, full_first, full_last, last, WHOLE), tk, BLOCK_N)
            dq = meet(
                dq, q, dout, top, shift, delta, q_ptr, k_ptr, v_ptr, dout_ptr, bias_ptr, dbias_ptr, keep_ptr, seed_ptr,
                first_row, m0, n0, begin, end, tq, tk, live, low, high, D, DV, q_stride_t, k_stride_t, v_stride_t,
                dout_stride_t, bias_stride_t, bias_stride_d, dbias_stride_t, keep_stride_t, keep_stride_d, scale, step,
                keep_scale, last_dropped, BLOCK_M, BLOCK_N, BLOCK_D, PAIRS_ALIGNED, PRECISION, SHIELDED, CHUNK, True,
                CAREFUL, STAGES > 1,
            )  # fmt: skip
        if WHOLE:
            for c in tl.range(full_first, full_last, num_stages=STAGES, disable_licm=CROWDED):
                dq = meet(
                    dq, q, dout, top, shift, delta, q_ptr, k_ptr, v_ptr, dout_ptr, bias_ptr, dbias_ptr, keep_ptr,
                    seed_ptr, first_row, m0, start(c, tk, BLOCK_N), begin, end, tq, tk, live, low, high, D, DV,
                    q_stride_t, k_stride_t, v_stride_t, dout_stride_t, bias_stride_t, bias_stride_d, dbias_stride_t,
                    keep_stride_t, keep_stride_d, scale, step, keep_scale, last_dropped, BLOCK_M, BLOCK_N, BLOCK_D,
                    PAIRS_ALIGNED, PRECISION, SHIELDED, CHUNK, False, CAREFUL, STAGES > 1,
                )  # fmt: skip
    return dq


@kernel
def attention_bwd_queries_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, dbias_ptr, keep_ptr, counts_ptr, tiles_ptr, lengths_ptr, cu_q_ptr, cu_k_ptr,
    seed_ptr, dout_ptr, statistics_ptr, dq_ptr, H: tl.int32, G: tl.int32, Tq: tl.int32, Tk: tl.int32,
    total_q: tl.int64, total_k: tl.int64, row_step: tl.int64, D: tl.int32, DV: tl.int32, DQ_D: tl.int32,
    q_stride_b: tl.int64, q_stride_h: tl.int64, q_stride_t: tl.int64,
    k_stride_b: tl.int64, k_stride_h: tl.int64, k_stride_t: tl.int64,
    v_stride_b: tl.int64, v_stride_h: tl.int64, v_stride_t: tl.int64,
    dout_stride_b: tl.int64, dout_stride_h: tl.int64, dout_stride_t: tl.int64,
    dq_stride_b: tl.int64, dq_stride_h: tl.int64, dq_stride_t: tl.int64,
    lse_stride_b: tl.int64, lse_stride_h: tl.int64,
    bias_stride_b: tl.int64, bias_stride_h: tl.int64, bias_stride_t: tl.int64, bias_stride_d: tl.int64,
    dbias_stride_b: tl.int64, dbias_stride_h: tl.int64, dbias_stride_t: tl.int64,
    keep_stride_b: tl.int64, keep_stride_h: tl.int64, keep_stride_t: tl.int64, keep_stride_d: tl.int64,
    list_stride_b: tl.int64, list_stride_h: tl.int64, list_width: tl.int64,
    low: tl.int64, high: tl.int64, end_low: tl.int64, end_high: tl.int64,
    scale, step, keep_scale, last_dropped: tl.int32,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, OUT_ALIGNED: tl.constexpr,
    PAIRS_ALIGNED: tl.constexpr, PRECISION: tl.constexpr, SHIELDED: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A tile of queries of one head; the last tile comes first."""
    tiles = (Tq + BLOCK_M - 1) // BLOCK_M
    row_tile = tiles - 1 - tl.program_id(0) % tiles
    b = (tl.program_id(0) // tiles // H).to(tl.int64)
    h = (tl.program_id(0) // tiles % H).to(tl.int64)
    q0, k0, tq, tk, live = sequence(b, Tq, Tk, total_q, total_k, lengths_ptr, cu_q_ptr, cu_k_ptr)
    low, high = band(tq, tk, low, high, end_low, end_high)
    m0 = row_tile * BLOCK_M
    if m0 >= tq:
        return
    kv = h // G
    q_ptr += b * q_stride_b + h * q_stride_h + q0 * q_stride_t
    dout_ptr += b * dout_stride_b + h * dout_stride_h + q0 * dout_stride_t
    k_ptr = settled(k_ptr + b * k_stride_b + kv * k_stride_h + k0 * k_stride_t)
    v_ptr = settled(v_ptr + b * v_stride_b + kv * v_stride_h + k0 * v_stride_t)
    rows = b * lse_stride_b + h * lse_stride_h + q0
    if bias_ptr is not None:
        bias_ptr = settled(bias_ptr + b * bias_stride_b + h * bias_stride_h)
    if dbias_ptr is not None:
        dbias_ptr = settled(dbias_ptr + b * dbias_stride_b + h * dbias_stride_h)
    if keep_ptr is not None:
        keep_ptr = settled(keep_ptr + b * keep_stride_b + h * keep_stride_h)
    slot = b * list_stride_b + h * list_stride_h + row_tile
    statistics = load_statistics(statistics_ptr + rows * 8, m0, tq, BLOCK_M, True)
    top = statistic(statistics, TOP)
    shift = statistic(statistics, SHIFT)
    delta = statistic(statistics, DELTA)
    q = m0
    dout = m0
    if CHUNK == 0:
        q = load_rows(q_ptr, m0, m0, tq, q_stride_t, D, BLOCK_M, BLOCK_D, True)
        dout = load_rows(dout_ptr, m0, m0, tq, dout_stride_t, DV, BLOCK_M, BLOCK_D, True)
    first_row = (b * H + h) * row_step
    # wide heads leave no registers for two ways: they take the careful one at once
    CAREFUL: tl.constexpr = BLOCK_D == 256 and (bias_ptr is not None or keep_ptr is not None)
    dq = gather(
        q, dout, top, shift, delta, q_ptr, k_ptr, v_ptr, dout_ptr, bias_ptr, dbias_ptr, keep_ptr, counts_ptr, tiles_ptr,
        seed_ptr, first_row, slot, list_width, m0, tq, tk, live, low, high, D, DV, q_stride_t, k_stride_t, v_stride_t,
        dout_stride_t, bias_stride_t, bias_stride_d, dbias_stride_t, keep_stride_t, keep_stride_d, scale, step,
        keep_scale, last_dropped, BLOCK_M, BLOCK_N, BLOCK_D, PAIRS_ALIGNED, PRECISION, SHIELDED, CHUNK,
        1 if CAREFUL else STAGES, CAREFUL, True,
    )  # fmt: skip
    if (bias_ptr is not None or keep_ptr is not None) and not CAREFUL:
        if not is_finite(dq):
            dq = gather(
                q, dout, top, shift, delta, q_ptr, k_ptr, v_ptr, dout_ptr, bias_ptr, dbias_ptr, keep_ptr, counts_ptr,
                tiles_ptr, seed_ptr, first_row, slot, list_width, m0, tq, tk, live, low, high, D, DV, q_stride_t,
                k_stride_t, v_stride_t, dout_stride_t, bias_stride_t, bias_stride_d, dbias_stride_t, keep_stride_t,
                keep_stride_d, scale, step, keep_scale, last_dropped, BLOCK_M, BLOCK_N, BLOCK_D, PAIRS_ALIGNED,
                PRECISION, SHIELDED, CHUNK, 1, True, False,
            )  # fmt: skip
    b, h, m0 = anew(b), anew(h), anew(m0)
    dq_ptr += b * dq_stride_b + h * dq_stride_h + q0 * dq_stride_t
    store_rows(dq * scale, dq_ptr, m0, tq, dq_stride_t, DQ_D, BLOCK_M, BLOCK_D, OUT_ALIGNED)
