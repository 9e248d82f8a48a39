"""What the backward needs of each row: one launch before the others.

top and shift give the weights, p = 2^((x - top) step - shift): lse in units of the scores, and 0; offset is both in one
number, top step + shift. Where |lse| is so large that float32 has lost log(sum) beside the maximum, the row is met once
more for its maximum and log2(sum), and its offset is NaN. delta is dout . out - dlse, the term of A.7 that is the same
for all keys. A row that sees nothing has top = inf, a row with NaN top = NaN.
Traffic: reads out, dout, lse (and dlse); writes four numbers per row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._attention import band, dots, kernel, keys_met, load_rows, sequence, start, tiles_met
from ._attention_bwd_tile import DELTA, OFFSET, SHIFT, TOP, load_row_numbers
from ._attention_pairs import score_tile

FAR = tl.constexpr(65536.0)


@triton.jit
def store_number(value, ptr, number, rows, m0, tq, BLOCK_M: tl.constexpr):
    """Writes one of the numbers of each row, from row m0 of those that begin at ``rows``."""
    offs_m = tl.arange(0, BLOCK_M)
    tl.store(ptr + (rows + m0) * 8 + offs_m * 8 + number, value, mask=offs_m < tq - m0)


@kernel
def attention_bwd_rows_kernel(
    q_ptr, k_ptr, bias_ptr, keep_ptr, lengths_ptr, cu_q_ptr, cu_k_ptr, out_ptr, dout_ptr, lse_ptr, dlse_ptr,
    statistics_ptr, H: tl.int32, G: tl.int32, Tq: tl.int32, Tk: tl.int32, total_q: tl.int64, total_k: tl.int64,
    D: tl.int32, DV: tl.int32, q_stride_b: tl.int64, q_stride_h: tl.int64, q_stride_t: tl.int64, k_stride_b: tl.int64,
    k_stride_h: tl.int64, k_stride_t: tl.int64, out_stride_b: tl.int64, out_stride_h: tl.int64, out_stride_t: tl.int64,
    dout_stride_b: tl.int64, dout_stride_h: tl.int64, dout_stride_t: tl.int64, lse_stride_b: tl.int64,
    lse_stride_h: tl.int64, bias_stride_b: tl.int64, bias_stride_h: tl.int64, bias_stride_t: tl.int64,
    bias_stride_d: tl.int64, keep_stride_b: tl.int64, keep_stride_h: tl.int64, keep_stride_t: tl.int64,
    keep_stride_d: tl.int64, low: tl.int64, high: tl.int64, end_low: tl.int64, end_high: tl.int64, scale, step, unit,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PAIRS_ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head."""
    tiles = (Tq + BLOCK_M - 1) // BLOCK_M
    m0 = tl.program_id(0) % tiles * BLOCK_M
    b = (tl.program_id(0) // tiles // H).to(tl.int64)
    h = (tl.program_id(0) // tiles % H).to(tl.int64)
    q0, k0, tq, tk, live = sequence(b, Tq, Tk, total_q, total_k, lengths_ptr, cu_q_ptr, cu_k_ptr)
    low, high = band(tq, tk, low, high, end_low, end_high)
    if m0 >= tq:
        return
    out_ptr += b * out_stride_b + h * out_stride_h + q0 * out_stride_t
    dout_ptr += b * dout_stride_b + h * dout_stride_h + q0 * dout_stride_t
    out = load_rows(out_ptr, m0, m0, tq, out_stride_t, DV, BLOCK_M, BLOCK_D, True).to(tl.float32)
    dout = load_rows(dout_ptr, m0, m0, tq, dout_stride_t, DV, BLOCK_M, BLOCK_D, True).to(tl.float32)
    rows = b * lse_stride_b + h * lse_stride_h + q0
    lse = load_row_numbers(lse_ptr + rows, m0, tq, BLOCK_M)
    delta = tl.sum(out * dout, 1)
    if dlse_ptr is not None:
        delta -= load_row_numbers(dlse_ptr + rows, m0, tq, BLOCK_M)
    blind = lse == float("-inf")
    top = tl.where(blind, float("inf"), tl.div_rn(lse, tl.zeros((BLOCK_M,), tl.float32) + unit))
    shift = tl.zeros((BLOCK_M,), tl.float32)
    far = (tl.abs(lse) > FAR) & (tl.abs(lse) < float("inf"))
    if tl.max(far.to(tl.int32), 0) > 0:
        kv = h // G
        q_ptr += b * q_stride_b + h * q_stride_h + q0 * q_stride_t
        k_ptr += b * k_stride_b + kv * k_stride_h + k0 * k_stride_t
        if bias_ptr is not None:
            bias_ptr += b * bias_stride_b + h * bias_stride_h
        if keep_ptr is not None:
            keep_ptr += b * keep_stride_b + h * keep_stride_h
        q = m0
        if CHUNK == 0:
            q = load_rows(q_ptr, m0, m0, tq, q_stride_t, D, BLOCK_M, BLOCK_D, True)
        most = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        begin, end, full_begin, full_end = keys_met(m0, tq, live, low, high, BLOCK_M)
        first, _, _, last = tiles_met(begin, end, full_begin, full_end, BLOCK_N)
        for t in tl.range(first, last, num_stages=1):
            n0 = start(t, tk, BLOCK_N)
            k = load_rows(k_ptr, n0, begin, end, k_stride_t, D, BLOCK_N, BLOCK_D, True) if CHUNK == 0 else q
            x = dots(
                q, q_ptr, m0, m0, tq, q_stride_t, k, k_ptr, n0, begin, end, k_stride_t, D, BLOCK_M, BLOCK_N, CHUNK,
                PRECISION,
            )  # fmt: skip
            x = score_tile(
                x, bias_ptr, keep_ptr, m0, n0, tq, tk, live, low, high, bias_stride_t, bias_stride_d, keep_stride_t,
                keep_stride_d, scale, BLOCK_M, BLOCK_N, PAIRS_ALIGNED, True, False, False, False,
            )  # fmt: skip
            higher = tl.maximum(most, tl.max(x, 1))
            safe = tl.where(higher == float("-inf"), 0.0, higher)
            total = total * tl.exp2((most - safe) * step) + tl.sum(tl.exp2((x - safe[:, None]) * step), 1)
            most = higher
        top = tl.where(far, most, top)
        shift = tl.where(far, tl.log2(tl.where(far, total, 1.0)), shift)
    offset = tl.where(far, float("nan"), tl.where(blind, float("inf"), top * step))
    store_number(top, statistics_ptr, TOP, rows, m0, tq, BLOCK_M)
    store_number(shift, statistics_ptr, SHIFT, rows, m0, tq, BLOCK_M)
    store_number(offset, statistics_ptr, OFFSET, rows, m0, tq, BLOCK_M)
    store_number(tl.where(blind, 0.0, delta), statistics_ptr, DELTA, rows, m0, tq, BLOCK_M)
