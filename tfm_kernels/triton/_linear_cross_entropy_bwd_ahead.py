"""linear_cross_entropy_bwd's dz for 16 bits on GPUs of compute capability 9, in Gluon: _gemm_ahead.py with its end.

Method:  as _gemm_ahead.py, of rows that lie side by side. What a tile's end needs of its rows is loaded before its sums
         begin. Sums over rows are those of a warp's 16, which no shared memory is needed for.
Limits:  as _gemm_ahead.py.
Source:  own work.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ._ahead import barriers, zero
from ._cross_entropy import load_target, places
from ._gemm import Config
from ._gemm_ahead import (
    COPYING,
    MULTIPLYING,
    PART,
    RING,
    ROWS,
    WARPS,
    by_columns,
    columns_of_part,
    copy_tiles,
    load_columns,
    multiply,
    part_of,
    ring_of,
    store_part,
    tile_and_part,
    tiles_of,
)
from ._gemm_ahead import pick_config as pick_product
from ._linear_cross_entropy_fwd_ahead import is_target, is_there
from ._tile import near, power_of_e

SUMS = 2 * WARPS.value  # rows of sums of dz that a tile has


def pick_config(
    M: int, V: int, K: int, aligned: bool, dtype: torch.dtype, capability: tuple[int, int]
) -> Config | None:
    """The launch for dz (M, V) of a chunk; None where linear_cross_entropy_bwd.py's own is taken."""
    return pick_product(M, V, K, False, aligned, dtype, capability)


@gluon.jit
def finish(
    z, bias_ptr, dz_ptr, dbias_ptr, dloss, lse, at, part: gl.constexpr, left_m, left_n, dz_stride_m, share, even,
    BLOCK_N: gl.constexpr, by: gl.constexpr,
):  # fmt: skip
    """LCE.4 of a part of a group's half of a tile, to whose first element or column pointers point."""
    if bias_ptr is not None:
        z += load_columns(bias_ptr, part, BLOCK_N, by)
    dz = power_of_e(z - gl.expand_dims(lse, 1)) - gl.where(is_target(at, part, by), share + even, even)
    dz *= gl.expand_dims(dloss, 1)
    if left_n < BLOCK_N:  # of the last tile of all
        dz = gl.where(is_there(left_n, part, by), dz, 0.0)
    store_part(dz, dz_ptr, part, left_m, BLOCK_N, dz_stride_m, by)
    if dbias_ptr is not None:  # rows that do not exist have dz = 0
        store_sums(dz, dbias_ptr, part, dz_stride_m)


