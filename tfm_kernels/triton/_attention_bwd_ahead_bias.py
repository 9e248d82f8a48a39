"""The gradient of a bias that is broadcast along sequences or heads, 16-bit heads, compute capability 9, in Gluon.

Method:  as _attention_bwd_bias.py, with tiles two and four times as large: a sum over sequences and heads reads four
         tiles of rows for two products, of larger ones less. A program has three groups of four warps, as those of
         _gemm_ahead.py: one copies members' rows into a ring in shared memory, the other two sum half of a tile's
         queries each. The tile's bias is read for each member, from L1.
Limits:  float16, bfloat16; heads of 33 to 128; a bias of its own for each query and key, in rows at multiples of 16
         bytes, as the keep matrix'.
Source:  own work.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ._ahead import barriers, next_place, zero
from ._attention import band, keys_met, sequence
from ._attention_ahead_dropout import kept_weights
from ._attention_ahead_pairs import bias_of, keep_of, shown_tile, words_of
from ._attention_ahead_rows import AS_THEY_ARE, BY_FOUR, copy_numbers, copy_rows
from ._attention_bwd_ahead_pairs import store_pairs
from ._attention_bwd_ahead_tile import negative
from ._attention_bwd_tile import DELTA, SHIFT, TOP, weight_of

WARPS = gl.constexpr(4)  # of a group
ROWS_OF_GROUP = gl.constexpr(64)
PART = gl.constexpr(32)  # keys of a tile whose products are formed at once: registers leave no more


@gluon.jit
def tile_of_sums(Tq, Tk, B, H, SHARING_B, SHARING_H, SPLITS, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """(first query, first key, matrix of the sums, its sequence, its head, first member, how many) of this program."""
    across = (Tq + BLOCK_M - 1) // BLOCK_M
    along = (Tk + BLOCK_N - 1) // BLOCK_N
    pid = gl.program_id(0)
    matrix = pid // along // across  # (split, sequence, head)
    own_heads = H // SHARING_H
    own_b = matrix // own_heads % (B // SHARING_B)
    share = (SHARING_B * SHARING_H + SPLITS - 1) // SPLITS
    first = matrix // own_heads // (B // SHARING_B) * share
    count = gl.minimum(share, SHARING_B * SHARING_H - first)
    return pid // along % across * BLOCK_M, pid % along * BLOCK_N, matrix, own_b, matrix % own_heads, first, count


@gluon.jit
def member_of(c, own_b, own_h, SHARING_H):
    """(sequence, head) of member c of those that share a matrix."""
    return (own_b + c // SHARING_H).to(gl.int64), (own_h + c % SHARING_H).to(gl.int64)


@gluon.jit
def keys_of(b, m0, Tq, Tk, row_step, lengths_ptr, low, high, end_low, end_high, BLOCK_M: gl.constexpr):
    """(begin, end, live, low, high) of sequence b's keys that some query of a tile sees."""
    _, _, tq, tk, live = sequence(b, Tq, Tk, row_step, row_step, lengths_ptr, None, None)
    low, high = band(tq, tk, low, high, end_low, end_high)
    begin, end, _, _ = keys_met(m0, tq, live, low, high, BLOCK_M)
    return begin, end, live, low, high


