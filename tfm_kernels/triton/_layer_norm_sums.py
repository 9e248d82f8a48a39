"""Sums over the rows of a norm's backward, Triton. Implements LN.5 of tfm_kernels/ops/layer_norm.py.

Owns:    layer_norm_bwd's programs leave partial sums of dweight and dbias where they hold them in registers. Of longer
         rows a launch does nothing else: one program = block_n columns of every parts-th group of block_m rows. Either
         way partial sums are added up in a fixed order, and rounded once to the parameters' types.
Traffic: reads dy and z once more, M*N each, where rows are long; parts*N float32 twice for each of dweight and dbias.
Limits:  as layer_norm_bwd's. No atomics. Products and sums are fused.
Config:  pick_config() below; not timed yet.
Source:  own work.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from . import _launch
from ._tile import load_tile, sum_of_rows

# Compilations for one combination of storage types and of optional arguments, all shapes: of long rows two, aligned and
# not, and the second launch.
MAX_COMPILATIONS = 3
SUM_BLOCK_M, SUM_BLOCK_N = 32, 64  # partial sums that a program of the second launch adds up at once


@dataclass(frozen=True)
class Config:
    """How dweight and dbias of long rows are summed.

    Attributes:
        block_m: rows that a program adds up at once.
        block_n: columns of a program, a power of two.
        num_warps: warps of one program.
        num_stages: 3 asks for the next rows and those after while these are added, by copies to shared memory.
        parts: how many programs share the rows of the same columns; each leaves one row of partial sums.
        max_registers: of a thread.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    parts: int
    max_registers: int


