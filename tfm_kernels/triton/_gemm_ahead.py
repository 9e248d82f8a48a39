"""The product of _gemm.py for 16 bits on GPUs of compute capability 9, in Gluon: its ends run beside other products.

Method:  a program has three groups of four warps. One copies factors into a ring in shared memory, tile after tile
         without a pause; the other two multiply from it, each half of a tile's rows, and end their halves. Whoever is
         ahead by the ring's length ends while the other multiplies.
Order:   tiles in _gemm.py's order. The rows of a k inner B lie in shared memory in such an order (``column_of``) that
         eight sums of a thread are columns that follow each other, 16 bytes of the result.
Traffic: as _gemm.py's 128 x 256 tiles. A step of 64 k takes 1,024 clocks of products, which read 80 KiB of shared
         memory, and copies write 48 KiB.
Sums:    what is added to is where a sum begins: its loads wait once and together, and nothing waits for its stores.
Limits:  float16, bfloat16; rows at multiples of 16 bytes; a bias only where B is k inner, added to where it is not.
Source:  own work.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from . import _launch
from ._ahead import barriers, begin_copy, by_16_bytes, next_place, zero
from ._gemm import LEAST_K, Config, columns, place, tiles, up_to_8
from ._tile import near

RING = gl.constexpr(4)  # steps of k that have a place at once
WARPS = gl.constexpr(4)  # of a group
ROWS = gl.constexpr(64)  # of a tile that one group multiplies
PART = gl.constexpr(32)  # columns that a group ends at once
LEAST = 7  # eighths of the multiprocessors: calls with less work are _gemm.py's; bench.gpu --ahead leaves it none
# registers of a thread: the two groups that multiply have what the one that copies leaves
MULTIPLYING, COPYING = gl.constexpr(216), gl.constexpr(80)


def pick_config(
    M: int, N: int, K: int, splits: bool, aligned: bool, dtype: torch.dtype, capability: tuple[int, int]
) -> Config | None:
    """The launch for C (M, N), of which parts of k may be summed apart where it ``splits``.

    None for calls that the kernel cannot do, and for those whose tiles would leave multiprocessors without work.
    Not measured yet.
    """
    if capability[0] != 9 or not aligned or dtype == torch.float32:
        return None
    found = Config(
        128, 256, 64, num_warps=WARPS.value, num_stages=RING.value, programs=_launch.MULTIPROCESSORS[9], ahead=True
    )
    count = tiles(M, N, found)
    if splits and 0 < 8 * count < 7 * found.programs:
        found = replace(found, splits=max(1, min(found.programs // count, K // LEAST_K)))
    if count == 0 or 8 * count * found.splits < LEAST * found.programs:
        return None
    return replace(found, programs=min(found.programs, count * found.splits))


@gluon.jit
def column_of(rows):
    """The column of a tile that each row of a k inner B in shared memory is: a thread's sums are those of columns
    2t, 2t + 1, 2t + 8, 2t + 9, ... of each 32, and are to be 8t + 0..7.
    """
    return rows // 32 * 32 + rows % 8 // 2 * 8 + rows % 32 // 8 * 2 + rows % 2


@gluon.constexpr_function
def by_columns():
    """The layout of (ROWS, PART) sums in the order of column_of()."""
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0]], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [],
        [64, 32],
    )  # fmt: skip


@gluon.constexpr_function
def factor_shape(rows, BLOCK_K, K_INNER):
    """Of a step's tile of a factor in shared memory."""
    return [rows, BLOCK_K] if K_INNER else [BLOCK_K, rows]


