"""The gradient of a bias that is broadcast: dx summed over the axes that bias was broadcast along, A.10.

Owns:    one program = one tile of pairs of one matrix of the bias; it recomputes dx for every sequence and head that
         shares the matrix, one after another, so that every sum has a fixed order and nothing larger than the bias is
         stored. Where that leaves too few programs, the sequences and heads are split, and each split writes a matrix
         of its own; along an axis of 1, each tile leaves its sum. The host adds those up.
Cost:    two of the backward's five products once more: 4 B H Tq Tk D operations.
"""

from __future__ import annotations

import triton.language as tl

from ._attention import band, dots, kernel, keys_met, load_rows, sequence
from ._attention_bwd_tile import DELTA, SHIFT, TOP, gradient_tile, load_statistics, statistic
from ._tile import near


@kernel
def attention_bwd_bias_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, keep_ptr, lengths_ptr, seed_ptr, dout_ptr, statistics_ptr,
    sums_ptr, B: tl.int32, H: tl.int32, G: tl.int32, SHARING_B: tl.int32, SHARING_H: tl.int32, SPLITS: tl.int32,
    Tq: tl.int32, Tk: tl.int32, row_step: tl.int64, D: tl.int32, DV: tl.int32,
    q_stride_b: tl.int64, q_stride_h: tl.int64, q_stride_t: tl.int64,
    k_stride_b: tl.int64, k_stride_h: tl.int64, k_stride_t: tl.int64,
    v_stride_b: tl.int64, v_stride_h: tl.int64, v_stride_t: tl.int64,
    dout_stride_b: tl.int64, dout_stride_h: tl.int64, dout_stride_t: tl.int64,
    lse_stride_b: tl.int64, lse_stride_h: tl.int64,
    bias_stride_b: tl.int64, bias_stride_h: tl.int64, bias_stride_t: tl.int64, bias_stride_d: tl.int64,
    keep_stride_b: tl.int64, keep_stride_h: tl.int64, keep_stride_t: tl.int64, keep_stride_d: tl.int64,
    ROWS: tl.int64, COLUMNS: tl.int64, low: tl.int64, high: tl.int64, end_low: tl.int64, end_high: tl.int64,
    scale, step, keep_scale, last_dropped: tl.int32,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PAIRS_ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, PER_ROW: tl.constexpr, PER_COLUMN: tl.constexpr,
):  # fmt: skip
    """sums_ptr is (SPLITS, bias' sequences, bias' heads, ROWS, COLUMNS) float32; rows are queries if PER_ROW, else
    tiles of them, and columns likewise. SHARING_B sequences and SHARING_H heads share one matrix.
    """
    across = (Tq + BLOCK_M - 1) // BLOCK_M
    along = (Tk + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0)
    key_tile = pid % along
    row_tile = pid // along % across
    matrix = pid // along // across  # (split, sequence, head) of the sums
    own_heads = H // SHARING_H
    own_h = matrix % own_heads
    own_b = matrix // own_heads % (B // SHARING_B)
    split = matrix // own_heads // (B // SHARING_B)
    m0 = row_tile * BLOCK_M
    n0 = key_tile * BLOCK_N
    share = (SHARING_B * SHARING_H + SPLITS - 1) // SPLITS
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    members = tl.minimum((split + 1) * share, SHARING_B * SHARING_H)
    # what does not change from member to member stays in the loop where two of these take too many registers
    CROWDED: tl.constexpr = (BLOCK_D <= 64) + (seed_ptr is not None) + (not PAIRS_ALIGNED) >= 2
    for member in tl.range(split * share, members, disable_licm=CROWDED):
        b = (own_b + member // SHARING_H).to(tl.int64)
        h = (own_h + member % SHARING_H).to(tl.int64)
        q0, k0, tq, tk, live = sequence(b, Tq, Tk, row_step, row_step, lengths_ptr, None, None)
        near_low, near_high = band(tq, tk, low, high, end_low, end_high)
        begin, end, full_begin, full_end = keys_met(m0, tq, live, near_low, near_high, BLOCK_M)
        if (n0 < end) & (n0 + BLOCK_N > begin):
            kv = h // G
            q_head = q_ptr + b * q_stride_b + h * q_stride_h
            k_head = k_ptr + b * k_stride_b + kv * k_stride_h
            v_head = v_ptr + b * v_stride_b + kv * v_stride_h
            dout_head = dout_ptr + b * dout_stride_b + h * dout_stride_h
            q = m0
            k = m0
            v = m0
            dout = m0
            if CHUNK == 0:
                q = load_rows(q_head, m0, m0, tq, q_stride_t, D, BLOCK_M, BLOCK_D, True)
                dout = load_rows(dout_head, m0, m0, tq, dout_stride_t, DV, BLOCK_M, BLOCK_D, True)
                k = load_rows(k_head, n0, begin, end, k_stride_t, D, BLOCK_N, BLOCK_D, True)
                v = load_rows(v_head, n0, begin, end, v_stride_t, DV, BLOCK_N, BLOCK_D, True)
            x = dots(
                q, q_head, m0, m0, tq, q_stride_t, k, k_head, n0, begin, end, k_stride_t, D, BLOCK_M, BLOCK_N, CHUNK,
                PRECISION,
            )  # fmt: skip
            products = dots(
                dout, dout_head, m0, m0, tq, dout_stride_t, v, v_head, n0, begin, end, v_stride_t, DV, BLOCK_M, BLOCK_N,
                CHUNK, PRECISION,
            )  # fmt: skip
            rows = b * lse_stride_b + h * lse_stride_h
            statistics = load_statistics(statistics_ptr + rows * 8, m0, tq, BLOCK_M, True)
            top = statistic(statistics, TOP)
            shift = statistic(statistics, SHIFT)
            delta = statistic(statistics, DELTA)
            keep_head = keep_ptr
            if keep_ptr is not None:
                keep_head = keep_ptr + b * keep_stride_b + h * keep_stride_h
            bias_head = bias_ptr + b * bias_stride_b + h * bias_stride_h
            weights, dx, hidden = gradient_tile(
                x, products, top, shift, top, delta, bias_head, keep_head, seed_ptr, (b * H + h) * row_step, m0, n0, tq,
                tk, live, near_low, near_high, bias_stride_t, bias_stride_d, keep_stride_t, keep_stride_d, scale, step,
                keep_scale, last_dropped, BLOCK_M, BLOCK_N, PAIRS_ALIGNED, True, False, True, False, False,
            )  # fmt: skip
            total += dx
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    sums_ptr += matrix.to(tl.int64) * ROWS * COLUMNS
    rows_left = near(Tq - m0, 4096)
    columns_left = near(Tk - n0, 4096)
    if PER_ROW and PER_COLUMN:
        ptrs = sums_ptr + (m0 + offs_m)[:, None] * COLUMNS + (n0 + offs_n)[None, :]
        tl.store(ptrs, total, mask=(offs_m < rows_left)[:, None] & (offs_n < columns_left)[None, :])
    elif PER_ROW:
        tl.store(sums_ptr + (m0 + offs_m) * COLUMNS + key_tile, tl.sum(total, 1), mask=offs_m < rows_left)
    elif PER_COLUMN:
        tl.store(sums_ptr + row_tile * COLUMNS + n0 + offs_n, tl.sum(total, 0), mask=offs_n < columns_left)
    else:
        tl.store(sums_ptr + row_tile * COLUMNS + key_tile, tl.sum(total))
