"""ffn_bwd's first launch for 16 bits on GPUs of compute capability 9, in Gluon: _gemm_ahead.py with ffn_bwd.py's end.

Method:  as _gemm_ahead.py. Parts of dh go through shared memory to threads that have 16 bytes of a row of preact.
Limits:  as _gemm_ahead.py.
Source:  own work.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ._activation import activate_and_slope
from ._ahead import barriers, by_16_bytes
from ._ffn_fwd_ahead import kept_part
from ._gemm import Config
from ._gemm_ahead import (
    COPYING,
    MULTIPLYING,
    PART,
    RING,
    ROWS,
    WARPS,
    columns_of_part,
    copy_tiles,
    load_part,
    multiply,
    part_of,
    ring_of,
    store_part,
    tile_and_part,
    tiles_of,
)
from ._gemm_ahead import pick_config as pick_product
from ._tile import near

SUMS = (
    2 * WARPS.value
)  # rows of sums of dp that a tile has: each warp of the groups that multiply writes those of its own rows


def pick_config(M: int, F: int, aligned: bool, dtype: torch.dtype, capability: tuple[int, int]) -> Config | None:
    """The launch for dh (M, F); None where ffn_bwd.py's own is taken."""
    return pick_product(M, F, 0, False, aligned, dtype, capability)


