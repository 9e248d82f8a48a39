"""dk and dv of attention with 16-bit heads on GPUs of compute capability 9, in Gluon.

Method:  as _attention_bwd_keys.py, but no product is waited for before what can be done beside it: while a tile's
         weights are computed its dout v^T is multiplied, while its dx is computed its dv and the next tile's q k^T.
Order:   tiles that the band cuts come first, then those that see all keys; with a keep matrix those of the lists of
         _attention_tiles.py. Queries and dout pass through rings of four tiles. A warp group keeps 64 keys, in
         registers where heads are narrow: its products then read half as much.
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
from ._attention import band, is_finite, queries_met, sequence, tiles_met
from ._attention_ahead_dropout import drawn_of, kept_of
from ._attention_ahead_pairs import key_of_row, shown_transposed
from ._attention_ahead_rows import (
    AS_THEY_ARE,
    BY_TWO,
    copy_numbers,
    copy_rows,
    listed_tile_of,
    store_rows,
    tiles_from,
)
from ._attention_bwd_ahead_pairs import scored, words_of
from ._attention_bwd_ahead_tile import RING, gradient_of, marked, negative
from ._attention_bwd_tile import DELTA, OFFSET, SHIFT, TOP, at_least_0
from ._tile import near


@gluon.jit
def copy_tile(
    c, number, count, q, dout, offsets, deltas, q_ptr, dout_ptr, statistics_ptr, begin, end, tq, D, DV, q_stride_t,
    dout_stride_t, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Begins to copy the c-th tile of queries, which has this number, to its place in the rings; zeros where there is
    none.
    """
    m0 = number * BLOCK_M
    to = c % RING
    end = gl.where(c < count, end, begin)
    copy_rows(q.index(to), q_ptr, m0, begin, end, q_stride_t, D, AS_THEY_ARE, BLOCK_M, BLOCK_D, WARPS)
    copy_rows(dout.index(to), dout_ptr, m0, begin, end, dout_stride_t, DV, AS_THEY_ARE, BLOCK_M, BLOCK_D, WARPS)
    exists = gl.where(c < count, tq, 0)
    copy_numbers(offsets.index(to), statistics_ptr + OFFSET, m0, exists, BLOCK_M, WARPS)
    copy_numbers(deltas.index(to), statistics_ptr + DELTA, m0, exists, BLOCK_M, WARPS)