@gluon.jit
def ring_of(kind: gl.constexpr, shape: gl.constexpr):
    """Shared memory for RING tiles of a factor."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(shape, kind)
    return gl.allocate_shared_memory(kind, [RING, shape[0], shape[1]], layout)


@gluon.jit
def copy_factor(
    to, ptr, left, k_left, none, stride, rows: gl.constexpr, BLOCK_K: gl.constexpr, K_INNER: gl.constexpr,
    SORTED: gl.constexpr, PADDED: gl.constexpr = False,
):  # fmt: skip
    """Begins to copy a step's tile of a factor, whose first element ``ptr`` is; 0 beyond its edges.

    PADDED: rows that end within 16 bytes go on with zeros. SORTED: its rows go where column_of() has them. A thread's
    rows are written as one that depends on it and others that do not: one pointer, and steps in registers of the whole
    warp.
    """
    width: gl.constexpr = BLOCK_K if K_INNER else rows
    count: gl.constexpr = rows if K_INNER else BLOCK_K
    by: gl.constexpr = by_16_bytes(width, WARPS)
    AT_ONCE: gl.constexpr = WARPS * 32 // (width // 8)  # rows that the group copies by one instruction
    offs = gl.arange(0, count, gl.SliceLayout(1, by))
    own, common = offs % AT_ONCE + none, offs // AT_ONCE * AT_ONCE
    if SORTED:
        own, common = column_of(own), column_of(common)
    inner = gl.arange(0, width, gl.SliceLayout(0, by))
    rows_left, end = (left, k_left) if K_INNER else (k_left, left)
    end = up_to_8(end) if PADDED else end // 8 * 8
    mask = gl.expand_dims(own + common < rows_left, 1) & gl.expand_dims(inner < end, 0)
    ptrs = ptr + gl.expand_dims(own.to(gl.int64) * stride, 1) + gl.expand_dims(inner, 0)
    begin_copy(to, gl.multiple_of(ptrs + gl.expand_dims(common.to(gl.int64) * stride, 1), [1, 16]), mask=mask)


@gluon.jit
def copy_product(
    a, b, full, empty, slot, turn, a_ptr, b_ptr, gate_ptr, m0, n0, M, N, first, last, a_stride, b_stride, gate_stride,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, A_K_INNER: gl.constexpr,
    B_K_INNER: gl.constexpr, A_PADDED: gl.constexpr = False,
):  # fmt: skip
    """Copies what a tile of BLOCK_N columns needs of k = first..last - 1 into the ring; returns its next place.

    With a gate, which is k inner as B then is, B's rows in the ring are followed by as many of the gate's.
    """
    left_m = gl.minimum(M - m0, BLOCK_M).to(gl.int32)
    left_n = gl.minimum(N - n0, BLOCK_N).to(gl.int32)
    a_ptr += m0 * a_stride + first if A_K_INNER else first * a_stride + m0
    b_ptr += n0 * b_stride + first if B_K_INNER else first * b_stride + n0
    if gate_ptr is not None:
        gate_ptr += n0 * gate_stride + first
    none = zero()
    for k in range(first, last, BLOCK_K):
        k_left = gl.minimum(last - k, BLOCK_K).to(gl.int32)
        mbarrier.wait(empty.index(slot), turn)
        copy_factor(a.index(slot), a_ptr, left_m, k_left, none, a_stride, BLOCK_M, BLOCK_K, A_K_INNER, False,
                    A_PADDED)  # fmt: skip
        a_ptr += BLOCK_K if A_K_INNER else BLOCK_K * a_stride
        if gate_ptr is None:
            copy_factor(b.index(slot), b_ptr, left_n, k_left, none, b_stride, BLOCK_N, BLOCK_K, B_K_INNER, B_K_INNER)
        else:
            upper, lower = b.index(slot).slice(0, BLOCK_N), b.index(slot).slice(BLOCK_N, BLOCK_N)
            copy_factor(upper, b_ptr, left_n, k_left, none, b_stride, BLOCK_N, BLOCK_K, True, True)
            copy_factor(lower, gate_ptr, left_n, k_left, none, gate_stride, BLOCK_N, BLOCK_K, True, True)
            gate_ptr += BLOCK_K
        b_ptr += BLOCK_K if B_K_INNER else BLOCK_K * b_stride
        async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
        slot, turn = next_place(slot, turn, RING)
    return slot, turn


@gluon.constexpr_function
def by_sums(BLOCK_N):
    """The layout of a group's sums: a thread has 2 columns that follow each other of each 8."""
    return gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_N, 16])


