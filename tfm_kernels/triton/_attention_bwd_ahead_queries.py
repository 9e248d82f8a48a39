"""dq of attention with 16-bit heads on GPUs of compute capability 9, in Gluon.

Method:  as _attention_bwd_queries.py; while a tile's weights are computed its dout v^T is multiplied, and the last
         tile's dq while this one's keys and values are seen to.
Order:   tiles that the band cuts come first, then those that all rows see; with a keep matrix those of the lists of
         _attention_tiles.py. Keys and values pass through rings of four tiles. A warp group keeps 64 queries and their
         dout, in registers where heads are narrow.
Limits:  float16, bfloat16; heads of 33 to 128; rows of bias and keep matrix at multiples of 16 bytes.
Source:  own work, after Shah et al. 2024, arXiv:2407.08608, and Dao 2023, arXiv:2307.08691, algorithm 2.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from ._ahead import barrier, by_16_bytes
from ._attention import band, is_finite, keys_met, sequence, tiles_met
from ._attention_ahead_dropout import kept_weights
from ._attention_ahead_pairs import seen_keys, words_of
from ._attention_ahead_rows import AS_THEY_ARE, BY_FOUR, copy_rows, listed_tile_of, store_rows, tiles_from
from ._attention_bwd_ahead_pairs import store_pairs, weights_of
from ._attention_bwd_ahead_tile import RING, gradient_of
from ._attention_bwd_tile import DELTA, SHIFT, TOP
from ._tile import near


@gluon.jit
def copy_tile(
    c, number, count, k, v, k_ptr, v_ptr, begin, end, D, DV, k_stride_t, v_stride_t, BLOCK_N: gl.constexpr,
    BLOCK_D: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Begins to copy the c-th tile of keys, which has this number, to its place; zeros where there is none."""
    n0 = number * BLOCK_N
    to = c % RING
    end = gl.where(c < count, end, begin)
    copy_rows(k.index(to), k_ptr, n0, begin, end, k_stride_t, D, BY_FOUR, BLOCK_N, BLOCK_D, WARPS)
    copy_rows(v.index(to), v_ptr, n0, begin, end, v_stride_t, DV, BY_FOUR, BLOCK_N, BLOCK_D, WARPS)