@gluon.jit
def finish(
    dh, p_ptr, g_ptr, hidden_ptr, dp_ptr, dg_ptr, db1_ptr, seed_ptr, rows_ptr, m0, part: gl.constexpr, f0, left_m,
    left_f, F, p_stride_m, scale, last_dropped, ACTIVATION: gl.constexpr, by: gl.constexpr,
):  # fmt: skip
    """ffn_bwd.finish() of a part of a group's half of a tile whose first element is in row m0 and column f0."""
    p = load_part(p_ptr + (m0 * p_stride_m + f0), part, left_m, left_f, p_stride_m, by)
    h, slope = activate_and_slope(p, ACTIVATION, False)
    keep = dh == dh
    if seed_ptr is not None:
        keep = kept_part(seed_ptr, rows_ptr, m0, left_m, f0.to(gl.int32) + part * PART, last_dropped, by)
        dh = gl.where(keep, dh * scale, 0.0)  # a dropped inf or NaN is dropped, not multiplied
    dp = dh * slope
    if g_ptr is not None:
        g = load_part(g_ptr + (m0 * p_stride_m + f0), part, left_m, left_f, p_stride_m, by)
        dp *= g
        if dg_ptr is not None:
            store_part(dh * h, dg_ptr + (m0 * F + f0), part, left_m, left_f, F, by)
        h *= g
    if hidden_ptr is not None:
        if seed_ptr is not None:
            h = gl.where(keep, h * scale, 0.0)
        store_part(h, hidden_ptr + (m0 * F + f0), part, left_m, left_f, F, by)
    if dp_ptr is not None:
        store_part(dp, dp_ptr + (m0 * F + f0), part, left_m, left_f, F, by)
    if db1_ptr is not None:  # rows that do not exist have dh = 0
        store_sums(dp, db1_ptr + (m0 // ROWS * WARPS * F + f0), part, left_f, F)


@gluon.jit
def store_sums(dp, ptr, part: gl.constexpr, left_f, F):
    """Writes (WARPS, PART) float32: the sums over the rows of each warp, which no shared memory is needed for."""
    t = gl.reshape(dp, [ROWS // (8 * WARPS), WARPS, 8, PART])  # by_16_bytes(): a warp has 8 rows of each 8 WARPS
    sums = gl.sum(gl.sum(t, 0), 1)
    by: gl.constexpr = sums.type.layout
    warps, offs_n = gl.arange(0, WARPS, gl.SliceLayout(1, by)), columns_of_part(part, by)
    ptrs = ptr + gl.expand_dims(warps * F, 1) + gl.expand_dims(offs_n, 0)
    mask = gl.expand_dims(warps < WARPS, 1) & gl.expand_dims(offs_n < left_f // 8 * 8, 0)
    gl.store(gl.multiple_of(ptrs, [1, 8]), sums, mask=mask)


@gluon.jit
def multiply_tiles(
    a, b, full, empty, p_ptr, g_ptr, hidden_ptr, dp_ptr, dg_ptr, db1_ptr, seed_ptr, rows_ptr, M, F, Eo, p_stride_m,
    scale, last_dropped, half: gl.constexpr, ACTIVATION: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """A group that multiplies: one half of the rows of every tile."""
    by: gl.constexpr = by_16_bytes(PART, WARPS)
    slot, turn = 0, 0
    steps = gl.cdiv(Eo, BLOCK_K).to(gl.int32)
    for number in range(gl.program_id(0), tiles_of(M, F, 1, BLOCK_M, BLOCK_N), gl.num_programs(0)):
        m0, f0, _, _, _ = tile_and_part(number, M, F, Eo, Eo, BLOCK_M, BLOCK_N, GROUP_M)
        acc, slot, turn = multiply(a, b, full, empty, slot, turn, steps, half, BLOCK_N, True, False)
        m0 += half * ROWS
        left_m, left_f = near(M - m0, ROWS), near(F - f0, BLOCK_N)
        for part in gl.static_range(BLOCK_N // PART):
            dh = gl.convert_layout(part_of(acc, part, BLOCK_N, False), by)
            finish(
                dh, p_ptr, g_ptr, hidden_ptr, dp_ptr, dg_ptr, db1_ptr, seed_ptr, rows_ptr, m0, part, f0, left_m, left_f,
                F, p_stride_m, scale, last_dropped, ACTIVATION, by,
            )  # fmt: skip


_RUNTIME = (
    "dy_ptr", "w2_ptr", "p_ptr", "g_ptr", "hidden_ptr", "dp_ptr", "dg_ptr", "db1_ptr", "seed_ptr", "rows_ptr", "M", "F",
    "Eo", "dy_stride_m", "w2_stride_o", "p_stride_m", "scale", "last_dropped",
)  # fmt: skip


@gluon.jit(do_not_specialize=_RUNTIME)
def ffn_bwd_ahead_kernel(
    dy_ptr, w2_ptr, p_ptr, g_ptr, hidden_ptr, dp_ptr, dg_ptr, db1_ptr, seed_ptr, rows_ptr, M: gl.int64, F: gl.int64,
    Eo: gl.int64, dy_stride_m: gl.int64, w2_stride_o: gl.int64, p_stride_m: gl.int64, scale, last_dropped,
    ACTIVATION: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
):  # fmt: skip
    """As ffn_bwd_kernel, with db1_ptr (SUMS for each tile of rows, F) float32."""
    kind: gl.constexpr = dy_ptr.dtype.element_ty
    a, b = ring_of(kind, [BLOCK_M, BLOCK_K]), ring_of(kind, [BLOCK_K, BLOCK_N])
    full, empty = barriers(32 * WARPS, RING), barriers(2, RING)
    gl.warp_specialize(
        [
            (
                multiply_tiles,
                (a, b, full, empty, p_ptr, g_ptr, hidden_ptr, dp_ptr, dg_ptr, db1_ptr, seed_ptr, rows_ptr, M, F, Eo,
                 p_stride_m, scale, last_dropped, 0, ACTIVATION, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M),
            ),
            (
                multiply_tiles,
                (a, b, full, empty, p_ptr, g_ptr, hidden_ptr, dp_ptr, dg_ptr, db1_ptr, seed_ptr, rows_ptr, M, F, Eo,
                 p_stride_m, scale, last_dropped, 1, ACTIVATION, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M),
            ),
            (
                copy_tiles,
                (a, b, full, empty, dy_ptr, w2_ptr, None, None, None, M, F, Eo, Eo, 1, dy_stride_m, w2_stride_o, 0, 0,
                 0, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, True, False),
            ),
        ],
        [WARPS, WARPS], [MULTIPLYING, COPYING],
    )  # fmt: skip