@gluon.jit
def multiply(
    a, b, full, empty, slot, turn, steps, half: gl.constexpr, BLOCK_N: gl.constexpr, A_K_INNER: gl.constexpr,
    B_K_INNER: gl.constexpr, begun=None,
):  # fmt: skip
    """(sums of a group's half of a tile over ``steps`` places of the ring, added to ``begun``, the next place)."""
    acc = begun
    if begun is None:
        acc = gl.zeros([ROWS, BLOCK_N], gl.float32, by_sums(BLOCK_N))
    for step in range(0, steps):
        mbarrier.wait(full.index(slot), turn)
        fence_async_shared()
        if A_K_INNER:
            mine = a.index(slot).slice(half * ROWS, ROWS)
        else:
            mine = a.index(slot).slice(half * ROWS, ROWS, 1).permute((1, 0))
        other = b.index(slot)
        if B_K_INNER:
            other = other.permute((1, 0))
        acc = warpgroup_mma(mine, other, acc, is_async=True)
        acc = warpgroup_mma_wait(1, [acc])  # the product before this one is done, and its place free
        mbarrier.arrive(empty.index((slot + RING - 1) % RING), pred=step > 0)
        slot, turn = next_place(slot, turn, RING)
    acc = warpgroup_mma_wait(0, [acc])
    mbarrier.arrive(empty.index((slot + RING - 1) % RING), pred=steps > 0)
    return acc, slot, turn


