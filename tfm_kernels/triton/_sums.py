"""Sums over the rows of a matrix in a fixed order: gradients of biases, and of weights whose k was cut in parts.

Owns:    one program = block_n columns of one of ``chunks`` runs of rows; more than one run: a second launch adds them.
Traffic: reads the matrix once.
Limits:  float16, bfloat16, float32, sums float32. No atomics.
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
from ._tile import load_tile, sum_of_rows

# For one storage type and type of the result: two shapes of tile, aligned or not.
MAX_COMPILATIONS = 4


@dataclass(frozen=True)
class Config:
    """How the rows are summed.

    Attributes:
        block_m: rows that a program adds up at once.
        block_n: columns of a program.
        chunks: runs of rows that are summed apart.
    """

    block_m: int
    block_n: int
    chunks: int


def pick_config(M: int, N: int) -> Config:
    """The launch for M rows of N columns: a few rows, as of cut sums, by wide programs; many in runs of 256 or more."""
    if M <= 32:
        return Config(block_m=1, block_n=1024, chunks=1)
    columns = _launch.cdiv(N, 64)
    return Config(block_m=32, block_n=64, chunks=max(1, min(256 // max(columns, 1), M // 256)))


_RUNTIME = ("x_ptr", "sum_ptr", "M", "N", "run", "x_stride_m")


@triton.jit(do_not_specialize=_RUNTIME)
def sum_rows_kernel(
    x_ptr, sum_ptr, M: tl.int64, N: tl.int64, run: tl.int64, x_stride_m: tl.int64,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """sum_ptr (chunks, N) = x (M, N) summed over each ``run`` of rows."""
    first_n = tl.program_id(0).to(tl.int64) * BLOCK_N
    chunk = tl.program_id(1).to(tl.int64)
    last = tl.minimum(chunk * run + run, M)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for m in range(chunk * run, last, BLOCK_M):
        offs_m = (tl.zeros((BLOCK_M,), tl.int64) + m) + tl.arange(0, BLOCK_M)
        total += load_tile(x_ptr, offs_m, first_n, last, N, x_stride_m, BLOCK_M, BLOCK_N, ALIGNED)
    offs_n = first_n + tl.arange(0, BLOCK_N)
    value = sum_of_rows(total, BLOCK_M, BLOCK_N).to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + chunk * N + offs_n, value, mask=offs_n < N)


def sum_rows(x: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """(N,) in ``dtype``: x (M, N), unit stride along N, summed over its rows, on the current device; 0 of no rows.

    Where ``out`` is, (N,) contiguous in ``dtype``, it is what is written and returned.
    """
    M, N = x.shape
    config = pick_config(M, N)
    final = torch.empty((N,), dtype=dtype, device=x.device) if out is None else out
    if N == 0:
        return final
    sums = final if config.chunks == 1 else torch.empty((config.chunks, N), dtype=torch.float32, device=x.device)
    _launch.launch(
        sum_rows_kernel, (_launch.cdiv(N, config.block_n), config.chunks),
        x_ptr=x, sum_ptr=sums, M=M, N=N, run=_launch.cdiv(M, config.chunks), x_stride_m=x.stride(0),
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, ALIGNED=_launch.aligned(N, x), num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
    return final if config.chunks == 1 else sum_rows(sums, dtype, out)
