"""Rows rounded to integers of 8 bits, INT8_LINEAR.2's n and step, for the Triton kernels that multiply integers.

Owns:    one program = block_m rows, walked twice in pieces of block_k: for their largest elements, then to be rounded.
Traffic: reads x, the second time mostly from L2; writes the integers, a byte each, and a step for each row.
Limits:  float16, bfloat16, float32; at most 131,072 columns. All of it in float32, every operation rounded correctly:
         the integers are those of every backend.
Config:  pick_config() below; not yet measured on a GPU.
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
# How often round_rows_kernel is compiled at most for one storage type: each Config, with aligned rows of x and without.
MAX_COMPILATIONS = 6


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
        most = tl.maximum(most, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)  # as bits, for a maximum drops NaN
    most = tl.max(most, 1)
    largest = most.to(tl.float32, bitcast=True)
    finite = most < _FINITE
    usable = finite & (most >= _USABLE)
    steps = tl.full((BLOCK_M,), 127.0, tl.float32)
    factor = tl.div_rn(steps, tl.where(usable, largest, 1.0))
    step = tl.where(finite, tl.div_rn(tl.where(finite, largest, 0.0), steps), float("nan"))
    tl.store(step_ptr + offs_m, step, mask=offs_m < M)
    width = (K + RUN - 1) // RUN * RUN
    for first in range(0, width, BLOCK_K):
        x = load_tile(x_ptr, offs_m, first, M, K, x_stride_m, BLOCK_M, BLOCK_K, ALIGNED)
        integers = tl.where(usable[:, None], x, 0.0) * factor[:, None] + _WHOLE - _WHOLE
        store_tile(integers, integers_ptr, offs_m, first, M, width, BLOCK_M, BLOCK_K, RUN)


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """The integers of x (M, K), unit stride along K, launched on the current device, and the steps of its rows.

    Returns:
        (M, K up to a multiple of 16) int8, zeros behind K, and (M,) float32.
    """
    M, K = x.shape
    config = pick_config(K)
    integers = torch.empty((M, triton.cdiv(K, RUN) * RUN), dtype=torch.int8, device=x.device)
    step = torch.empty((M,), dtype=torch.float32, device=x.device)
    if M > 0:
        round_rows_kernel[(triton.cdiv(M, config.block_m),)](
            x_ptr=x, integers_ptr=integers, step_ptr=step, M=M, K=K, x_stride_m=x.stride(0), BLOCK_M=config.block_m,
            BLOCK_K=config.block_k, RUN=RUN, ALIGNED=_launch.aligned(K, x), num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return integers, step
