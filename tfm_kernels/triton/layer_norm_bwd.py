"""layer_norm_bwd, Triton. Implements LN.4 to LN.6 of tfm_kernels/ops/layer_norm.py.

Owns:    one program = every programs-th group of block_m rows, and one row each of partial dweight and dbias, which a
         second launch adds up in a fixed order and rounds to the parameters' types. Rows of up to 8192 features (4096
         unaligned) stay in registers, and so do the partial sums; longer ones are walked twice (the second walk finds
         them in L2), and the partial sums lie in memory.
Traffic: reads dy, z (and dz), writes dx (and dresidual, which differs from dx only under dropout), M*N each;
         programs*N float32 twice for each of dweight and dbias.
Limits:  N <= 65536; float16, bfloat16, float32 in any mixture; sums float32. No float64, no atomics.
Config:  pick_config() below; not yet measured on a GPU.
Source:  own work.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import _launch
from ._tile import keep_tile, load_columns, load_row_numbers, load_tile, store_tile, sum_of_rows

MAX_FEATURES = 65536
# As in layer_norm_fwd: compilations for one combination of storage types and of optional arguments, all shapes:
# nine launches of aligned rows, eight of others, and the second launch.
MAX_COMPILATIONS = 18
MAX_REGISTERS = 128  # of aligned rows: two programs of 8 warps fit a multiprocessor, or one of 16
SUM_BLOCK_M, SUM_BLOCK_N = 32, 64  # partial sums that a program of the second launch adds up at once


@dataclass(frozen=True)
class Config:
    """How a call is launched.

    Attributes:
        block_m: rows that a program holds at once.
        block_n: features held at once, a power of two; less than N: the row is walked in pieces.
        num_warps: warps of one program.
        num_stages: 2 asks for the next rows while these are computed, by copies to shared memory.
        programs: how many programs share the rows; each leaves one row of partial sums.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs: int