@gluon.jit
def meet(
    from_c, to_c, dq, bias_words, more_bias, keep_words, tile0, tile1, tile2, q, dout, k, v, top, shift, delta, count,
    first, full_first, full_last, last, list_ptr, k_ptr, v_ptr, bias_ptr, dbias_ptr, keep_ptr, seed_ptr, bits_ptr,
    bits_stride, first_row, m0, begin, end, tq, tk, live, low, high, D, DV, k_stride_t, v_stride_t, bias_stride_t,
    dbias_stride_t, keep_stride_t, scale, step, keep_scale, last_dropped, none, nothing, scores: gl.constexpr, sums_of:
    gl.constexpr, MASKED: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Adds tiles from_c..to_c - 1 of keys to dq (without the scale).

    bias_words, more_bias and keep_words are the first tile's; of a list tile0, tile1 and tile2 the first three numbers.
    """
    kind: gl.constexpr = k.dtype
    DROPPED: gl.constexpr = seed_ptr is not None
    HIDES: gl.constexpr = MASKED or bias_ptr is not None
    dq = warpgroup_mma_init(dq)
    for c in range(from_c, to_c):
        now, after, later, tile0, tile1, tile2 = tiles_from(
            c, tile0, tile1, tile2, count, first, full_first, full_last, last, list_ptr
        )
        n0, n1 = now * BLOCK_N, after * BLOCK_N
        async_copy.wait_group(2)  # all but the next tile, for which the last tile but one has made place
        barrier()
        fence_async_shared()
        copy_tile(
            c + 2, later, count, k, v, k_ptr, v_ptr, begin, end, D, DV, k_stride_t, v_stride_t, BLOCK_N, BLOCK_D, WARPS
        )
        x = warpgroup_mma(q, k.index(c % RING).permute((1, 0)), nothing, use_acc=False, is_async=True)
        products = warpgroup_mma(dout, v.index(c % RING).permute((1, 0)), nothing, use_acc=False, is_async=True)
        next_bias, next_more, next_keep = words_of(
            bias_ptr, keep_ptr, m0, n1, tq, tk, bias_stride_t, keep_stride_t, none, scores, BLOCK_M, BLOCK_N
        )
        kept = nothing
        if DROPPED:
            kept = kept_weights(
                gl.load(seed_ptr), bits_ptr, bits_stride, first_row, m0, n0, last_dropped, scores, BLOCK_M, BLOCK_N
            )
        x, dq = warpgroup_mma_wait(1, [x, dq])
        p = weights_of(
            x, top, shift, kept, bias_ptr, keep_ptr, bias_words, more_bias, keep_words, m0, n0, live, low, high, scale,
            step, MASKED, DROPPED, scores, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        products = warpgroup_mma_wait(0, [products])
        dx = gradient_of(p, products, delta, HIDES, DROPPED)
        if dbias_ptr is not None:
            own = dx * keep_scale if DROPPED else dx
            store_pairs(own, dbias_ptr, m0, n0, tq, tk, dbias_stride_t, scores, BLOCK_M, BLOCK_N)
        dx = gl.convert_layout(dx.to(kind), gl.DotOperandLayout(0, sums_of, 2))
        dq = warpgroup_mma(dx, k.index(c % RING), dq, is_async=True)
        bias_words, more_bias, keep_words = next_bias, next_more, next_keep
    dq = warpgroup_mma_wait(0, [dq])
    return dq, bias_words, more_bias, keep_words, tile0, tile1, tile2


@gluon.jit
def meet_carefully(
    c, dq, q, dout, k, v, top, shift, delta, count, first, full_first, full_last, last, list_ptr, k_ptr, v_ptr,
    bias_ptr, keep_ptr, seed_ptr, first_row, m0, begin, end, tq, tk, live, low, high, D, DV, k_stride_t, v_stride_t,
    bias_stride_t, keep_stride_t, scale, step, last_dropped, none, nothing, scores: gl.constexpr, sums_of: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Adds the c-th tile once more, with those keys as 0 that no row of the tile sees."""
    kind: gl.constexpr = k.dtype
    DROPPED: gl.constexpr = seed_ptr is not None
    by: gl.constexpr = by_16_bytes(BLOCK_D, WARPS)
    number = listed_tile_of(c, count, first, full_first, full_last, last, list_ptr)
    n0 = number * BLOCK_N
    barrier()
    copy_tile(0, number, count, k, v, k_ptr, v_ptr, begin, end, D, DV, k_stride_t, v_stride_t, BLOCK_N, BLOCK_D, WARPS)
    bias_words, more_bias, keep_words = words_of(
        bias_ptr, keep_ptr, m0, n0, tq, tk, bias_stride_t, keep_stride_t, none, scores, BLOCK_M, BLOCK_N
    )
    kept = nothing
    if DROPPED:
        kept = kept_weights(gl.load(seed_ptr), None, 0, first_row, m0, n0, last_dropped, scores, BLOCK_M, BLOCK_N)
    async_copy.wait_group(0)
    barrier()
    fence_async_shared()
    x = warpgroup_mma(q, k.index(0).permute((1, 0)), nothing, use_acc=False)
    products = warpgroup_mma(dout, v.index(0).permute((1, 0)), nothing, use_acc=False)
    p = weights_of(
        x, top, shift, kept, bias_ptr, keep_ptr, bias_words, more_bias, keep_words, m0, n0, live, low, high, scale,
        step, True, DROPPED, scores, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    seen = seen_keys(p != float("-inf"), m0, tq, scores, BLOCK_M)
    seen = gl.expand_dims(gl.convert_layout(seen, gl.SliceLayout(1, by)), 1)
    chosen = gl.where(seen > 0, k.index(0).load(by), gl.zeros([BLOCK_N, BLOCK_D], kind, by))
    barrier()
    k.index(0).store(chosen)
    dx = gradient_of(p, products, delta, True, DROPPED)
    dx = gl.convert_layout(dx.to(kind), gl.DotOperandLayout(0, sums_of, 2))
    fence_async_shared()
    barrier()
    return warpgroup_mma(dx, k.index(0), dq)


_RUNTIME = (
    "q_ptr", "k_ptr", "v_ptr", "bias_ptr", "dbias_ptr", "keep_ptr", "counts_ptr", "tiles_ptr", "lengths_ptr",
    "cu_q_ptr", "cu_k_ptr", "seed_ptr", "bits_ptr", "dout_ptr", "statistics_ptr", "dq_ptr", "H", "G", "Tq", "Tk",
    "total_q", "total_k", "row_step", "D", "DV", "DQ_D", "q_stride_b", "q_stride_h", "q_stride_t", "k_stride_b",
    "k_stride_h", "k_stride_t", "v_stride_b", "v_stride_h", "v_stride_t", "dout_stride_b", "dout_stride_h",
    "dout_stride_t", "dq_stride_b", "dq_stride_h", "dq_stride_t", "lse_stride_b", "lse_stride_h", "bias_stride_b",
    "bias_stride_h", "bias_stride_t", "dbias_stride_b", "dbias_stride_h", "dbias_stride_t", "keep_stride_b",
    "keep_stride_h", "keep_stride_t", "list_stride_b", "list_stride_h", "list_width", "bits_stride", "bits_stride_h",
    "low", "high", "end_low", "end_high", "scale", "step", "keep_scale", "unscale", "last_dropped",
)  # fmt: skip


@gluon.jit(do_not_specialize=_RUNTIME)
def attention_bwd_ahead_queries_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, dbias_ptr, keep_ptr, counts_ptr, tiles_ptr, lengths_ptr, cu_q_ptr, cu_k_ptr,
    seed_ptr, bits_ptr, dout_ptr, statistics_ptr, dq_ptr,
    H: gl.int32, G: gl.int32, Tq: gl.int32, Tk: gl.int32, total_q: gl.int64, total_k: gl.int64, row_step: gl.int64,
    D: gl.int32, DV: gl.int32, DQ_D: gl.int32,
    q_stride_b: gl.int64, q_stride_h: gl.int64, q_stride_t: gl.int64,
    k_stride_b: gl.int64, k_stride_h: gl.int64, k_stride_t: gl.int64,
    v_stride_b: gl.int64, v_stride_h: gl.int64, v_stride_t: gl.int64,
    dout_stride_b: gl.int64, dout_stride_h: gl.int64, dout_stride_t: gl.int64,
    dq_stride_b: gl.int64, dq_stride_h: gl.int64, dq_stride_t: gl.int64,
    lse_stride_b: gl.int64, lse_stride_h: gl.int64,
    bias_stride_b: gl.int64, bias_stride_h: gl.int64, bias_stride_t: gl.int64,
    dbias_stride_b: gl.int64, dbias_stride_h: gl.int64, dbias_stride_t: gl.int64,
    keep_stride_b: gl.int64, keep_stride_h: gl.int64, keep_stride_t: gl.int64,
    list_stride_b: gl.int64, list_stride_h: gl.int64, list_width: gl.int64,
    bits_stride: gl.int32, bits_stride_h: gl.int64,
    low: gl.int64, high: gl.int64, end_low: gl.int64, end_high: gl.int64,
    scale, step, keep_scale, unscale, last_dropped: gl.int32,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, OUT_ALIGNED: gl.constexpr,
    WARPS: gl.constexpr, HELD: gl.constexpr,
):  # fmt: skip
    """A tile of queries of one head; the last tile comes first. HELD: they stay in registers."""
    kind: gl.constexpr = q_ptr.dtype.element_ty
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_N, 16])
    sums_of: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_D, 16])
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
    dout_ptr += b * dout_stride_b + h * dout_stride_h + q0 * dout_stride_t
    k_ptr += b * k_stride_b + kv * k_stride_h + k0 * k_stride_t
    v_ptr += b * v_stride_b + kv * v_stride_h + k0 * v_stride_t
    begin, end, full_begin, full_end = keys_met(m0, tq, live, low, high, BLOCK_M)
    first, full_first, full_last, last = tiles_met(begin, end, full_begin, full_end, BLOCK_N)
    count = last - first
    cut = count - (full_last - full_first)
    list_ptr = None
    if bias_ptr is not None:
        bias_ptr += b * bias_stride_b + h * bias_stride_h
    if dbias_ptr is not None:
        dbias_ptr += b * dbias_stride_b + h * dbias_stride_h
    if keep_ptr is not None:
        keep_ptr += b * keep_stride_b + h * keep_stride_h
        slot = b * list_stride_b + h * list_stride_h + row_tile
        count = gl.load(counts_ptr + slot)
        cut = count
        list_ptr = tiles_ptr + slot * list_width
    first_row = (b * H + h) * row_step
    if bits_ptr is not None:
        bits_ptr += (b * H + h) * bits_stride_h

    q = gl.allocate_shared_memory(kind, [BLOCK_M, BLOCK_D], queries)
    dout = gl.allocate_shared_memory(kind, [BLOCK_M, BLOCK_D], queries)
    k = gl.allocate_shared_memory(kind, [RING, BLOCK_N, BLOCK_D], keys)
    v = gl.allocate_shared_memory(kind, [RING, BLOCK_N, BLOCK_D], keys)
    copy_rows(q, q_ptr, m0, m0, tq, q_stride_t, D, AS_THEY_ARE, BLOCK_M, BLOCK_D, WARPS)
    copy_rows(dout, dout_ptr, m0, m0, tq, dout_stride_t, DV, AS_THEY_ARE, BLOCK_M, BLOCK_D, WARPS)
    for place in gl.static_range(2):
        number = listed_tile_of(place, count, first, full_first, full_last, last, list_ptr)
        copy_tile(
            place, number, count, k, v, k_ptr, v_ptr, begin, end, D, DV, k_stride_t, v_stride_t, BLOCK_N, BLOCK_D, WARPS
        )
    rows = gl.arange(0, BLOCK_M, gl.SliceLayout(1, scores))
    ptrs = statistics_ptr + (b * lse_stride_b + h * lse_stride_h + q0 + m0) * 8 + rows * 8
    exists = rows < near(tq - m0, 4096)
    top = gl.expand_dims(gl.load(ptrs + TOP, mask=exists, other=0.0), 1)
    shift = gl.expand_dims(gl.load(ptrs + SHIFT, mask=exists, other=0.0), 1)
    delta = gl.expand_dims(gl.load(ptrs + DELTA, mask=exists, other=0.0), 1)
    if seed_ptr is not None:
        delta = delta * unscale
    async_copy.wait_group(4)  # queries and dout
    barrier()
    if HELD:
        q = q.load(gl.DotOperandLayout(0, scores, 2))
        dout = dout.load(gl.DotOperandLayout(0, scores, 2))

    none = gl.zeros([1], gl.int32, gl.SliceLayout(1, scores))
    nothing = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, scores)
    tile0 = 0
    tile1 = 0
    tile2 = 0
    if list_ptr is not None:
        tile0 = listed_tile_of(0, count, first, full_first, full_last, last, list_ptr)
        tile1 = listed_tile_of(1, count, first, full_first, full_last, last, list_ptr)
        tile2 = listed_tile_of(2, count, first, full_first, full_last, last, list_ptr)
    n0 = listed_tile_of(0, count, first, full_first, full_last, last, list_ptr) * BLOCK_N
    bias_words, more_bias, keep_words = words_of(
        bias_ptr, keep_ptr, m0, n0, tq, tk, bias_stride_t, keep_stride_t, none, scores, BLOCK_M, BLOCK_N
    )
    dq = gl.zeros([BLOCK_M, BLOCK_D], gl.float32, sums_of)
    dq, bias_words, more_bias, keep_words, tile0, tile1, tile2 = meet(
        0, cut, dq, bias_words, more_bias, keep_words, tile0, tile1, tile2, q, dout, k, v, top, shift, delta, count,
        first, full_first, full_last, last, list_ptr, k_ptr, v_ptr, bias_ptr, dbias_ptr, keep_ptr, seed_ptr, bits_ptr,
        bits_stride, first_row, m0, begin, end, tq, tk, live, low, high, D, DV, k_stride_t, v_stride_t, bias_stride_t,
        dbias_stride_t, keep_stride_t, scale, step, keep_scale, last_dropped, none, nothing, scores, sums_of, True,
        BLOCK_M, BLOCK_N, BLOCK_D, WARPS,
    )  # fmt: skip
    if keep_ptr is None:
        dq, bias_words, more_bias, keep_words, tile0, tile1, tile2 = meet(
            cut, count, dq, bias_words, more_bias, keep_words, tile0, tile1, tile2, q, dout, k, v, top, shift, delta,
            count, first, full_first, full_last, last, list_ptr, k_ptr, v_ptr, bias_ptr, dbias_ptr, keep_ptr, seed_ptr,
            bits_ptr, bits_stride, first_row, m0, begin, end, tq, tk, live, low, high, D, DV, k_stride_t, v_stride_t,
            bias_stride_t, dbias_stride_t, keep_stride_t, scale, step, keep_scale, last_dropped, none, nothing, scores,
            sums_of, False, BLOCK_M, BLOCK_N, BLOCK_D, WARPS,
        )  # fmt: skip
    if bias_ptr is not None or keep_ptr is not None:
        if not is_finite(dq):
            async_copy.wait_group(0)
            dq = gl.zeros([BLOCK_M, BLOCK_D], gl.float32, sums_of)
            for c in range(0, count):
                dq = meet_carefully(
                    c, dq, q, dout, k, v, top, shift, delta, count, first, full_first, full_last, last, list_ptr, k_ptr,
                    v_ptr, bias_ptr, keep_ptr, seed_ptr, first_row, m0, begin, end, tq, tk, live, low, high, D, DV,
                    k_stride_t, v_stride_t, bias_stride_t, keep_stride_t, scale, step, last_dropped, none, nothing,
                    scores, sums_of, BLOCK_M, BLOCK_N, BLOCK_D, WARPS,
                )  # fmt: skip
    async_copy.wait_group(0)  # what is still on its way is nobody's, but its place is the compiler's from here on
    barrier()
    dq_ptr += b * dq_stride_b + h * dq_stride_h + q0 * dq_stride_t
    store_rows(
        dq * (scale * keep_scale), dq_ptr, m0, tq, dq_stride_t, DQ_D, AS_THEY_ARE, OUT_ALIGNED, BLOCK_M, BLOCK_D, WARPS
    )