@gluon.jit
def copy_members(
    q, dout, k, v, tops, shifts, deltas, full, empty, q_ptr, k_ptr, v_ptr, dout_ptr, statistics_ptr, lengths_ptr, B, H,
    G, SHARING_B, SHARING_H, SPLITS, Tq, Tk, row_step, D, DV, q_stride_b, q_stride_h, q_stride_t, k_stride_b,
    k_stride_h, k_stride_t, v_stride_b, v_stride_h, v_stride_t, dout_stride_b, dout_stride_h, dout_stride_t,
    lse_stride_b, lse_stride_h, low, high, end_low, end_high, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_D: gl.constexpr, RING: gl.constexpr,
):  # fmt: skip
    """The group that copies what members have of the tile, of those that have some."""
    m0, n0, _, own_b, own_h, first, count = tile_of_sums(Tq, Tk, B, H, SHARING_B, SHARING_H, SPLITS, BLOCK_M, BLOCK_N)
    slot, turn = 0, 1
    for c in range(first, first + count):
        b, h = member_of(c, own_b, own_h, SHARING_H)
        begin, end, _, _, _ = keys_of(b, m0, Tq, Tk, row_step, lengths_ptr, low, high, end_low, end_high, BLOCK_M)
        if (n0 < end) & (n0 + BLOCK_N > begin):
            kv, none = h // G, zero()
            mbarrier.wait(empty.index(slot), turn)
            copy_rows(
                q.index(slot), q_ptr + b * q_stride_b + h * q_stride_h, m0, m0, Tq, q_stride_t, D, AS_THEY_ARE, BLOCK_M,
                BLOCK_D, WARPS, None, none,
            )  # fmt: skip
            copy_rows(
                k.index(slot), k_ptr + b * k_stride_b + kv * k_stride_h, n0, begin, end, k_stride_t, D, BY_FOUR,
                BLOCK_N, BLOCK_D, WARPS, None, none,
            )  # fmt: skip
            copy_rows(
                dout.index(slot), dout_ptr + b * dout_stride_b + h * dout_stride_h, m0, m0, Tq, dout_stride_t, DV,
                AS_THEY_ARE, BLOCK_M, BLOCK_D, WARPS, None, none,
            )  # fmt: skip
            copy_rows(
                v.index(slot), v_ptr + b * v_stride_b + kv * v_stride_h, n0, begin, end, v_stride_t, DV, BY_FOUR,
                BLOCK_N, BLOCK_D, WARPS, None, none,
            )  # fmt: skip
            numbers = statistics_ptr + (b * lse_stride_b + h * lse_stride_h) * 8
            copy_numbers(tops.index(slot), numbers + TOP, m0, Tq, BLOCK_M, WARPS)
            copy_numbers(shifts.index(slot), numbers + SHIFT, m0, Tq, BLOCK_M, WARPS)
            copy_numbers(deltas.index(slot), numbers + DELTA, m0, Tq, BLOCK_M, WARPS)
            async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
            slot, turn = next_place(slot, turn, RING)


@gluon.jit
def store_part(sums, ptr, part: gl.constexpr, m0, n0, tq, tk, stride_t, scores: gl.constexpr):
    """Writes the sums of PART keys of a group's queries."""
    store_pairs(sums, ptr, m0, n0 + part * PART, tq, tk, stride_t, scores, ROWS_OF_GROUP, PART)


@gluon.jit
def gradient_part(
    total, part: gl.constexpr, q, dout, k, v, top, shift, delta, bias_ptr, keep_ptr, seed_ptr, first_row, m0, n0, tq,
    tk, live, low, high, bias_stride_t, keep_stride_t, scale, step, last_dropped, none, nothing, scores: gl.constexpr,
):  # fmt: skip
    """total + dx / keep_scale of PART keys of a group's queries of one member, whose rows are given."""
    DROPPED: gl.constexpr = seed_ptr is not None
    n0 += part * PART + zero()
    k, v = k.slice(part * PART, PART), v.slice(part * PART, PART)
    x = warpgroup_mma(q, k.permute((1, 0)), nothing, use_acc=False, is_async=True)
    products = warpgroup_mma(dout, v.permute((1, 0)), nothing, use_acc=False, is_async=True)
    bias_words, more_bias, keep_words = words_of(
        bias_ptr, keep_ptr, m0, n0, tq, tk, bias_stride_t, keep_stride_t, none, scores, ROWS_OF_GROUP, PART
    )
    kept = nothing
    if DROPPED:
        kept = kept_weights(gl.load(seed_ptr), None, 0, first_row, m0, n0, last_dropped, scores, ROWS_OF_GROUP, PART)
    x = warpgroup_mma_wait(1, [x])
    bias = bias_of(bias_words, more_bias, bias_ptr.dtype.element_ty, scores, ROWS_OF_GROUP, PART)
    x = gl.fma(x, scale, bias)
    shown = (bias != float("-inf")) & (x != float("-inf"))
    shown = shown & shown_tile(m0, n0, live, low, high, scores, ROWS_OF_GROUP, PART)
    if keep_ptr is not None:
        shown = shown & keep_of(keep_words, scores, ROWS_OF_GROUP, PART)
    p = weight_of(gl.fma(x - top, step, negative(shift)))
    products = warpgroup_mma_wait(0, [products])
    if DROPPED:
        products = gl.where(kept, products, 0.0)
    return total + gl.where(shown, p * (products - delta), 0.0)