@gluon.jit
def part_of(acc, part: gl.constexpr, BLOCK_N: gl.constexpr, SORTED: gl.constexpr):
    """(ROWS, PART) of the sums, columns part * PART + 0, 1, ...; in by_columns() where B was SORTED."""
    t = columns(acc, part, BLOCK_N // PART, ROWS, BLOCK_N)
    if SORTED:
        t = gl.permute(gl.reshape(t, [ROWS, 4, 4, 2]), [0, 2, 1, 3])
        t = gl.convert_layout(gl.reshape(t, [ROWS, PART]), by_columns(), assert_trivial=True)
    return t


@gluon.jit
def columns_of_part(part: gl.constexpr, by: gl.constexpr):
    """The columns of a tile that a part has, (PART,)."""
    return part * PART + gl.arange(0, PART, gl.SliceLayout(0, by))


@gluon.jit
def load_columns(ptr, part: gl.constexpr, left_n, by: gl.constexpr):
    """(1, PART) float32 of a vector, of which ``ptr`` points to the tile's first and ``left_n`` are left; else 0."""
    offs = columns_of_part(part, by)
    value = gl.load(gl.multiple_of(ptr + offs, [16]), mask=offs < left_n // 8 * 8, other=0.0)
    return gl.expand_dims(value.to(gl.float32), 0)


@gluon.jit
def pointers_of_part(ptr, part: gl.constexpr, left_m, left_n, stride_m, by: gl.constexpr):
    """(pointers, which exist), (ROWS, PART) of a matrix: ``ptr`` points to the first element of a group's half of a
    tile, and ``left_m`` rows and ``left_n`` columns are left from there.
    """
    offs_m, offs_n = gl.arange(0, ROWS, gl.SliceLayout(1, by)), columns_of_part(part, by)
    mask = gl.expand_dims(offs_m < left_m, 1) & gl.expand_dims(offs_n < left_n // 8 * 8, 0)
    ptrs = ptr + gl.expand_dims(offs_m * stride_m, 1) + gl.expand_dims(offs_n, 0)
    return gl.multiple_of(ptrs, [1, 16]), mask


@gluon.jit
def load_part(ptr, part: gl.constexpr, left_m, left_n, stride_m, by: gl.constexpr):
    """(ROWS, PART) float32 of pointers_of_part()'s matrix; 0 where there is nothing."""
    ptrs, mask = pointers_of_part(ptr, part, left_m, left_n, stride_m, by)
    return gl.load(ptrs, mask=mask, other=0.0).to(gl.float32)


@gluon.jit
def store_part(value, ptr, part: gl.constexpr, left_m, left_n, stride_m, by: gl.constexpr):
    """Writes (ROWS, PART) of pointers_of_part()'s matrix, rounded once to its type."""
    ptrs, mask = pointers_of_part(ptr, part, left_m, left_n, stride_m, by)
    gl.store(ptrs, value.to(ptr.dtype.element_ty), mask=mask)


@gluon.jit
def pointers_of_sums(ptr, rows_ptr, m0, left_m, left_n, stride_m, BLOCK_N: gl.constexpr):
    """(pointers, which exist), (ROWS, BLOCK_N) float32 as a group's sums, whole sectors: rows m0 + 0, 1, ... or what
    rows_ptr has there, from the tile's first column, which ``ptr`` points to in row 0.
    """
    by: gl.constexpr = by_sums(BLOCK_N)
    offs_m, offs_n = gl.arange(0, ROWS, gl.SliceLayout(1, by)) + zero(), gl.arange(0, BLOCK_N, gl.SliceLayout(0, by))
    rows = m0 + offs_m
    if rows_ptr is not None:
        rows = gl.load(rows_ptr + rows, mask=offs_m < left_m, other=0)
    mask = gl.expand_dims(offs_m < left_m, 1) & gl.expand_dims(offs_n < left_n // 8 * 8, 0)
    ptrs = ptr + gl.expand_dims(rows * stride_m, 1) + gl.expand_dims(offs_n, 0)
    return gl.multiple_of(ptrs, [1, 16]), mask


@gluon.jit
def tile_and_part(number, M, N, K, part, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr):
    """(first row, first column, part of k, its first k, one past its last) of a tile."""
    tiles_m = gl.cdiv(M, BLOCK_M).to(gl.int32)
    tiles_n = gl.cdiv(N, BLOCK_N).to(gl.int32)
    split = (number // (tiles_m * tiles_n)).to(gl.int64)
    m, n = place(number % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
    return (
        m.to(gl.int64) * BLOCK_M, n.to(gl.int64) * BLOCK_N, split, split * part, gl.minimum(split * part + part, K)
    )  # fmt: skip


@gluon.jit
def tiles_of(M, N, splits, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """How many tiles there are."""
    return gl.cdiv(M, BLOCK_M).to(gl.int32) * gl.cdiv(N, BLOCK_N).to(gl.int32) * splits


@gluon.jit
def copy_tiles(
    a, b, full, empty, a_ptr, b_ptr, gate_ptr, a2_ptr, b2_ptr, M, N, K, part, splits, a_stride, b_stride, gate_stride,
    a2_stride, b2_stride, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr,
    A_K_INNER: gl.constexpr, B_K_INNER: gl.constexpr, A_PADDED: gl.constexpr = False,
):  # fmt: skip
    """The group that copies. Its copies are waited for where they are read."""
    slot, turn = 0, 1
    for number in range(gl.program_id(0), tiles_of(M, N, splits, BLOCK_M, BLOCK_N), gl.num_programs(0)):
        m0, n0, _, first, last = tile_and_part(number, M, N, K, part, BLOCK_M, BLOCK_N, GROUP_M)
        slot, turn = copy_product(
            a, b, full, empty, slot, turn, a_ptr, b_ptr, gate_ptr, m0, n0, M, N, first, last, a_stride, b_stride,
            gate_stride, BLOCK_M, BLOCK_N, BLOCK_K, A_K_INNER, B_K_INNER, A_PADDED,
        )  # fmt: skip
        if a2_ptr is not None:
            slot, turn = copy_product(
                a, b, full, empty, slot, turn, a2_ptr, b2_ptr, None, m0, n0, M, N, first, last, a2_stride, b2_stride, 0,
                BLOCK_M, BLOCK_N, BLOCK_K, A_K_INNER, B_K_INNER,
            )  # fmt: skip


@gluon.jit
def multiply_tiles(
    a, b, full, empty, bias_ptr, c_ptr, rows_ptr, live, M, N, K, part, splits, half: gl.constexpr,
    PRODUCTS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr,
    A_K_INNER: gl.constexpr, B_K_INNER: gl.constexpr, ADDS: gl.constexpr,
):  # fmt: skip
    """A group that multiplies: one half of the rows of every tile."""
    slot, turn = 0, 0
    by: gl.constexpr = by_columns() if B_K_INNER else by_16_bytes(PART, WARPS)
    for number in range(gl.program_id(0), tiles_of(live, N, splits, BLOCK_M, BLOCK_N), gl.num_programs(0)):
        m0, n0, split, first, last = tile_and_part(number, live, N, K, part, BLOCK_M, BLOCK_N, GROUP_M)
        steps = gl.cdiv(last - first, BLOCK_K).to(gl.int32) * PRODUCTS
        m0 += half * ROWS
        left_m, left_n = near(live - m0, ROWS), near(N - n0, BLOCK_N)
        to = c_ptr + split * M * N + n0
        if ADDS:
            ptrs, mask = pointers_of_sums(to, rows_ptr, m0, left_m, left_n, N, BLOCK_N)
            acc = gl.load(ptrs, mask=mask, other=0.0)
            acc, slot, turn = multiply(a, b, full, empty, slot, turn, steps, half, BLOCK_N, A_K_INNER, B_K_INNER, acc)
            # once more: kept, they would take registers of the sums
            ptrs, mask = pointers_of_sums(to, rows_ptr, m0, left_m, left_n, N, BLOCK_N)
            gl.store(ptrs, acc, mask=mask)
        else:
            acc, slot, turn = multiply(a, b, full, empty, slot, turn, steps, half, BLOCK_N, A_K_INNER, B_K_INNER)
            to += m0 * N
            for part_of_n in gl.static_range(BLOCK_N // PART):
                t = part_of(acc, part_of_n, BLOCK_N, B_K_INNER)
                if not B_K_INNER:
                    t = gl.convert_layout(t.to(c_ptr.dtype.element_ty), by)
                if bias_ptr is not None:
                    t += load_columns(bias_ptr + n0, part_of_n, left_n, by)
                store_part(t, to, part_of_n, left_m, left_n, N, by)


_RUNTIME = (
    "a_ptr", "b_ptr", "a2_ptr", "b2_ptr", "bias_ptr", "c_ptr", "rows_ptr", "count_ptr", "M", "N", "K", "part", "splits",
    "a_stride", "b_stride", "a2_stride", "b2_stride",
)  # fmt: skip


@gluon.jit(do_not_specialize=_RUNTIME)
def gemm_ahead_kernel(
    a_ptr, b_ptr, a2_ptr, b2_ptr, bias_ptr, c_ptr, rows_ptr, count_ptr, M: gl.int64, N: gl.int64, K: gl.int64,
    part: gl.int64, splits: gl.int32, a_stride: gl.int64, b_stride: gl.int64, a2_stride: gl.int64, b2_stride: gl.int64,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr,
    A_K_INNER: gl.constexpr, B_K_INNER: gl.constexpr, A_PADDED: gl.constexpr, ADDS: gl.constexpr,
):  # fmt: skip
    """As gemm_kernel; a bias where B is k inner, rows_ptr where it ADDS, which it does where B is not."""
    kind: gl.constexpr = a_ptr.dtype.element_ty
    a = ring_of(kind, factor_shape(BLOCK_M, BLOCK_K, A_K_INNER))
    b = ring_of(kind, factor_shape(BLOCK_N, BLOCK_K, B_K_INNER))
    full, empty = barriers(32 * WARPS, RING), barriers(2, RING)
    PRODUCTS: gl.constexpr = 1 if a2_ptr is None else 2
    live = M
    if count_ptr is not None:
        if A_K_INNER:
            live = gl.load(count_ptr)
        else:
            K = gl.load(count_ptr)
    gl.warp_specialize(
        [
            (
                multiply_tiles,
                (a, b, full, empty, bias_ptr, c_ptr, rows_ptr, live, M, N, K, part, splits, 0, PRODUCTS, BLOCK_M,
                 BLOCK_N, BLOCK_K, GROUP_M, A_K_INNER, B_K_INNER, ADDS),
            ),
            (
                multiply_tiles,
                (a, b, full, empty, bias_ptr, c_ptr, rows_ptr, live, M, N, K, part, splits, 1, PRODUCTS, BLOCK_M,
                 BLOCK_N, BLOCK_K, GROUP_M, A_K_INNER, B_K_INNER, ADDS),
            ),
            (
                copy_tiles,
                (a, b, full, empty, a_ptr, b_ptr, None, a2_ptr, b2_ptr, live, N, K, part, splits, a_stride, b_stride, 0,
                 a2_stride, b2_stride, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, A_K_INNER, B_K_INNER, A_PADDED),
            ),
        ],
        [WARPS, WARPS], [MULTIPLYING, COPYING],
    )  # fmt: skip