def pick_config(rows: int, features: int, aligned: bool, capability: tuple[int, int]) -> Config:
    """The launch for ``rows`` rows of ``features`` features on a GPU of this compute capability.

    A program holds 2048 elements, 8 a thread, and as many partial sums: at most 128 registers a thread, so that two
    programs fit on a multiprocessor (tests/aot/layer_norm.json). Longer rows get 16 warps, one program to each. Rows
    that are not ``aligned`` are read element by element, which takes registers: half as many, not asked for ahead.
    """
    multiprocessors = _launch.MULTIPROCESSORS.get(capability[0], 132)
    if features > (8192 if aligned else 4096):
        config = Config(block_m=1, block_n=4096, num_warps=16, num_stages=1, programs=multiprocessors)
    elif features > 2048:
        block_n = triton.next_power_of_2(features)
        config = Config(block_m=1, block_n=block_n, num_warps=16, num_stages=2, programs=multiprocessors)
    else:
        block_n = max(64, triton.next_power_of_2(features))
        block_m = max(1, (2048 if aligned else 1024) // block_n)
        config = Config(block_m, block_n, num_warps=8, num_stages=2, programs=2 * multiprocessors)
    if not aligned:
        config = replace(config, num_stages=1)
    return replace(config, programs=max(1, min(config.programs, triton.cdiv(rows, config.block_m))))


_RUNTIME = (
    "dy_ptr", "dz_ptr", "z_ptr", "mean_ptr", "rstd_ptr", "weight_ptr", "dx_ptr", "dresidual_ptr", "dweight_ptr",
    "dbias_ptr", "seed_ptr", "rows_ptr", "M", "N", "dy_stride_m", "dz_stride_m", "z_stride_m", "divisor", "scale",
    "last_dropped",
)  # fmt: skip


@triton.jit
def load_statistics(mean_ptr, rstd_ptr, offs_m, M, BLOCK_M: tl.constexpr):
    """(BLOCK_M, 1) each: mean, 0 for RMSNorm, and rstd."""
    mean = tl.zeros((BLOCK_M,), tl.float32)
    if mean_ptr is not None:
        mean = tl.load(mean_ptr + offs_m, mask=offs_m < M, other=0.0)
    return mean[:, None], tl.load(rstd_ptr + offs_m, mask=offs_m < M, other=0.0)[:, None]


@triton.jit
def load_xhat(
    z_ptr, mean, rstd, offs_m, first, M, N, z_stride_m, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """(BLOCK_M, BLOCK_N) float32 of (z - mean) rstd; in columns that do not exist finite, or NaN as the row is.

    There it meets a g of 0; where mean rstd is inf, the product would be NaN. xhat itself is sqrt(N) at most.
    """
    z = load_tile(z_ptr, offs_m, first, M, N, z_stride_m, BLOCK_M, BLOCK_N, ALIGNED)
    xhat = tl.maximum((z - mean) * rstd, -65536.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(xhat, 65536.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def store_gradients(
    dz, dz_ptr, dx_ptr, dresidual_ptr, seed_ptr, rows_ptr, offs_m, first, M, N, dz_stride_m, scale, last_dropped,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """LN.4's last term and LN.6: adds the gradient of z itself, writes dresidual and dx."""
    if dz_ptr is not None:
        dz += load_tile(dz_ptr, offs_m, first, M, N, dz_stride_m, BLOCK_M, BLOCK_N, ALIGNED)
    if seed_ptr is not None:
        store_tile(dz, dresidual_ptr, offs_m, first, M, N, BLOCK_M, BLOCK_N, ALIGNED)
        row_numbers = load_row_numbers(rows_ptr, offs_m, M)
        keep = keep_tile(seed_ptr, row_numbers, first, last_dropped, BLOCK_M, BLOCK_N)
        dz = tl.where(keep, dz * scale, 0.0)
    store_tile(dz, dx_ptr, offs_m, first, M, N, BLOCK_M, BLOCK_N, ALIGNED)


@triton.jit(do_not_specialize=_RUNTIME)
def layer_norm_bwd_kernel(
    dy_ptr, dz_ptr, z_ptr, mean_ptr, rstd_ptr, weight_ptr, dx_ptr, dresidual_ptr, dweight_ptr, dbias_ptr, seed_ptr,
    rows_ptr, M: tl.int64, N: tl.int32, dy_stride_m: tl.int64, dz_stride_m: tl.int64, z_stride_m: tl.int64,
    divisor, scale, last_dropped, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ALIGNED: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Rows that stay in registers, N <= BLOCK_N; dweight_ptr and dbias_ptr are (programs, N)."""
    if weight_ptr is not None:
        weight = load_columns(weight_ptr, 0, N, BLOCK_N, ALIGNED)
    dweight = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    dbias = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for group in tl.range(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.num_programs(0), num_stages=STAGES):
        offs_m = (tl.zeros((BLOCK_M,), tl.int64) + group) * BLOCK_M + tl.arange(0, BLOCK_M)
        mean, rstd = load_statistics(mean_ptr, rstd_ptr, offs_m, M, BLOCK_M)
        g = load_tile(dy_ptr, offs_m, 0, M, N, dy_stride_m, BLOCK_M, BLOCK_N, ALIGNED)
        xhat = load_xhat(z_ptr, mean, rstd, offs_m, 0, M, N, z_stride_m, BLOCK_M, BLOCK_N, ALIGNED)
        if dweight_ptr is not None:
            dweight += g * xhat
        if dbias_ptr is not None:
            dbias += g
        if weight_ptr is not None:
            g *= weight
        along = tl.sum(g * xhat, 1) / divisor
        dz = g - xhat * along[:, None]
        if mean_ptr is not None:
            dz -= (tl.sum(g, 1) / N)[:, None]
        store_gradients(
            dz * rstd, dz_ptr, dx_ptr, dresidual_ptr, seed_ptr, rows_ptr, offs_m, 0, M, N, dz_stride_m, scale,
            last_dropped, BLOCK_M, BLOCK_N, ALIGNED,
        )  # fmt: skip
    offs_n = tl.arange(0, BLOCK_N)
    partial = tl.program_id(0).to(tl.int64) * N + offs_n
    if dweight_ptr is not None:
        tl.store(dweight_ptr + partial, sum_of_rows(dweight, BLOCK_M, BLOCK_N), mask=offs_n < N)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + partial, sum_of_rows(dbias, BLOCK_M, BLOCK_N), mask=offs_n < N)


@triton.jit(do_not_specialize=_RUNTIME)
def layer_norm_bwd_walk_kernel(
    dy_ptr, dz_ptr, z_ptr, mean_ptr, rstd_ptr, weight_ptr, dx_ptr, dresidual_ptr, dweight_ptr, dbias_ptr, seed_ptr,
    rows_ptr, M: tl.int64, N: tl.int32, dy_stride_m: tl.int64, dz_stride_m: tl.int64, z_stride_m: tl.int64,
    divisor, scale, last_dropped, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ALIGNED: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One row at a time, BLOCK_M = 1, in pieces of BLOCK_N < N; dweight_ptr and dbias_ptr are (programs, N) zeros."""
    offs_p = (tl.zeros((BLOCK_M,), tl.int64) + tl.program_id(0)) + tl.arange(0, BLOCK_M)
    programs = tl.num_programs(0)
    for group in range(tl.program_id(0), M, tl.num_programs(0)):
        offs_m = (tl.zeros((BLOCK_M,), tl.int64) + group) + tl.arange(0, BLOCK_M)
        mean, rstd = load_statistics(mean_ptr, rstd_ptr, offs_m, M, BLOCK_M)
        dots = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for first in range(0, N, BLOCK_N):
            g = load_tile(dy_ptr, offs_m, first, M, N, dy_stride_m, BLOCK_M, BLOCK_N, ALIGNED)
            xhat = load_xhat(z_ptr, mean, rstd, offs_m, first, M, N, z_stride_m, BLOCK_M, BLOCK_N, ALIGNED)
            if dweight_ptr is not None:
                before = load_tile(dweight_ptr, offs_p, first, programs, N, N, BLOCK_M, BLOCK_N, ALIGNED)
                store_tile(before + g * xhat, dweight_ptr, offs_p, first, programs, N, BLOCK_M, BLOCK_N, ALIGNED)
            if dbias_ptr is not None:
                before = load_tile(dbias_ptr, offs_p, first, programs, N, N, BLOCK_M, BLOCK_N, ALIGNED)
                store_tile(before + g, dbias_ptr, offs_p, first, programs, N, BLOCK_M, BLOCK_N, ALIGNED)
            if weight_ptr is not None:
                g *= load_columns(weight_ptr, first, N, BLOCK_N, ALIGNED)
            dots += g * xhat
            if mean_ptr is not None:
                sums += g
        along = (tl.sum(dots, 1) / divisor)[:, None]
        offset = (tl.sum(sums, 1) / N)[:, None]
        for first in range(0, N, BLOCK_N):
            g = load_tile(dy_ptr, offs_m, first, M, N, dy_stride_m, BLOCK_M, BLOCK_N, ALIGNED)
            xhat = load_xhat(z_ptr, mean, rstd, offs_m, first, M, N, z_stride_m, BLOCK_M, BLOCK_N, ALIGNED)
            if weight_ptr is not None:
                g *= load_columns(weight_ptr, first, N, BLOCK_N, ALIGNED)
            store_gradients(
                (g - xhat * along - offset) * rstd, dz_ptr, dx_ptr, dresidual_ptr, seed_ptr, rows_ptr, offs_m, first,
                M, N, dz_stride_m, scale, last_dropped, BLOCK_M, BLOCK_N, ALIGNED,
            )  # fmt: skip
        tl.debug_barrier()  # the partial sums may be read back by other threads than those that wrote them


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


def layer_norm_bwd(
    dy: Tensor, dz: Tensor | None, z: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None,
    rms: bool, unbiased: bool, dropout_p: float, seed: Tensor | None, dropout_rows: Tensor | None, need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The operator layer_norm_bwd_triton; its contract is tfm_kernels/ops/layer_norm.py's."""
    op = "layer_norm_bwd_triton"
    _launch.check_device(op, z)
    M, N = _launch.check_rows(op, "z", z, MAX_FEATURES)
    floating, single = _launch.DTYPES, (torch.float32,)
    _launch.check(
        op, z, z=(z, z.shape, floating), dy=(dy, z.shape, floating), dz=(dz, z.shape, floating),
        mean=(mean, (0,) if rms else (M,), single), rstd=(rstd, (M,), single), weight=(weight, (N,), floating),
        bias=(bias, (N,), floating), dropout_rows=(dropout_rows, (M,), (torch.int64,)), seed=(seed, (), (torch.int64,)),
    )  # fmt: skip
    scale, last_dropped = _launch.check_dropout(op, dropout_p, seed)

    dropped = dropout_p > 0.0
    dx = torch.empty(z.shape, dtype=z.dtype, device=z.device)
    dresidual = torch.empty(z.shape if dropped else (0,), dtype=z.dtype, device=z.device)
    dy2, z2, dz2 = _launch.rows(dy), _launch.rows(z), None if dz is None else _launch.rows(dz)
    weight = None if weight is None else weight.contiguous()
    aligned = _launch.aligned(N, dy2, z2, dz2, weight)
    config = pick_config(M, N, aligned, _launch.capability(z))
    # a walk adds to its partial sums; without rows there is nothing to launch
    new = torch.zeros if N > config.block_n or M == 0 else torch.empty
    dweights, dbiases = (
        new((config.programs, N if needed else 0), dtype=torch.float32, device=z.device)
        for needed in (need_weight, need_bias)
    )
    dtypes = [rstd.dtype if parameter is None else parameter.dtype for parameter in (weight, bias)]
    if M == 0:
        return dx, dresidual, dweights[0].to(dtypes[0]), dbiases[0].to(dtypes[1])

    kernel = layer_norm_bwd_kernel if N <= config.block_n else layer_norm_bwd_walk_kernel
    with _launch.on(z):
        kernel[(config.programs,)](
            dy_ptr=dy2, dz_ptr=dz2, z_ptr=z2, mean_ptr=None if rms else mean.contiguous(), rstd_ptr=rstd.contiguous(),
            weight_ptr=weight, dx_ptr=dx, dresidual_ptr=dresidual if dropped else None,
            dweight_ptr=dweights if need_weight else None, dbias_ptr=dbiases if need_bias else None,
            seed_ptr=seed if dropped else None,
            rows_ptr=dropout_rows.contiguous() if dropped and dropout_rows is not None else None,
            M=M, N=N, dy_stride_m=dy2.stride(0), dz_stride_m=0 if dz2 is None else dz2.stride(0),
            z_stride_m=z2.stride(0), divisor=float(N - 1 if unbiased else N), scale=scale, last_dropped=last_dropped,
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, ALIGNED=aligned,
            STAGES=config.num_stages, num_warps=config.num_warps, enable_fp_fusion=False,
            maxnreg=MAX_REGISTERS if aligned else None,
        )  # fmt: skip
        if config.programs == 1 and dtypes == [torch.float32] * 2:
            return dx, dresidual, dweights[0], dbiases[0]
        dweight, dbias = (
            torch.empty(partial.shape[1:], dtype=dtype, device=z.device)
            for partial, dtype in zip((dweights, dbiases), dtypes, strict=True)
        )
        if not (need_weight or need_bias):
            return dx, dresidual, dweight, dbias
        layer_norm_bwd_sum_kernel[(triton.cdiv(N, SUM_BLOCK_N), 2)](
            dweight_ptr=dweights if need_weight else None, dbias_ptr=dbiases if need_bias else None,
            dweight_sum_ptr=dweight if need_weight else None, dbias_sum_ptr=dbias if need_bias else None,
            P=config.programs, N=N, BLOCK_M=SUM_BLOCK_M, BLOCK_N=SUM_BLOCK_N, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return dx, dresidual, dweight, dbias
