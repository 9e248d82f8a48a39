"""linear_cross_entropy_fwd's second launch for 16 bits on GPUs of compute capability 9, in Gluon: _gemm_ahead.py with
its end.

Owns:    persistent programs: each takes every programs-th of the tiles of rows that a part of the classes has, and of
         that part a tile of logits at a time. A thread keeps maxima and sums of its own columns, an eighth of each 32
         of a row, from tile to tile; the four of a row are joined once for a part.
Method:  as _gemm_ahead.py, of rows that lie side by side.
Limits:  as _gemm_ahead.py.
Source:  own work.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import _launch
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
    copy_product,
    load_columns,
    multiply,
    part_of,
    ring_of,
)
from ._gemm_ahead import pick_config as pick_product
from ._tile import near, power_of_e

LONGEST = 16  # tiles of classes that a part has at most


def pick_config(
    M: int, V: int, K: int, aligned: bool, dtype: torch.dtype, capability: tuple[int, int]
) -> Config | None:
    """The launch for M rows and V classes; None where linear_cross_entropy_fwd.py's own is taken.

    ``splits`` is into how many parts of whole tiles the classes are cut: the fewest with which the program that has
    most to do has least.
    """
    found = pick_product(M, V, K, False, aligned, dtype, capability)
    if found is None:
        return None
    tiles_m, tiles_v = _launch.cdiv(M, found.block_m), _launch.cdiv(V, found.block_n)

    def most(run: int) -> int:
        """Tiles of a program, with ``run`` a part."""
        return _launch.cdiv(tiles_m * _launch.cdiv(tiles_v, run), found.programs) * run

    run = min(range(1, min(tiles_v, LONGEST) + 1), key=lambda run: (most(run), -run))
    splits = _launch.cdiv(tiles_v, run)
    return replace(found, programs=min(found.programs, tiles_m * splits), splits=splits)


@gluon.constexpr_function
def by_eights():
    """by_columns() where the eight columns that a thread has of a row are an axis: (ROWS, PART // 8, 8)."""
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 4], [8, 0, 0]], [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]], [], [64, 4, 8],
    )  # fmt: skip