@gluon.jit
def sum_members(
    q, dout, k, v, tops, shifts, deltas, full, empty, bias_ptr, keep_ptr, lengths_ptr, seed_ptr, sums_ptr, B, H,
    SHARING_B, SHARING_H, SPLITS, Tq, Tk, row_step, bias_stride_b, bias_stride_h, bias_stride_t, keep_stride_b,
    keep_stride_h, keep_stride_t, ROWS, COLUMNS, low, high, end_low, end_high, scale, step, keep_scale, unscale,
    last_dropped, half: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, RING: gl.constexpr,
):  # fmt: skip
    """A group that multiplies: the sums of one half of the tile's queries."""
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, PART, 16])
    rows: gl.constexpr = gl.SliceLayout(1, scores)
    PARTS: gl.constexpr = BLOCK_N // PART
    tile0, n0, matrix, own_b, own_h, first, count = tile_of_sums(
        Tq, Tk, B, H, SHARING_B, SHARING_H, SPLITS, BLOCK_M, BLOCK_N
    )
    m0 = tile0 + half * ROWS_OF_GROUP
    none = gl.zeros([1], gl.int32, rows)
    nothing = gl.zeros([ROWS_OF_GROUP, PART], gl.float32, scores)
    total0 = gl.zeros([ROWS_OF_GROUP, PART], gl.float32, scores)
    total1, total2, total3 = total0 + 0.0, total0 + 0.0, total0 + 0.0
    bias_ptr += own_b.to(gl.int64) * bias_stride_b + own_h.to(gl.int64) * bias_stride_h
    slot, turn = 0, 0
    for c in range(first, first + count):
        b, h = member_of(c, own_b, own_h, SHARING_H)
        begin, end, live, near_low, near_high = keys_of(
            b, tile0, Tq, Tk, row_step, lengths_ptr, low, high, end_low, end_high, BLOCK_M
        )
        if (n0 < end) & (n0 + BLOCK_N > begin):
            keep_head = keep_ptr
            if keep_ptr is not None:
                keep_head = keep_ptr + b * keep_stride_b + h * keep_stride_h
            mbarrier.wait(full.index(slot), turn)
            fence_async_shared()
            top = tops.index(slot).slice(half * ROWS_OF_GROUP, ROWS_OF_GROUP).load(rows)
            shift = shifts.index(slot).slice(half * ROWS_OF_GROUP, ROWS_OF_GROUP).load(rows)
            delta = deltas.index(slot).slice(half * ROWS_OF_GROUP, ROWS_OF_GROUP).load(rows)
            top, shift, delta = gl.expand_dims(top, 1), gl.expand_dims(shift, 1), gl.expand_dims(delta, 1)
            if seed_ptr is not None:
                delta = delta * unscale
            own_q = q.index(slot).slice(half * ROWS_OF_GROUP, ROWS_OF_GROUP)
            own_dout = dout.index(slot).slice(half * ROWS_OF_GROUP, ROWS_OF_GROUP)
            first_row = (b * H + h) * row_step
            total0 = gradient_part(
                total0, 0, own_q, own_dout, k.index(slot), v.index(slot), top, shift, delta, bias_ptr, keep_head,
                seed_ptr, first_row, m0, n0, Tq, Tk, live, near_low, near_high, bias_stride_t, keep_stride_t, scale,
                step, last_dropped, none, nothing, scores,
            )  # fmt: skip
            total1 = gradient_part(
                total1, 1, own_q, own_dout, k.index(slot), v.index(slot), top, shift, delta, bias_ptr, keep_head,
                seed_ptr, first_row, m0, n0, Tq, Tk, live, near_low, near_high, bias_stride_t, keep_stride_t, scale,
                step, last_dropped, none, nothing, scores,
            )  # fmt: skip
            if PARTS == 4:
                total2 = gradient_part(
                    total2, 2, own_q, own_dout, k.index(slot), v.index(slot), top, shift, delta, bias_ptr, keep_head,
                    seed_ptr, first_row, m0, n0, Tq, Tk, live, near_low, near_high, bias_stride_t, keep_stride_t, scale,
                    step, last_dropped, none, nothing, scores,
                )  # fmt: skip
                total3 = gradient_part(
                    total3, 3, own_q, own_dout, k.index(slot), v.index(slot), top, shift, delta, bias_ptr, keep_head,
                    seed_ptr, first_row, m0, n0, Tq, Tk, live, near_low, near_high, bias_stride_t, keep_stride_t, scale,
                    step, last_dropped, none, nothing, scores,
                )  # fmt: skip
            mbarrier.arrive(empty.index(slot))
            slot, turn = next_place(slot, turn, RING)
    sums_ptr += matrix.to(gl.int64) * ROWS * COLUMNS
    store_part(total0 * keep_scale, sums_ptr, 0, m0, n0, Tq, Tk, COLUMNS, scores)
    store_part(total1 * keep_scale, sums_ptr, 1, m0, n0, Tq, Tk, COLUMNS, scores)
    if PARTS == 4:
        store_part(total2 * keep_scale, sums_ptr, 2, m0, n0, Tq, Tk, COLUMNS, scores)
        store_part(total3 * keep_scale, sums_ptr, 3, m0, n0, Tq, Tk, COLUMNS, scores)


