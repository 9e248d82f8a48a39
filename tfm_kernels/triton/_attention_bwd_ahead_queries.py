"""dq of attention with 16-bit heads on GPUs of compute capability 9, in Gluon.

Method:  as _attention_bwd_queries.py; while a tile's weights are computed its dout v^T is multiplied, and the last
         tile's dq while this one's keys and values are seen to.
Order:   tiles that the band cuts come first, then those that all rows see; keys and values pass through rings of four
         tiles. A warp group keeps 64 queries and their dout, in registers where heads are narrow.
Limits:  float16, bfloat16; heads of 33 to 128; no bias, no keep matrix.
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

from ._ahead import barrier
from ._attention import band, keys_met, sequence, tiles_met
from ._attention_ahead_dropout import kept_weights
from ._attention_ahead_pairs import shown_tile
from ._attention_ahead_rows import AS_THEY_ARE, BY_FOUR, copy_rows, store_rows, tile_of
from ._attention_bwd_ahead_tile import RING, gradient_of, marked, negative
from ._attention_bwd_tile import DELTA, SHIFT, TOP
from ._tile import near


@gluon.jit
def copy_tile(
    c, count, first, full_first, full_last, last, k, v, k_ptr, v_ptr, begin, end, D, DV, k_stride_t, v_stride_t,
    BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Begins to copy the c-th tile of keys to its place in the rings; zeros where there is none."""
    n0 = tile_of(c, first, full_first, full_last, last) * BLOCK_N
    to = c % RING
    end = gl.where(c < count, end, begin)
    copy_rows(k.index(to), k_ptr, n0, begin, end, k_stride_t, D, BY_FOUR, BLOCK_N, BLOCK_D, WARPS)
    copy_rows(v.index(to), v_ptr, n0, begin, end, v_stride_t, DV, BY_FOUR, BLOCK_N, BLOCK_D, WARPS)


