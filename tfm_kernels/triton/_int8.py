"""Rows rounded to integers of 8 bits, INT8_LINEAR.2's n and step, for the Triton kernels that multiply integers.

Owns:    one program = block_m rows, walked twice in pieces of block_k: for their largest elements, then to be rounded.
         Where the kernel that made the rows left the largest elements of their blocks, one piece, read once.
Traffic: reads x, the second time mostly from L2; writes the integers, a byte each, and a step for each row.
Limits:  float16, bfloat16, float32; at most 131,072 columns. All of it in float32, every operation rounded correctly:
         the integers are those of every backend.
Config:  pick_config() below; timed on an H200.
Source:  own work.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import _launch
from ._tile import load_tile, store_tile

MAX_WIDTH = 1 << 17  # 2**17 * 127 * 128 is just below 2**31
RUN = 16  # rows of integers end at a multiple of so many, with zeros: 16 bytes
BLOCKS = 128  # largest elements of a row that are read at once: one a thread
# How often round_rows_kernel is compiled at most for one storage type: each Config, with aligned rows of x and without.
# round_pieces_kernel: each Config, for one storage type, float32.
MAX_COMPILATIONS = 6
MAX_PIECES_COMPILATIONS = 3


@dataclass(frozen=True)
class Config:
    """How rows are rounded.

    Attributes:
        block_m: rows of one program.
        block_k: columns held at once.
    """

    block_m: int
    block_k: int


def pick_config(K: int) -> Config:
    """The launch for rows of K columns: a piece holds short rows whole, several of them."""
    block_k = next((size for size in (256, 1024) if size >= K), 4096)
    return Config(max(1, 1024 // block_k), block_k)


_FINITE = tl.constexpr(0x7F800000)  # the bits of infinity: those of what is finite are less
_USABLE = tl.constexpr(0x04000000)  # of 2**-119: rows without a larger element count as zeros
_WHOLE = tl.constexpr(
    1.5 * 2**23
)  # numbers of this size have no bits behind the point: a sum with it is rounded, to even


@triton.jit
def magnitude(x):
    """The bits of |x| as int32: they are in the order of the numbers, with NaN above all, which a maximum drops."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def factors(most, BLOCK_M: tl.constexpr):
    """(usable, 127 / a, a / 127 or NaN) of rows, (BLOCK_M,), from the magnitude() of their largest elements a."""
    largest = most.to(tl.float32, bitcast=True)
    finite = most < _FINITE
    usable = finite & (most >= _USABLE)
    steps = tl.full((BLOCK_M,), 127.0, tl.float32)
    factor = tl.div_rn(steps, tl.where(usable, largest, 1.0))
    step = tl.where(finite, tl.div_rn(tl.where(finite, largest, 0.0), steps), float("nan"))
    return usable, factor, step


@triton.jit
def round_piece(
    x_ptr, integers_ptr, usable, factor, offs_m, first, M, K, x_stride_m, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    RUN: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Writes the integers of columns first + 0, 1, ..., zeros from K up to a multiple of RUN."""
    x = load_tile(x_ptr, offs_m, first, M, K, x_stride_m, BLOCK_M, BLOCK_K, ALIGNED)
    integers = tl.where(usable[:, None], x, 0.0) * factor[:, None] + _WHOLE - _WHOLE
    store_tile(integers, integers_ptr, offs_m, first, M, (K + RUN - 1) // RUN * RUN, BLOCK_M, BLOCK_K, RUN)


_RUNTIME = ("x_ptr", "integers_ptr", "step_ptr", "M", "K", "x_stride_m")


@triton.jit(do_not_specialize=_RUNTIME)
def round_rows_kernel(
    x_ptr, integers_ptr, step_ptr, M: tl.int64, K: tl.int32, x_stride_m: tl.int64, BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr, RUN: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """integers_ptr (M, K up to a multiple of RUN) = n, 0 behind K; step_ptr (M,) = a / 127 or NaN."""
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    most = tl.zeros((BLOCK_M, BLOCK_K), tl.int32)
    for first in range(0, K, BLOCK_K):
        x = load_tile(x_ptr, offs_m, first, M, K, x_stride_m, BLOCK_M, BLOCK_K, ALIGNED)
        most = tl.maximum(most, magnitude(x))
    usable, factor, step = factors(tl.max(most, 1), BLOCK_M)
    tl.store(step_ptr + offs_m, step, mask=offs_m < M)
    for first in range(0, (K + RUN - 1) // RUN * RUN, BLOCK_K):
        round_piece(
            x_ptr, integers_ptr, usable, factor, offs_m, first, M, K, x_stride_m, BLOCK_M, BLOCK_K, RUN, ALIGNED
        )  # fmt: skip


_PIECES_RUNTIME = ("x_ptr", "largest_ptr", "integers_ptr", "step_ptr", "M", "K", "blocks", "x_stride_m")


@triton.jit(do_not_specialize=_PIECES_RUNTIME)
def round_pieces_kernel(
    x_ptr, largest_ptr, integers_ptr, step_ptr, M: tl.int64, K: tl.int32, blocks: tl.int32, x_stride_m: tl.int64,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, RUN: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The same of aligned rows, whose largest_ptr (M, blocks) holds the magnitude() of each block's largest element."""
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    most = tl.zeros((BLOCK_M, BLOCKS), tl.int32)
    for block in range(0, blocks, BLOCKS):
        offs = block + tl.arange(0, BLOCKS)
        mask = (offs_m < M)[:, None] & (offs < blocks)[None, :]
        most = tl.maximum(most, tl.load(largest_ptr + (offs_m * blocks)[:, None] + offs[None, :], mask=mask, other=0))
    usable, factor, step = factors(tl.max(most, 1), BLOCK_M)
    piece = tl.program_id(1)
    tl.store(step_ptr + offs_m, step, mask=(offs_m < M) & (piece == 0))
    round_piece(
        x_ptr, integers_ptr, usable, factor, offs_m, piece * BLOCK_K, M, K, x_stride_m, BLOCK_M, BLOCK_K, RUN, True
    )  # fmt: skip


def round_rows(x: Tensor, largest: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The integers of x (M, K), unit stride along K, launched on the current device, and the steps of its rows.

    Args:
        x: float16, bfloat16 or float32.
        largest: (M, blocks) int32, the magnitude() of the largest element of each block of a row, where they are
            known; then x is float32 and its rows are aligned.

    Returns:
        (M, K up to a multiple of 16) int8, zeros behind K, and (M,) float32.
    """
    M, K = x.shape
    config = pick_config(K)
    integers = torch.empty((M, _launch.cdiv(K, RUN) * RUN), dtype=torch.int8, device=x.device)
    step = torch.empty((M,), dtype=torch.float32, device=x.device)
    if M == 0:
        return integers, step
    programs = _launch.cdiv(M, config.block_m)
    given = {"x_ptr": x, "integers_ptr": integers, "step_ptr": step, "M": M, "K": K, "x_stride_m": x.stride(0)}
    given |= {"BLOCK_M": config.block_m, "BLOCK_K": config.block_k, "RUN": RUN, "num_warps": 4}
    if largest is None:
        _launch.launch(round_rows_kernel, (programs,), **given, ALIGNED=_launch.aligned(K, x), enable_fp_fusion=False)
    else:
        _launch.launch(
            round_pieces_kernel, (programs, max(1, _launch.cdiv(K, config.block_k))), **given, largest_ptr=largest,
            blocks=largest.shape[1], BLOCKS=BLOCKS, enable_fp_fusion=False,
        )  # fmt: skip
    return integers, step