@gluon.jit
def eights(t):
    """(ROWS, PART // 8, 8) of (ROWS, PART) in by_columns()."""
    return gl.convert_layout(gl.reshape(t, [ROWS, PART // 8, 8]), by_eights(), assert_trivial=True)


@gluon.jit
def shift_of(most):
    """What is subtracted before powers are taken; of -inf alone nothing is."""
    return gl.where(most == float("-inf"), 0.0, most)


@gluon.jit
def is_target(at, part: gl.constexpr, by: gl.constexpr):
    """(ROWS, PART) bool: whether a part's column is column ``at`` of the tile.

    Written so that a thread compares with constants.
    """
    offs_n = gl.arange(0, PART, gl.SliceLayout(0, by))
    own, common = offs_n // 8 * 8, offs_n % 8
    return gl.expand_dims(at, 1) - gl.expand_dims(own, 0) == gl.expand_dims(common + part * PART, 0)


@gluon.jit
def is_there(left_n, part: gl.constexpr, by: gl.constexpr):
    """(1, PART) bool: whether a part's column is one of ``left_n`` of the tile; likewise."""
    offs_n = gl.arange(0, PART, gl.SliceLayout(0, by))
    own, common = offs_n // 8 * 8, offs_n % 8
    return gl.expand_dims(left_n - own > common + part * PART, 0)


@gluon.jit
def add_part(
    z, most, powers, own, total, bias_ptr, at, part: gl.constexpr, left_n, BLOCK_N: gl.constexpr,
    SMOOTHED: gl.constexpr,
):  # fmt: skip
    """(most, powers, own, total), (ROWS, PART // 8) of a thread's columns, with those of a part of a tile."""
    by: gl.constexpr = by_columns()
    if bias_ptr is not None:
        z += load_columns(bias_ptr, part, BLOCK_N, by)
    if SMOOTHED:
        total += gl.sum(eights(z), 2)  # 0 of classes that there are not
    own += gl.sum(eights(gl.where(is_target(at, part, by), z, 0.0)), 2)
    if left_n < BLOCK_N:  # of the last tile of all
        z = gl.where(is_there(left_n, part, by), z, float("-inf"))
    z = eights(z)
    top = gl.maximum(most, gl.max(z, 2))  # not NaN, which the sum will show
    shift = shift_of(top)
    powers = powers * power_of_e(most - shift) + gl.sum(power_of_e(z - gl.expand_dims(shift, 2)), 2)
    return top, powers, own, total


@gluon.jit
def run_of(number, live, V, splits, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """(first row, part of the classes, its first class, one past its last): the tiles of rows of a part go together."""
    tiles_m = gl.cdiv(live, BLOCK_M).to(gl.int32)
    run = gl.cdiv(gl.cdiv(V, BLOCK_N), splits) * BLOCK_N
    split = number // tiles_m
    m0, first = (number % tiles_m).to(gl.int64) * BLOCK_M, split * run
    return m0, split, first, gl.minimum(first + run, V)


@gluon.jit
def copy_runs(
    a, b, full, empty, x_ptr, weight_ptr, live, V, K, splits, x_stride_m, weight_stride_v, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    """The group that copies. One loop: what does not change in an inner one would be kept in registers there."""
    slot, turn = 0, 1
    items = gl.cdiv(live, BLOCK_M).to(gl.int32) * splits
    run = gl.cdiv(gl.cdiv(V, BLOCK_N).to(gl.int32), splits)
    mine = gl.cdiv(gl.maximum(items - gl.program_id(0), 0), gl.num_programs(0))
    for tile in range(0, mine * run):
        number = gl.program_id(0) + tile // run * gl.num_programs(0)
        m0, _, first, last = run_of(number, live, V, splits, BLOCK_M, BLOCK_N)
        n0 = first + tile % run * BLOCK_N
        if n0 < last:
            slot, turn = copy_product(
                a, b, full, empty, slot, turn, x_ptr, weight_ptr, None, m0, n0, live, V, K * 0, K, x_stride_m,
                weight_stride_v, 0, BLOCK_M, BLOCK_N, BLOCK_K, True, True,
            )  # fmt: skip


@gluon.jit
def multiply_runs(
    a, b, full, empty, bias_ptr, target_ptr, rows_ptr, parts_ptr, live, M, V, K, splits, target_stride,
    half: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, SMOOTHED: gl.constexpr,
):  # fmt: skip
    """A group that multiplies: one half of the rows of every tile."""
    own_columns: gl.constexpr = gl.SliceLayout(2, by_eights())
    slot, turn = 0, 0
    steps = gl.cdiv(K, BLOCK_K).to(gl.int32)
    for number in range(gl.program_id(0), gl.cdiv(live, BLOCK_M).to(gl.int32) * splits, gl.num_programs(0)):
        m0, split, first, last = run_of(number, live, V, splits, BLOCK_M, BLOCK_N)
        m0 += half * ROWS
        rows = places(rows_ptr, m0 + gl.arange(0, ROWS, gl.SliceLayout(1, by_columns())) + zero(), live, M)
        target = load_target(target_ptr, rows, M, V, target_stride)
        most = gl.full([ROWS, PART // 8], float("-inf"), gl.float32, own_columns)
        powers = gl.zeros([ROWS, PART // 8], gl.float32, own_columns)
        own = gl.zeros([ROWS, PART // 8], gl.float32, own_columns)
        total = gl.zeros([ROWS, PART // 8], gl.float32, own_columns)
        for n0 in range(first, last, BLOCK_N):
            acc, slot, turn = multiply(a, b, full, empty, slot, turn, steps, half, BLOCK_N, True, True)
            at, left_n = target - gl.cast(n0, gl.int32), near(V - n0, BLOCK_N)
            bias = bias_ptr
            if bias_ptr is not None:
                bias += n0
            for part in gl.static_range(BLOCK_N // PART):
                z = part_of(acc, part, BLOCK_N, True)
                most, powers, own, total = add_part(
                    z, most, powers, own, total, bias, at, part, left_n, BLOCK_N, SMOOTHED
                )
        top = gl.max(most, 1)
        powers = gl.sum(powers * power_of_e(most - gl.expand_dims(shift_of(top), 1)), 1)
        offs_m = gl.arange(0, ROWS, gl.SliceLayout(1, own_columns))
        to, step, there = parts_ptr + split * M + m0 + offs_m, splits * M, offs_m < near(live - m0, ROWS)
        gl.store(to, top, mask=there)
        gl.store(to + step, powers, mask=there)
        gl.store(to + 2 * step, gl.sum(own, 1), mask=there)
        if SMOOTHED:
            gl.store(to + 3 * step, gl.sum(total, 1), mask=there)


_RUNTIME = (
    "x_ptr", "weight_ptr", "bias_ptr", "target_ptr", "rows_ptr", "count_ptr", "parts_ptr", "M", "V", "K", "splits",
    "x_stride_m", "weight_stride_v", "target_stride",
)  # fmt: skip


@gluon.jit(do_not_specialize=_RUNTIME)
def linear_cross_entropy_fwd_ahead_kernel(
    x_ptr, weight_ptr, bias_ptr, target_ptr, rows_ptr, count_ptr, parts_ptr, M: gl.int64, V: gl.int64, K: gl.int64,
    splits: gl.int32, x_stride_m: gl.int64, weight_stride_v: gl.int64, target_stride: gl.int64, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, SMOOTHED: gl.constexpr,
):  # fmt: skip
    """As linear_cross_entropy_fwd_kernel but that x_ptr has the rows that count side by side, and bias_ptr numbers up
    to the end of the last tile: zeros.
    """
    kind: gl.constexpr = x_ptr.dtype.element_ty
    a, b = ring_of(kind, [BLOCK_M, BLOCK_K]), ring_of(kind, [BLOCK_N, BLOCK_K])
    full, empty = barriers(32 * WARPS, RING), barriers(2, RING)
    live = gl.load(count_ptr)
    gl.warp_specialize(
        [
            (
                multiply_runs,
                (a, b, full, empty, bias_ptr, target_ptr, rows_ptr, parts_ptr, live, M, V, K, splits, target_stride, 0,
                 BLOCK_M, BLOCK_N, BLOCK_K, SMOOTHED),
            ),
            (
                multiply_runs,
                (a, b, full, empty, bias_ptr, target_ptr, rows_ptr, parts_ptr, live, M, V, K, splits, target_stride, 1,
                 BLOCK_M, BLOCK_N, BLOCK_K, SMOOTHED),
            ),
            (
                copy_runs,
                (a, b, full, empty, x_ptr, weight_ptr, live, V, K, splits, x_stride_m, weight_stride_v, BLOCK_M,
                 BLOCK_N, BLOCK_K),
            ),
        ],
        [WARPS, WARPS], [MULTIPLYING, COPYING],
    )  # fmt: skip