@gluon.jit
def scores_of(
    x, bias_ptr, keep_ptr, bias_words, keep_words, m0, n0, tq, live, low, high, scale, MASKED: gl.constexpr,
    scores: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """(x, shown) of a tile of products."""
    shown = x
    if bias_ptr is not None or keep_ptr is not None:
        x = scored(
            x, bias_ptr, keep_ptr, bias_words, keep_words, m0, n0, tq, live, low, high, scale, MASKED, scores, BLOCK_M,
            BLOCK_N,
        )  # fmt: skip
        shown = x != float("-inf")
    elif MASKED:
        shown = shown_transposed(m0, n0, tq, live, low, high, scores, BLOCK_M, BLOCK_N)
    return x, shown


@gluon.jit
def meet(
    from_c, to_c, dk, dv, bias_words, keep_words, tile0, tile1, tile2, k, v, q, dout, offsets, deltas, count, first,
    full_first, full_last, last, list_ptr, q_ptr, dout_ptr, statistics_ptr, bias_ptr, keep_ptr, seed_ptr, bits_ptr,
    bits_stride, first_row, n0, begin, end, tq, tk, live, low, high, D, DV, q_stride_t, dout_stride_t, bias_stride_t,
    keep_stride_t, scale, step, unscale, last_dropped, none, nothing, scores: gl.constexpr, sums_of: gl.constexpr,
    MASKED: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Adds tiles from_c..to_c - 1 of queries to dk and dv, both without their scales.

    bias_words and keep_words are the first tile's; of a list tile0, tile1 and tile2 the first three numbers.
    """
    kind: gl.constexpr = q.dtype
    DROPPED: gl.constexpr = seed_ptr is not None or bits_ptr is not None
    HIDES: gl.constexpr = MASKED or bias_ptr is not None
    dk, dv = warpgroup_mma_init(dk), warpgroup_mma_init(dv)
    for c in range(from_c, to_c):
        now, after, later, tile0, tile1, tile2 = tiles_from(
            c, tile0, tile1, tile2, count, first, full_first, full_last, last, list_ptr
        )
        m0, m1 = now * BLOCK_M, after * BLOCK_M
        async_copy.wait_group(4)  # all but the next tile
        barrier()
        fence_async_shared()
        copy_tile(
            c + 2, later, count, q, dout, offsets, deltas, q_ptr, dout_ptr, statistics_ptr, begin, end, tq, D, DV,
            q_stride_t, dout_stride_t, BLOCK_M, BLOCK_D, WARPS,
        )  # fmt: skip
        x = warpgroup_mma(k, q.index(c % RING).permute((1, 0)), nothing, use_acc=False, is_async=True)
        products = warpgroup_mma(v, dout.index(c % RING).permute((1, 0)), nothing, use_acc=False, is_async=True)
        next_bias, next_keep = words_of(
            bias_ptr, keep_ptr, m1, n0, tq, tk, bias_stride_t, keep_stride_t, none, scores, BLOCK_M, BLOCK_N
        )
        drawn, more_drawn = drawn_of(
            seed_ptr, bits_ptr, bits_stride, first_row, m0, n0, last_dropped, scores, BLOCK_M, BLOCK_N
        )
        x, dv, dk = warpgroup_mma_wait(1, [x, dv, dk])
        offset = offsets.index(c % RING).load(gl.SliceLayout(0, scores))
        x, shown = scores_of(
            x, bias_ptr, keep_ptr, bias_words, keep_words, m0, n0, tq, live, low, high, scale, MASKED, scores, BLOCK_M,
            BLOCK_N,
        )  # fmt: skip
        power = gl.fma(x, step, negative(gl.expand_dims(offset, 0)))
        kept = x
        if DROPPED:
            kept = kept_of(drawn, more_drawn, bits_ptr, scores, BLOCK_M, BLOCK_N)
        p = marked(power, shown, kept, HIDES, DROPPED)
        dropped = at_least_0(p)
        dropped = gl.convert_layout(dropped.to(kind), gl.DotOperandLayout(0, sums_of, 2))
        dv = warpgroup_mma(dropped, dout.index(c % RING), dv, is_async=True)
        products = warpgroup_mma_wait(1, [products])
        delta = deltas.index(c % RING).load(gl.SliceLayout(0, scores))
        if DROPPED:
            delta = delta * unscale
        dx = gradient_of(p, products, gl.expand_dims(delta, 0), HIDES, DROPPED)
        dx = gl.convert_layout(dx.to(kind), gl.DotOperandLayout(0, sums_of, 2))
        dk = warpgroup_mma(dx, q.index(c % RING), dk, is_async=True)
        bias_words, keep_words = next_bias, next_keep
    dk, dv = warpgroup_mma_wait(0, [dk, dv])
    return dk, dv, bias_words, keep_words, tile0, tile1, tile2


@gluon.jit
def meet_carefully(
    number, dk, dv, k, v, q, dout, q_ptr, dout_ptr, statistics_ptr, bias_ptr, keep_ptr, seed_ptr, bits_ptr, bits_stride,
    first_row, n0, tq, tk, live, low, high, D, DV, q_stride_t, dout_stride_t, bias_stride_t, keep_stride_t, scale, step,
    unscale, last_dropped, none, nothing, scores: gl.constexpr, sums_of: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Adds the tile of queries of this number once more: exact weights, and rows as 0 that count for nothing."""
    kind: gl.constexpr = q.dtype
    DROPPED: gl.constexpr = seed_ptr is not None or bits_ptr is not None
    by: gl.constexpr = by_16_bytes(BLOCK_D, WARPS)
    m0 = number * BLOCK_M
    rows = gl.arange(0, BLOCK_M, gl.SliceLayout(1, by))
    of_rows = gl.load(statistics_ptr + TOP + (m0 + rows).to(gl.int64) * 8, mask=rows < tq - m0, other=0.0)
    barrier()
    # what sees nothing counts as 0, and a query of NaN reaches the keys that it sees through dx alone
    copy_rows(
        q.index(0), q_ptr, m0, 0, tq, q_stride_t, D, AS_THEY_ARE, BLOCK_M, BLOCK_D, WARPS,
        gl.abs(of_rows) < float("inf"),
    )  # fmt: skip
    copy_rows(
        dout.index(0), dout_ptr, m0, 0, tq, dout_stride_t, DV, AS_THEY_ARE, BLOCK_M, BLOCK_D, WARPS,
        of_rows != float("inf"),
    )  # fmt: skip
    columns = gl.arange(0, BLOCK_M, gl.SliceLayout(0, scores))
    ptrs = statistics_ptr + (m0 + columns).to(gl.int64) * 8
    top = gl.load(ptrs + TOP, mask=columns < tq - m0, other=0.0)
    shift = gl.load(ptrs + SHIFT, mask=columns < tq - m0, other=0.0)
    delta = gl.load(ptrs + DELTA, mask=columns < tq - m0, other=0.0)
    bias_words, keep_words = words_of(
        bias_ptr, keep_ptr, m0, n0, tq, tk, bias_stride_t, keep_stride_t, none, scores, BLOCK_M, BLOCK_N
    )
    async_copy.wait_group(0)
    barrier()
    fence_async_shared()
    x = warpgroup_mma(k, q.index(0).permute((1, 0)), nothing, use_acc=False)
    products = warpgroup_mma(v, dout.index(0).permute((1, 0)), nothing, use_acc=False)
    x, shown = scores_of(
        x, bias_ptr, keep_ptr, bias_words, keep_words, m0, n0, tq, live, low, high, scale, True, scores, BLOCK_M,
        BLOCK_N
    )  # fmt: skip
    power = gl.fma(x - gl.expand_dims(top, 0), step, negative(gl.expand_dims(shift, 0)))
    kept = x
    if DROPPED:
        drawn, more_drawn = drawn_of(
            seed_ptr, bits_ptr, bits_stride, first_row, m0, n0, last_dropped, scores, BLOCK_M, BLOCK_N
        )
        kept = kept_of(drawn, more_drawn, bits_ptr, scores, BLOCK_M, BLOCK_N)
    p = marked(power, shown, kept, True, DROPPED)
    dropped = at_least_0(p)
    if DROPPED:
        delta = delta * unscale
    dx = gradient_of(p, products, gl.expand_dims(delta, 0), True, DROPPED)
    dropped = gl.convert_layout(dropped.to(kind), gl.DotOperandLayout(0, sums_of, 2))
    dx = gl.convert_layout(dx.to(kind), gl.DotOperandLayout(0, sums_of, 2))
    dv = warpgroup_mma(dropped, dout.index(0), dv)
    dk = warpgroup_mma(dx, q.index(0), dk)
    return dk, dv


_RUNTIME = (
    "q_ptr", "k_ptr", "v_ptr", "bias_ptr", "keep_ptr", "counts_ptr", "tiles_ptr", "lengths_ptr", "cu_q_ptr", "cu_k_ptr",
    "seed_ptr", "bits_ptr", "dout_ptr", "statistics_ptr", "dk_ptr", "dv_ptr", "H", "G", "Tq", "Tk", "total_q",
    "total_k", "row_step", "D", "DV", "DK_D", "DV_D", "q_stride_b", "q_stride_h", "q_stride_t", "k_stride_b",
    "k_stride_h", "k_stride_t", "v_stride_b", "v_stride_h", "v_stride_t", "dout_stride_b", "dout_stride_h",
    "dout_stride_t", "dk_stride_b", "dk_stride_h", "dk_stride_t", "dv_stride_b", "dv_stride_h", "dv_stride_t",
    "lse_stride_b", "lse_stride_h", "bias_stride_b", "bias_stride_h", "bias_stride_t", "keep_stride_b", "keep_stride_h",
    "keep_stride_t", "list_stride_b", "list_stride_h", "list_width", "bits_stride", "bits_stride_h", "low", "high",
    "end_low", "end_high", "scale", "step", "keep_scale", "unscale", "last_dropped",
)  # fmt: skip


@gluon.jit(do_not_specialize=_RUNTIME)
def attention_bwd_ahead_keys_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, keep_ptr, counts_ptr, tiles_ptr, lengths_ptr, cu_q_ptr, cu_k_ptr, seed_ptr, bits_ptr,
    dout_ptr, statistics_ptr, dk_ptr, dv_ptr,
    H: gl.int32, G: gl.int32, Tq: gl.int32, Tk: gl.int32, total_q: gl.int64, total_k: gl.int64, row_step: gl.int64,
    D: gl.int32, DV: gl.int32, DK_D: gl.int32, DV_D: gl.int32,
    q_stride_b: gl.int64, q_stride_h: gl.int64, q_stride_t: gl.int64,
    k_stride_b: gl.int64, k_stride_h: gl.int64, k_stride_t: gl.int64,
    v_stride_b: gl.int64, v_stride_h: gl.int64, v_stride_t: gl.int64,
    dout_stride_b: gl.int64, dout_stride_h: gl.int64, dout_stride_t: gl.int64,
    dk_stride_b: gl.int64, dk_stride_h: gl.int64, dk_stride_t: gl.int64,
    dv_stride_b: gl.int64, dv_stride_h: gl.int64, dv_stride_t: gl.int64,
    lse_stride_b: gl.int64, lse_stride_h: gl.int64,
    bias_stride_b: gl.int64, bias_stride_h: gl.int64, bias_stride_t: gl.int64,
    keep_stride_b: gl.int64, keep_stride_h: gl.int64, keep_stride_t: gl.int64,
    list_stride_b: gl.int64, list_stride_h: gl.int64, list_width: gl.int64,
    bits_stride: gl.int32, bits_stride_h: gl.int64,
    low: gl.int64, high: gl.int64, end_low: gl.int64, end_high: gl.int64,
    scale, step, keep_scale, unscale, last_dropped: gl.int32,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, OUT_ALIGNED: gl.constexpr,
    WARPS: gl.constexpr, HELD: gl.constexpr,
):  # fmt: skip
    """A tile of keys of one key head; the first tile, which most see where a mask is causal, comes first.

    HELD: they stay in registers.
    """
    kind: gl.constexpr = q_ptr.dtype.element_ty
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    sums_of: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_D, 16])
    keys: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_D], kind)
    queries: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_D], kind)
    numbers: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    tiles = (Tk + BLOCK_N - 1) // BLOCK_N
    key_tile = gl.program_id(0) % tiles
    b = (gl.program_id(0) // tiles // (H // G)).to(gl.int64)
    kv = (gl.program_id(0) // tiles % (H // G)).to(gl.int64)
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
    begin, end, full_begin, full_end = queries_met(n0, tq, live, low, high, BLOCK_N)
    first, full_first, full_last, last = tiles_met(begin, end, full_begin, full_end, BLOCK_M)
    count = last - first
    cut = count - (full_last - full_first)

    k = gl.allocate_shared_memory(kind, [BLOCK_N, BLOCK_D], keys)
    v = gl.allocate_shared_memory(kind, [BLOCK_N, BLOCK_D], keys)
    q = gl.allocate_shared_memory(kind, [RING, BLOCK_M, BLOCK_D], queries)
    dout = gl.allocate_shared_memory(kind, [RING, BLOCK_M, BLOCK_D], queries)
    offsets = gl.allocate_shared_memory(gl.float32, [RING, BLOCK_M], numbers)
    deltas = gl.allocate_shared_memory(gl.float32, [RING, BLOCK_M], numbers)
    copy_rows(k, k_ptr, n0, n0, live, k_stride_t, D, BY_TWO, BLOCK_N, BLOCK_D, WARPS)
    copy_rows(v, v_ptr, n0, n0, live, v_stride_t, DV, BY_TWO, BLOCK_N, BLOCK_D, WARPS)
    async_copy.wait_group(0)
    barrier()
    fence_async_shared()
    if HELD:
        k = k.load(gl.DotOperandLayout(0, scores, 2))
        v = v.load(gl.DotOperandLayout(0, scores, 2))

    none = gl.zeros([1], gl.int32, gl.SliceLayout(0, scores))
    nothing = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, scores)
    dk = gl.zeros([BLOCK_N, BLOCK_D], gl.float32, sums_of)
    dv = gl.zeros([BLOCK_N, BLOCK_D], gl.float32, sums_of)
    if last > first:
        for g in range(0, G):
            h = kv * G + g
            q_head = q_ptr + h * q_stride_h
            dout_head = dout_ptr + h * dout_stride_h
            statistics_head = statistics_ptr + h * lse_stride_h * 8
            first_row = (b * H + h) * row_step
            bias_head = bias_ptr
            keep_head = keep_ptr
            bits_head = bits_ptr
            list_ptr = None
            if bias_ptr is not None:
                bias_head = bias_ptr + h * bias_stride_h
            if keep_ptr is not None:
                keep_head = keep_ptr + h * keep_stride_h
                slot = b * list_stride_b + h * list_stride_h + key_tile
                count = gl.load(counts_ptr + slot)
                cut = count
                list_ptr = tiles_ptr + slot * list_width
            if bits_ptr is not None:
                bits_head = bits_ptr + (b * H + h) * bits_stride_h
            barrier()  # the last head's tiles have been read
            for c in gl.static_range(2):
                number = listed_tile_of(c, count, first, full_first, full_last, last, list_ptr)
                copy_tile(
                    c, number, count, q, dout, offsets, deltas, q_head, dout_head, statistics_head, begin, end, tq, D,
                    DV, q_stride_t, dout_stride_t, BLOCK_M, BLOCK_D, WARPS,
                )  # fmt: skip
            tile0 = 0
            tile1 = 0
            tile2 = 0
            if list_ptr is not None:
                tile0 = listed_tile_of(0, count, first, full_first, full_last, last, list_ptr)
                tile1 = listed_tile_of(1, count, first, full_first, full_last, last, list_ptr)
                tile2 = listed_tile_of(2, count, first, full_first, full_last, last, list_ptr)
            m0 = listed_tile_of(0, count, first, full_first, full_last, last, list_ptr) * BLOCK_M
            bias_words, keep_words = words_of(
                bias_head, keep_head, m0, n0, tq, tk, bias_stride_t, keep_stride_t, none, scores, BLOCK_M, BLOCK_N
            )
            dk, dv, bias_words, keep_words, tile0, tile1, tile2 = meet(
                0, cut, dk, dv, bias_words, keep_words, tile0, tile1, tile2, k, v, q, dout, offsets, deltas, count,
                first, full_first, full_last, last, list_ptr, q_head, dout_head, statistics_head, bias_head, keep_head,
                seed_ptr, bits_head, bits_stride, first_row, n0, begin, end, tq, tk, live, low, high, D, DV, q_stride_t,
                dout_stride_t, bias_stride_t, keep_stride_t, scale, step, unscale, last_dropped, none, nothing, scores,
                sums_of, True, BLOCK_M, BLOCK_N, BLOCK_D, WARPS,
            )  # fmt: skip
            if keep_ptr is None:
                dk, dv, bias_words, keep_words, tile0, tile1, tile2 = meet(
                    cut, count, dk, dv, bias_words, keep_words, tile0, tile1, tile2, k, v, q, dout, offsets, deltas,
                    count, first, full_first, full_last, last, list_ptr, q_head, dout_head, statistics_head, bias_head,
                    keep_head, seed_ptr, bits_head, bits_stride, first_row, n0, begin, end, tq, tk, live, low, high, D,
                    DV, q_stride_t, dout_stride_t, bias_stride_t, keep_stride_t, scale, step, unscale, last_dropped,
                    none, nothing, scores, sums_of, False, BLOCK_M, BLOCK_N, BLOCK_D, WARPS,
                )  # fmt: skip
            async_copy.wait_group(0)
        if not (is_finite(dk) and is_finite(dv)):
            dk = gl.zeros([BLOCK_N, BLOCK_D], gl.float32, sums_of)
            dv = gl.zeros([BLOCK_N, BLOCK_D], gl.float32, sums_of)
            for g in range(0, G):
                h = kv * G + g
                bias_head = bias_ptr
                keep_head = keep_ptr
                bits_head = bits_ptr
                list_ptr = None
                if bias_ptr is not None:
                    bias_head = bias_ptr + h * bias_stride_h
                if keep_ptr is not None:
                    keep_head = keep_ptr + h * keep_stride_h
                    slot = b * list_stride_b + h * list_stride_h + key_tile
                    count = gl.load(counts_ptr + slot)
                    list_ptr = tiles_ptr + slot * list_width
                if bits_ptr is not None:
                    bits_head = bits_ptr + (b * H + h) * bits_stride_h
                for c in range(0, count):
                    number = first + c
                    if list_ptr is not None:
                        number = gl.load(list_ptr + c)
                    dk, dv = meet_carefully(
                        number, dk, dv, k, v, q, dout, q_ptr + h * q_stride_h, dout_ptr + h * dout_stride_h,
                        statistics_ptr + h * lse_stride_h * 8, bias_head, keep_head, seed_ptr, bits_head, bits_stride,
                        (b * H + h) * row_step, n0, tq, tk, live, low, high, D, DV, q_stride_t, dout_stride_t,
                        bias_stride_t, keep_stride_t, scale, step, unscale, last_dropped, none, nothing, scores,
                        sums_of, BLOCK_M, BLOCK_N, BLOCK_D, WARPS,
                    )  # fmt: skip
    barrier()  # what was the tiles' is the compiler's from here on

    dk_ptr += b * dk_stride_b + kv * dk_stride_h + k0 * dk_stride_t
    dv_ptr += b * dv_stride_b + kv * dv_stride_h + k0 * dv_stride_t
    alive = near(live - n0, 4096)
    rows = key_of_row(gl.arange(0, BLOCK_N, gl.SliceLayout(1, sums_of)))
    alive = gl.expand_dims(rows < alive, 1)
    dk = gl.where(alive, dk * (scale * keep_scale), 0.0)
    store_rows(dk, dk_ptr, n0, tk, dk_stride_t, DK_D, BY_TWO, OUT_ALIGNED, BLOCK_N, BLOCK_D, WARPS)
    dv = gl.where(alive, dv * keep_scale, 0.0)
    store_rows(dv, dv_ptr, n0, tk, dv_stride_t, DV_D, BY_TWO, OUT_ALIGNED, BLOCK_N, BLOCK_D, WARPS)