_RUNTIME = (
    "q_ptr", "k_ptr", "v_ptr", "bias_ptr", "keep_ptr", "lengths_ptr", "seed_ptr", "dout_ptr", "statistics_ptr",
    "sums_ptr", "B", "H", "G", "SHARING_B", "SHARING_H", "SPLITS", "Tq", "Tk", "row_step", "D", "DV", "q_stride_b",
    "q_stride_h", "q_stride_t", "k_stride_b", "k_stride_h", "k_stride_t", "v_stride_b", "v_stride_h", "v_stride_t",
    "dout_stride_b", "dout_stride_h", "dout_stride_t", "lse_stride_b", "lse_stride_h", "bias_stride_b", "bias_stride_h",
    "bias_stride_t", "keep_stride_b", "keep_stride_h", "keep_stride_t", "ROWS", "COLUMNS", "low", "high", "end_low",
    "end_high", "scale", "step", "keep_scale", "unscale", "last_dropped",
)  # fmt: skip


@gluon.jit(do_not_specialize=_RUNTIME)
def attention_bwd_ahead_bias_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, keep_ptr, lengths_ptr, seed_ptr, dout_ptr, statistics_ptr, sums_ptr,
    B: gl.int32, H: gl.int32, G: gl.int32, SHARING_B: gl.int32, SHARING_H: gl.int32, SPLITS: gl.int32,
    Tq: gl.int32, Tk: gl.int32, row_step: gl.int64, D: gl.int32, DV: gl.int32,
    q_stride_b: gl.int64, q_stride_h: gl.int64, q_stride_t: gl.int64,
    k_stride_b: gl.int64, k_stride_h: gl.int64, k_stride_t: gl.int64,
    v_stride_b: gl.int64, v_stride_h: gl.int64, v_stride_t: gl.int64,
    dout_stride_b: gl.int64, dout_stride_h: gl.int64, dout_stride_t: gl.int64,
    lse_stride_b: gl.int64, lse_stride_h: gl.int64,
    bias_stride_b: gl.int64, bias_stride_h: gl.int64, bias_stride_t: gl.int64,
    keep_stride_b: gl.int64, keep_stride_h: gl.int64, keep_stride_t: gl.int64,
    ROWS: gl.int64, COLUMNS: gl.int64, low: gl.int64, high: gl.int64, end_low: gl.int64, end_high: gl.int64,
    scale, step, keep_scale, unscale, last_dropped: gl.int32,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, RING: gl.constexpr,
):  # fmt: skip
    """As attention_bwd_bias_kernel, of a bias that has a number for each query and each key."""
    kind: gl.constexpr = q_ptr.dtype.element_ty
    queries: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_D], kind)
    keys: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_D], kind)
    numbers: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q = gl.allocate_shared_memory(kind, [RING, BLOCK_M, BLOCK_D], queries)
    dout = gl.allocate_shared_memory(kind, [RING, BLOCK_M, BLOCK_D], queries)
    k = gl.allocate_shared_memory(kind, [RING, BLOCK_N, BLOCK_D], keys)
    v = gl.allocate_shared_memory(kind, [RING, BLOCK_N, BLOCK_D], keys)
    tops = gl.allocate_shared_memory(gl.float32, [RING, BLOCK_M], numbers)
    shifts = gl.allocate_shared_memory(gl.float32, [RING, BLOCK_M], numbers)
    deltas = gl.allocate_shared_memory(gl.float32, [RING, BLOCK_M], numbers)
    full, empty = barriers(32 * WARPS, RING), barriers(2, RING)
    # registers of a thread: the two groups that multiply have what the one that copies leaves, of wide heads more rows
    MULTIPLYING: gl.constexpr = 224 if BLOCK_D == 64 else 216
    COPYING: gl.constexpr = 64 if BLOCK_D == 64 else 80
    gl.warp_specialize(
        [
            (
                sum_members,
                (q, dout, k, v, tops, shifts, deltas, full, empty, bias_ptr, keep_ptr, lengths_ptr, seed_ptr, sums_ptr,
                 B, H, SHARING_B, SHARING_H, SPLITS, Tq, Tk, row_step, bias_stride_b, bias_stride_h, bias_stride_t,
                 keep_stride_b, keep_stride_h, keep_stride_t, ROWS, COLUMNS, low, high, end_low, end_high, scale, step,
                 keep_scale, unscale, last_dropped, 0, BLOCK_M, BLOCK_N, RING),
            ),
            (
                sum_members,
                (q, dout, k, v, tops, shifts, deltas, full, empty, bias_ptr, keep_ptr, lengths_ptr, seed_ptr, sums_ptr,
                 B, H, SHARING_B, SHARING_H, SPLITS, Tq, Tk, row_step, bias_stride_b, bias_stride_h, bias_stride_t,
                 keep_stride_b, keep_stride_h, keep_stride_t, ROWS, COLUMNS, low, high, end_low, end_high, scale, step,
                 keep_scale, unscale, last_dropped, 1, BLOCK_M, BLOCK_N, RING),
            ),
            (
                copy_members,
                (q, dout, k, v, tops, shifts, deltas, full, empty, q_ptr, k_ptr, v_ptr, dout_ptr, statistics_ptr,
                 lengths_ptr, B, H, G, SHARING_B, SHARING_H, SPLITS, Tq, Tk, row_step, D, DV, q_stride_b, q_stride_h,
                 q_stride_t, k_stride_b, k_stride_h, k_stride_t, v_stride_b, v_stride_h, v_stride_t, dout_stride_b,
                 dout_stride_h, dout_stride_t, lse_stride_b, lse_stride_h, low, high, end_low, end_high, BLOCK_M,
                 BLOCK_N, BLOCK_D, RING),
            ),
        ],
        [WARPS, WARPS], [MULTIPLYING, COPYING],
    )  # fmt: skip