@gluon.jit
def meet(
    from_c, to_c, dq, q, dout, k, v, top, shift, delta, count, first, full_first, full_last, last, k_ptr, v_ptr,
    seed_ptr, bits_ptr, bits_stride, first_row, m0, begin, end, live, low, high, D, DV, k_stride_t, v_stride_t, step,
    last_dropped, nothing, scores: gl.constexpr, sums_of: gl.constexpr, MASKED: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Adds tiles from_c..to_c - 1 of keys to dq (without the scale)."""
    kind: gl.constexpr = k.dtype
    DROPPED: gl.constexpr = seed_ptr is not None
    dq = warpgroup_mma_init(dq)
    for c in range(from_c, to_c):
        n0 = tile_of(c, first, full_first, full_last, last) * BLOCK_N
        async_copy.wait_group(2)  # all but the next tile, for which the last tile but one has made place
        barrier()
        fence_async_shared()
        copy_tile(
            c + 2, count, first, full_first, full_last, last, k, v, k_ptr, v_ptr, begin, end, D, DV, k_stride_t,
            v_stride_t, BLOCK_N, BLOCK_D, WARPS,
        )  # fmt: skip
        x = warpgroup_mma(q, k.index(c % RING).permute((1, 0)), nothing, use_acc=False, is_async=True)
        products = warpgroup_mma(dout, v.index(c % RING).permute((1, 0)), nothing, use_acc=False, is_async=True)
        kept = nothing
        shown = nothing
        if DROPPED:
            kept = kept_weights(
                gl.load(seed_ptr), bits_ptr, bits_stride, first_row, m0, n0, last_dropped, scores, BLOCK_M, BLOCK_N
            )
        if MASKED:
            shown = shown_tile(m0, n0, live, low, high, scores, BLOCK_M, BLOCK_N)
        x, dq = warpgroup_mma_wait(1, [x, dq])
        power = gl.fma(x - top, step, negative(shift))
        p = marked(power, shown, kept, MASKED, DROPPED)
        products = warpgroup_mma_wait(0, [products])
        dx = gradient_of(p, products, delta, MASKED, DROPPED)
        dx = gl.convert_layout(dx.to(kind), gl.DotOperandLayout(0, sums_of, 2))
        dq = warpgroup_mma(dx, k.index(c % RING), dq, is_async=True)
    return warpgroup_mma_wait(0, [dq])


_RUNTIME = (
    "q_ptr", "k_ptr", "v_ptr", "lengths_ptr", "cu_q_ptr", "cu_k_ptr", "seed_ptr", "bits_ptr", "dout_ptr",
    "statistics_ptr", "dq_ptr", "H", "G", "Tq", "Tk", "total_q", "total_k", "row_step", "D", "DV", "DQ_D", "q_stride_b",
    "q_stride_h", "q_stride_t", "k_stride_b", "k_stride_h", "k_stride_t", "v_stride_b", "v_stride_h", "v_stride_t",
    "dout_stride_b", "dout_stride_h", "dout_stride_t", "dq_stride_b", "dq_stride_h", "dq_stride_t", "lse_stride_b",
    "lse_stride_h", "bits_stride", "bits_stride_h", "low", "high", "end_low", "end_high", "scale", "step", "keep_scale",
    "last_dropped",
)  # fmt: skip


@gluon.jit(do_not_specialize=_RUNTIME)
def attention_bwd_ahead_queries_kernel(
    q_ptr, k_ptr, v_ptr, lengths_ptr, cu_q_ptr, cu_k_ptr, seed_ptr, bits_ptr, dout_ptr, statistics_ptr, dq_ptr,
    H: gl.int32, G: gl.int32, Tq: gl.int32, Tk: gl.int32, total_q: gl.int64, total_k: gl.int64, row_step: gl.int64,
    D: gl.int32, DV: gl.int32, DQ_D: gl.int32,
    q_stride_b: gl.int64, q_stride_h: gl.int64, q_stride_t: gl.int64,
    k_stride_b: gl.int64, k_stride_h: gl.int64, k_stride_t: gl.int64,
    v_stride_b: gl.int64, v_stride_h: gl.int64, v_stride_t: gl.int64,
    dout_stride_b: gl.int64, dout_stride_h: gl.int64, dout_stride_t: gl.int64,
    dq_stride_b: gl.int64, dq_stride_h: gl.int64, dq_stride_t: gl.int64,
    lse_stride_b: gl.int64, lse_stride_h: gl.int64, bits_stride: gl.int32, bits_stride_h: gl.int64,
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
    first_row = (b * H + h) * row_step
    if bits_ptr is not None:
        bits_ptr += (b * H + h) * bits_stride_h

    q = gl.allocate_shared_memory(kind, [BLOCK_M, BLOCK_D], queries)
    dout = gl.allocate_shared_memory(kind, [BLOCK_M, BLOCK_D], queries)
    k = gl.allocate_shared_memory(kind, [RING, BLOCK_N, BLOCK_D], keys)
    v = gl.allocate_shared_memory(kind, [RING, BLOCK_N, BLOCK_D], keys)
    copy_rows(q, q_ptr, m0, m0, tq, q_stride_t, D, AS_THEY_ARE, BLOCK_M, BLOCK_D, WARPS)
    copy_rows(dout, dout_ptr, m0, m0, tq, dout_stride_t, DV, AS_THEY_ARE, BLOCK_M, BLOCK_D, WARPS)
    for c in gl.static_range(2):
        copy_tile(
            c, count, first, full_first, full_last, last, k, v, k_ptr, v_ptr, begin, end, D, DV, k_stride_t, v_stride_t,
            BLOCK_N, BLOCK_D, WARPS,
        )  # fmt: skip
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

    nothing = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, scores)
    dq = gl.zeros([BLOCK_M, BLOCK_D], gl.float32, sums_of)
    dq = meet(
        0, cut, dq, q, dout, k, v, top, shift, delta, count, first, full_first, full_last, last, k_ptr, v_ptr, seed_ptr,
        bits_ptr, bits_stride, first_row, m0, begin, end, live, low, high, D, DV, k_stride_t, v_stride_t, step,
        last_dropped, nothing, scores, sums_of, True, BLOCK_M, BLOCK_N, BLOCK_D, WARPS,
    )  # fmt: skip
    dq = meet(
        cut, count, dq, q, dout, k, v, top, shift, delta, count, first, full_first, full_last, last, k_ptr, v_ptr,
        seed_ptr, bits_ptr, bits_stride, first_row, m0, begin, end, live, low, high, D, DV, k_stride_t, v_stride_t,
        step, last_dropped, nothing, scores, sums_of, False, BLOCK_M, BLOCK_N, BLOCK_D, WARPS,
    )  # fmt: skip
    async_copy.wait_group(0)  # what is still on its way is nobody's, but its place is the compiler's from here on
    barrier()
    dq_ptr += b * dq_stride_b + h * dq_stride_h + q0 * dq_stride_t
    store_rows(
        dq * (scale * keep_scale), dq_ptr, m0, tq, dq_stride_t, DQ_D, AS_THEY_ARE, OUT_ALIGNED, BLOCK_M, BLOCK_D, WARPS
    )