@gluon.jit
def store_sums(dz, ptr, part: gl.constexpr, stride):
    """Writes (WARPS, PART) float32: the sums over the rows of each warp."""
    sums = gl.sum(gl.reshape(dz, [WARPS, ROWS // WARPS, PART]), 1)
    by: gl.constexpr = sums.type.layout
    warps, offs_n = gl.arange(0, WARPS, gl.SliceLayout(1, by)), columns_of_part(part, by)
    gl.store(gl.multiple_of(ptr + gl.expand_dims(warps * stride, 1) + gl.expand_dims(offs_n, 0), [1, 16]), sums)


@gluon.jit
def multiply_tiles(
    a, b, full, empty, bias_ptr, target_ptr, rows_ptr, dloss_ptr, lse_ptr, dz_ptr, dbias_ptr, live, M, V, K, begin,
    chunk, target_stride, dloss_stride, dz_stride_m, share, even, half: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """A group that multiplies: one half of the rows of every tile."""
    by: gl.constexpr = by_columns()
    slot, turn = 0, 0
    steps = gl.cdiv(K, BLOCK_K).to(gl.int32)
    for number in range(gl.program_id(0), tiles_of(live, chunk, 1, BLOCK_M, BLOCK_N), gl.num_programs(0)):
        m0, n0, _, _, _ = tile_and_part(number, live, chunk, K, K, BLOCK_M, BLOCK_N, GROUP_M)
        m0 += half * ROWS
        rows = places(rows_ptr, m0 + gl.arange(0, ROWS, gl.SliceLayout(1, by)) + zero(), live, M)
        there = rows < M
        at = load_target(target_ptr, rows, M, V, target_stride) - (begin + n0).to(gl.int32)
        dloss = gl.load(dloss_ptr + rows * dloss_stride, mask=there, other=0.0)
        lse = gl.load(lse_ptr + rows, mask=there, other=float("inf"))
        acc, slot, turn = multiply(a, b, full, empty, slot, turn, steps, half, BLOCK_N, True, True)
        left_m, left_n = near(live - m0, ROWS), near(chunk - n0, BLOCK_N)
        bias = bias_ptr
        if bias_ptr is not None:
            bias += begin + n0
        dbias = dbias_ptr
        if dbias_ptr is not None:
            dbias += m0 // ROWS * WARPS * dz_stride_m + n0
        for part in gl.static_range(BLOCK_N // PART):
            finish(
                part_of(acc, part, BLOCK_N, True), bias, dz_ptr + (m0 * dz_stride_m + n0), dbias, dloss, lse, at, part,
                left_m, left_n, dz_stride_m, share, even, BLOCK_N, by,
            )  # fmt: skip


_RUNTIME = (
    "x_ptr", "weight_ptr", "bias_ptr", "target_ptr", "rows_ptr", "count_ptr", "dloss_ptr", "lse_ptr", "dz_ptr",
    "dbias_ptr", "M", "V", "K", "begin", "chunk", "x_stride_m", "weight_stride_v", "target_stride", "dloss_stride",
    "dz_stride_m", "share", "even",
)  # fmt: skip


@gluon.jit(do_not_specialize=_RUNTIME)
def linear_cross_entropy_bwd_ahead_kernel(
    x_ptr, weight_ptr, bias_ptr, target_ptr, rows_ptr, count_ptr, dloss_ptr, lse_ptr, dz_ptr, dbias_ptr, M: gl.int64,
    V: gl.int64, K: gl.int64, begin: gl.int32, chunk: gl.int64, x_stride_m: gl.int64, weight_stride_v: gl.int64,
    target_stride: gl.int64, dloss_stride: gl.int64, dz_stride_m: gl.int64, share, even, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """As linear_cross_entropy_bwd_kernel but that x_ptr has the rows that count side by side, bias_ptr what it likes up
    to the end of the last tile, and dbias_ptr is (SUMS for each tile of rows, dz_stride_m) float32 of a chunk.
    """
    kind: gl.constexpr = x_ptr.dtype.element_ty
    a, b = ring_of(kind, [BLOCK_M, BLOCK_K]), ring_of(kind, [BLOCK_N, BLOCK_K])
    full, empty = barriers(32 * WARPS, RING), barriers(2, RING)
    live = gl.load(count_ptr)
    gl.warp_specialize(
        [
            (
                multiply_tiles,
                (a, b, full, empty, bias_ptr, target_ptr, rows_ptr, dloss_ptr, lse_ptr, dz_ptr, dbias_ptr, live, M, V,
                 K, begin, chunk, target_stride, dloss_stride, dz_stride_m, share, even, 0, BLOCK_M, BLOCK_N, BLOCK_K,
                 GROUP_M),
            ),
            (
                multiply_tiles,
                (a, b, full, empty, bias_ptr, target_ptr, rows_ptr, dloss_ptr, lse_ptr, dz_ptr, dbias_ptr, live, M, V,
                 K, begin, chunk, target_stride, dloss_stride, dz_stride_m, share, even, 1, BLOCK_M, BLOCK_N, BLOCK_K,
                 GROUP_M),
            ),
            (
                copy_tiles,
                (a, b, full, empty, x_ptr, weight_ptr, None, None, None, live, chunk, K, K, 1, x_stride_m,
                 weight_stride_v, 0, 0, 0, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, True, True),
            ),
        ],
        [WARPS, WARPS], [MULTIPLYING, COPYING],
    )  # fmt: skip