def pick_config(rows: int, features: int, aligned: bool, capability: tuple[int, int]) -> Config:
    """The launch for ``rows`` rows of ``features`` features on a GPU of this compute capability.

    A thread holds 16 elements of both sums in 128 registers of 4 warps, of which four programs fit on a multiprocessor:
    with two tiles each of dy and z asked for ahead these ask for 64 KB of 16-bit elements. As many programs as run at
    once, so that all of them end together.
    """
    block_m, block_n = 8, 256
    blocks = _launch.cdiv(features, block_n)
    programs = 4 * _launch.MULTIPROCESSORS.get(capability[0], 132)
    parts = max(1, min(programs // blocks, _launch.cdiv(rows, block_m)))
    ahead = 2 if _launch.small_shared(capability) else 3
    return Config(block_m, block_n, num_warps=4, num_stages=ahead if aligned else 1, parts=parts, max_registers=128)


_RUNTIME = (
    "dy_ptr",
    "z_ptr",
    "mean_ptr",
    "rstd_ptr",
    "dweight_ptr",
    "dbias_ptr",
    "M",
    "N",
    "dy_stride_m",
    "z_stride_m",
)


@triton.jit
def load_statistics(mean_ptr, rstd_ptr, offs_m, M, BLOCK_M: tl.constexpr):
    """(BLOCK_M,) each: mean, 0 for RMSNorm, and rstd; 0 where there are no rows."""
    mean = tl.zeros((BLOCK_M,), tl.float32)
    if mean_ptr is not None:
        mean = tl.load(mean_ptr + offs_m, mask=offs_m < M, other=0.0)
    return mean, tl.load(rstd_ptr + offs_m, mask=offs_m < M, other=0.0)


@triton.jit(do_not_specialize=_RUNTIME)
def layer_norm_bwd_columns_kernel(
    dy_ptr, z_ptr, mean_ptr, rstd_ptr, dweight_ptr, dbias_ptr, M: tl.int64, N: tl.int32, dy_stride_m: tl.int64,
    z_stride_m: tl.int64, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ALIGNED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Partial sums of BLOCK_N columns, grid (columns, parts); dweight_ptr and dbias_ptr are (parts, N)."""
    first = tl.program_id(0) * BLOCK_N
    dweight = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    dbias = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    groups, parts = tl.cdiv(M, BLOCK_M), tl.num_programs(1)
    for group in tl.range(tl.program_id(1), groups, parts, num_stages=STAGES):
        offs_m = (tl.zeros((BLOCK_M,), tl.int64) + group) * BLOCK_M + tl.arange(0, BLOCK_M)
        g = load_tile(dy_ptr, offs_m, first, M, N, dy_stride_m, BLOCK_M, BLOCK_N, ALIGNED)
        if dweight_ptr is not None:
            mean, rstd = load_statistics(mean_ptr, rstd_ptr, offs_m, M, BLOCK_M)
            z = load_tile(z_ptr, offs_m, first, M, N, z_stride_m, BLOCK_M, BLOCK_N, ALIGNED)
            dweight += g * rstd[:, None] * (z - mean[:, None])
        if dbias_ptr is not None:
            dbias += g
    offs_n = first + tl.arange(0, BLOCK_N)
    partial = tl.program_id(1).to(tl.int64) * N + offs_n
    if dweight_ptr is not None:
        tl.store(dweight_ptr + partial, sum_of_rows(dweight, BLOCK_M, BLOCK_N), mask=offs_n < N)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + partial, sum_of_rows(dbias, BLOCK_M, BLOCK_N), mask=offs_n < N)


@triton.jit(do_not_specialize=("dweight_ptr", "dbias_ptr", "dweight_sum_ptr", "dbias_sum_ptr", "P", "N"))
def layer_norm_bwd_sum_kernel(
    dweight_ptr, dbias_ptr, dweight_sum_ptr, dbias_sum_ptr, P: tl.int32, N: tl.int32,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Adds up (P, N) partial sums; one program = BLOCK_N columns. Grid axis 1: dweight, dbias."""
    if tl.program_id(1) == 0:
        if dweight_ptr is not None:
            sum_columns(dweight_ptr, dweight_sum_ptr, P, N, BLOCK_M, BLOCK_N)
    else:
        if dbias_ptr is not None:
            sum_columns(dbias_ptr, dbias_sum_ptr, P, N, BLOCK_M, BLOCK_N)


@triton.jit
def sum_columns(partial_ptr, sum_ptr, P, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """sum_ptr (N,) = partial_ptr (P, N) summed over its rows, for one program's columns."""
    first = tl.program_id(0) * BLOCK_N
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for p in range(0, P, BLOCK_M):
        offs_p = tl.zeros((BLOCK_M,), tl.int64) + p + tl.arange(0, BLOCK_M)
        total += load_tile(partial_ptr, offs_p, first, P, N, N, BLOCK_M, BLOCK_N, False)
    offs_n = first + tl.arange(0, BLOCK_N)
    tl.store(sum_ptr + offs_n, tl.sum(total, 0), mask=offs_n < N)


def launch_columns(
    config: Config, dy: Tensor, z: Tensor, mean: Tensor | None, rstd: Tensor, dweights: Tensor | None,
    dbiases: Tensor | None, aligned: bool,
) -> None:  # fmt: skip
    """Writes the partial sums (parts, N) of dweight and dbias, one of which may be None, from rows dy and z (M, N)."""
    M, N = z.shape
    _launch.launch(
        layer_norm_bwd_columns_kernel, (_launch.cdiv(N, config.block_n), config.parts),
        dy_ptr=dy, z_ptr=z, mean_ptr=mean, rstd_ptr=rstd, dweight_ptr=dweights, dbias_ptr=dbiases,
        M=M, N=N, dy_stride_m=dy.stride(0), z_stride_m=z.stride(0),
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, ALIGNED=aligned, STAGES=config.num_stages,
        num_warps=config.num_warps, enable_fp_fusion=True, maxnreg=config.max_registers,
    )  # fmt: skip


def launch_sum(
    dweights: Tensor | None, dbiases: Tensor | None, dweight: Tensor | None, dbias: Tensor | None, parts: int, N: int
) -> None:
    """dweight and dbias (N,), in their own types, of their partial sums (parts, N); of either all may be None."""
    _launch.launch(
        layer_norm_bwd_sum_kernel, (_launch.cdiv(N, SUM_BLOCK_N), 2),
        dweight_ptr=dweights, dbias_ptr=dbiases, dweight_sum_ptr=dweight, dbias_sum_ptr=dbias,
        P=parts, N=N, BLOCK_M=SUM_BLOCK_M, BLOCK_N=SUM_BLOCK_N, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
