"""ffn_fwd's first launch for 16 bits on GPUs of compute capability 9, in Gluon: _gemm_ahead.py with ffn_fwd.py's end.

Method:  as _gemm_ahead.py. With a gate a tile is 128 columns of p and the same of g: 256 sums of one product.
Limits:  as _gemm_ahead.py.
Source:  own work.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ._activation import activate
from ._ahead import barriers
from ._gemm import Config
from ._gemm_ahead import (
    COPYING,
    MULTIPLYING,
    PART,
    RING,
    ROWS,
    WARPS,
    by_columns,
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
from ._tile import near, philox


def pick_config(
    M: int, F: int, gated: bool, aligned: bool, dtype: torch.dtype, capability: tuple[int, int]
) -> Config | None:
    """The launch for the hidden activation (M, F); None where ffn_fwd.py's own is taken. block_n counts both sums."""
    return pick_product(M, 2 * F if gated else F, 0, False, aligned, dtype, capability)


@gluon.jit
def first_of_four(t):
    """(ROWS, PART // 4) of (ROWS, PART): the first of each four columns."""
    t, _ = gl.split(gl.reshape(t, [ROWS, PART // 4, 2, 2]))
    t, _ = gl.split(t)
    return t


@gluon.jit
def kept_part(seed_ptr, rows_ptr, m0, left_m, first, last_dropped, by: gl.constexpr):
    """(ROWS, PART) bool of dropout (_tile.keep_blocks), from row m0, with ``left_m`` left, and column ``first``.

    A thread has 8 columns that follow each other.
    """
    offs_m = gl.arange(0, ROWS, gl.SliceLayout(1, by))
    rows = m0 + offs_m
    if rows_ptr is not None:
        rows = gl.load(rows_ptr + rows, mask=offs_m < left_m, other=0)
    alike = gl.zeros([ROWS, PART], gl.int32, by)
    blocks = alike + gl.expand_dims(gl.arange(0, PART, gl.SliceLayout(0, by)) // 4, 0)
    blocks = first_of_four(blocks) + first // 4
    rows = first_of_four(alike.to(gl.int64) + gl.expand_dims(rows, 1))
    upper = ((rows >> 32) & 0xFFFFFFFF).to(gl.uint32)
    w0, w1, w2, w3 = philox(
        gl.load(seed_ptr), blocks.to(gl.uint32), (rows & 0xFFFFFFFF).to(gl.uint32), upper, upper * 0
    )
    draws = gl.reshape(gl.join(gl.join(w0, w2), gl.join(w1, w3)), [ROWS, PART])
    least = (last_dropped ^ -0x80000000).to(gl.uint32, bitcast=True)
    return gl.convert_layout(draws, by, assert_trivial=True) > least


@gluon.jit
def finish(
    p, g, b1_ptr, gate_ptr, b_gate_ptr, hidden_ptr, preact_ptr, seed_ptr, rows_ptr, m0, part: gl.constexpr, f0, left_m,
    left_f, F, scale, last_dropped, ACTIVATION: gl.constexpr, by: gl.constexpr,
):  # fmt: skip
    """ffn_fwd.finish() of a part of a group's half of a tile, to whose first element or column pointers point."""
    if b1_ptr is not None:
        p += load_columns(b1_ptr, part, left_f, by)
    if b_gate_ptr is not None:
        g += load_columns(b_gate_ptr, part, left_f, by)
    if preact_ptr is not None:
        width = F if gate_ptr is None else F * 2
        store_part(p, preact_ptr, part, left_m, left_f, width, by)
        if gate_ptr is not None:
            store_part(g, preact_ptr + F, part, left_m, left_f, width, by)
    h = activate(p, ACTIVATION, False)
    if gate_ptr is not None:
        h *= g
    if seed_ptr is not None:
        keep = kept_part(seed_ptr, rows_ptr, m0, left_m, f0 + part * PART, last_dropped, by)
        h = gl.where(keep, h * scale, 0.0)  # a dropped inf or NaN is dropped, not multiplied
    store_part(h, hidden_ptr, part, left_m, left_f, F, by)


@gluon.jit
def multiply_tiles(
    a, b, full, empty, b1_ptr, gate_ptr, b_gate_ptr, hidden_ptr, preact_ptr, seed_ptr, rows_ptr, M, E, F, scale,
    last_dropped, half: gl.constexpr, ACTIVATION: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """A group that multiplies: one half of the rows of every tile."""
    by: gl.constexpr = by_columns()
    BLOCK_F: gl.constexpr = BLOCK_N if gate_ptr is None else BLOCK_N // 2
    slot, turn = 0, 0
    for number in range(gl.program_id(0), tiles_of(M, F, 1, BLOCK_M, BLOCK_F), gl.num_programs(0)):
        m0, f0, _, _, _ = tile_and_part(number, M, F, E, E, BLOCK_M, BLOCK_F, GROUP_M)
        acc, slot, turn = multiply(a, b, full, empty, slot, turn, gl.cdiv(E, BLOCK_K).to(gl.int32), half, BLOCK_N, True,
                                   True)  # fmt: skip
        m0 += half * ROWS
        left_m, left_f = near(M - m0, ROWS), near(F - f0, BLOCK_F)
        b1 = b1_ptr
        if b1_ptr is not None:
            b1 += f0
        b_gate = b_gate_ptr
        if b_gate_ptr is not None:
            b_gate += f0
        preact = preact_ptr
        if preact_ptr is not None:
            preact += m0 * (F if gate_ptr is None else F * 2) + f0
        for part in gl.static_range(BLOCK_F // PART):
            p = part_of(acc, part, BLOCK_N, True)
            g = p
            if gate_ptr is not None:
                g = part_of(acc, part + BLOCK_F // PART, BLOCK_N, True)
            finish(
                p, g, b1, gate_ptr, b_gate, hidden_ptr + (m0 * F + f0), preact, seed_ptr, rows_ptr, m0, part,
                f0.to(gl.int32), left_m, left_f, F, scale, last_dropped, ACTIVATION, by,
            )  # fmt: skip


_RUNTIME = (
    "x_ptr", "w1_ptr", "b1_ptr", "gate_ptr", "b_gate_ptr", "hidden_ptr", "preact_ptr", "seed_ptr", "rows_ptr", "M", "E",
    "F", "x_stride_m", "w1_stride_f", "gate_stride_f", "scale", "last_dropped",
)  # fmt: skip


@gluon.jit(do_not_specialize=_RUNTIME)
def ffn_fwd_ahead_kernel(
    x_ptr, w1_ptr, b1_ptr, gate_ptr, b_gate_ptr, hidden_ptr, preact_ptr, seed_ptr, rows_ptr, M: gl.int64, E: gl.int64,
    F: gl.int64, x_stride_m: gl.int64, w1_stride_f: gl.int64, gate_stride_f: gl.int64, scale, last_dropped,
    ACTIVATION: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
):  # fmt: skip
    """As ffn_fwd_kernel; BLOCK_N sums are of BLOCK_N columns, with a gate of BLOCK_N // 2."""
    kind: gl.constexpr = x_ptr.dtype.element_ty
    a, b = ring_of(kind, [BLOCK_M, BLOCK_K]), ring_of(kind, [BLOCK_N, BLOCK_K])
    full, empty = barriers(32 * WARPS, RING), barriers(2, RING)
    BLOCK_F: gl.constexpr = BLOCK_N if gate_ptr is None else BLOCK_N // 2
    gl.warp_specialize(
        [
            (
                multiply_tiles,
                (a, b, full, empty, b1_ptr, gate_ptr, b_gate_ptr, hidden_ptr, preact_ptr, seed_ptr, rows_ptr, M, E, F,
                 scale, last_dropped, 0, ACTIVATION, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M),
            ),
            (
                multiply_tiles,
                (a, b, full, empty, b1_ptr, gate_ptr, b_gate_ptr, hidden_ptr, preact_ptr, seed_ptr, rows_ptr, M, E, F,
                 scale, last_dropped, 1, ACTIVATION, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M),
            ),
            (
                copy_tiles,
                (a, b, full, empty, x_ptr, w1_ptr, gate_ptr, None, None, M, F, E, E, 1, x_stride_m, w1_stride_f,
                 gate_stride_f, 0, 0, BLOCK_M, BLOCK_F, BLOCK_K, GROUP_M, True, True),
            ),
        ],
        [WARPS, WARPS], [MULTIPLYING, COPYING],
    )  # fmt: skip
