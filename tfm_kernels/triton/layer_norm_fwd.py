"""layer_norm_fwd, Triton. Implements LN.1 to LN.3 of tfm_kernels/ops/layer_norm.py.

Owns:    one program = block_m rows. Rows of up to 16384 features (8192 unaligned) stay in registers while they are gone
         through twice, and once more where one is far from 0; longer ones are walked in pieces, where the second and
         third walk find them in L2.
Traffic: reads x (and residual), writes y (and z), M*N each; mean and rstd, M each. A sum that is not kept lies where y
         will, and the same thread stores both.
Limits:  N <= 65536; float16, bfloat16, float32 in any mixture; statistics float32. No float64. Products and sums are
         fused, but those of z: a select stands between a dropout's product and the residual.
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
from ._tile import inside, keep_tile, load_columns, load_row_numbers, load_tile, store_tile

MAX_FEATURES = 65536
FAR = tl.constexpr(256.0)  # standard deviations from 0, from where on the mean is corrected
# How often the kernels are compiled at most for one combination of storage types and of optional arguments, whatever
# the shapes: once for each Config, with and without rows that start and end at multiples of 16 bytes.
MAX_COMPILATIONS = 20


@dataclass(frozen=True)
class Config:
    """How a call is launched.

    Attributes:
        block_m: rows of one program.
        block_n: features held at once, a power of two; less than N: the row is walked in pieces.
        num_warps: warps of one program.
        max_registers: of a thread; None: what the compiler takes.
    """

    block_m: int
    block_n: int
    num_warps: int
    max_registers: int | None


def pick_config(features: int, aligned: bool, dtype: torch.dtype) -> Config:
    """The launch for rows of ``features`` features, stored as ``dtype``; their number and the GPU do not matter.

    A warp holds 1024 elements, 32 a thread: short rows need no sums across warps, and 24 programs of one warp, which
    fit by their registers (tests/aot/layer_norm.json), ask for 48 KB of 16-bit elements on each multiprocessor, 16 for
    64 KB of float32. Left to itself the compiler takes fewer registers of float32 and of rows that are not ``aligned``
    than these need.
    """
    if features > (16384 if aligned else 8192):  # 32768: a program of 32 warps has 64 registers a thread
        return Config(block_m=1, block_n=8192, num_warps=16, max_registers=128)
    block_n = max(64, _launch.next_power_of_2(features))
    limit = 128 if dtype == torch.float32 else None
    if not aligned:
        limit = 255 if block_n == 64 else 168
    return Config(max(1, 1024 // block_n), block_n, num_warps=max(1, block_n // 1024), max_registers=limit)


# Nothing but types, which arguments are None, and the constexprs may cause a compilation: see _tile.tile.
_RUNTIME = (
    "x_ptr", "residual_ptr", "weight_ptr", "bias_ptr", "y_ptr", "z_ptr", "mean_ptr", "rstd_ptr", "seed_ptr", "rows_ptr",
    "M", "N", "x_stride_m", "residual_stride_m", "eps", "eps_outside", "divisor", "scale", "last_dropped",
)  # fmt: skip


@triton.jit
def sum_tile(
    x_ptr, residual_ptr, z_ptr, seed_ptr, rows_ptr, offs_m, first, M, N, x_stride_m, residual_stride_m, scale,
    last_dropped, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """LN.1: a tile of z, (BLOCK_M, BLOCK_N) float32; rounded to its type, and written, where there is a residual."""
    z = load_tile(x_ptr, offs_m, first, M, N, x_stride_m, BLOCK_M, BLOCK_N, ALIGNED)
    if residual_ptr is not None:
        residual = load_tile(residual_ptr, offs_m, first, M, N, residual_stride_m, BLOCK_M, BLOCK_N, ALIGNED)
        if seed_ptr is not None:
            row_numbers = load_row_numbers(rows_ptr, offs_m, M)
            # where no registers are left (tests/aot/layer_norm.json)
            FRUGAL: tl.constexpr = not ALIGNED or BLOCK_N == 64
            keep = keep_tile(seed_ptr, row_numbers, first, last_dropped, BLOCK_M, BLOCK_N, FRUGAL)
            z = tl.where(keep, z * scale, 0.0)  # a dropped inf or NaN is dropped, not multiplied
        z = store_tile(z + residual, z_ptr, offs_m, first, M, N, BLOCK_M, BLOCK_N, ALIGNED).to(tl.float32)
    return z


@triton.jit
def centre(z, mean, first, N, BLOCK_N: tl.constexpr, ALIGNED: tl.constexpr):
    """z - mean, and 0 where there are no columns."""
    return tl.where(inside(first + tl.arange(0, BLOCK_N), N, ALIGNED)[None, :], z - mean[:, None], 0.0)


@triton.jit
def row_mean(total, mean_ptr, N, BLOCK_M: tl.constexpr):
    """The mean of each row but for what is left of it, which is found later; 0 for RMSNorm."""
    mean = tl.zeros((BLOCK_M,), tl.float32)
    if mean_ptr is not None:
        mean = tl.div_rn(tl.sum(total, 1), mean + N)
    return mean


@triton.jit
def settle(mean, left, mean_ptr, offs_m, M, N, BLOCK_M: tl.constexpr):
    """LN.2: (mean, what was missing) of each row, the mean written.

    The rounded mean of so many equal numbers is not that number: the mean of what is ``left`` of z - mean is added.
    """
    missing = tl.zeros((BLOCK_M,), tl.float32)
    if mean_ptr is not None:
        missing = tl.sum(left, 1) / N
        mean += missing
        tl.store(mean_ptr + offs_m, mean, mask=offs_m < M)
    return mean, missing


@triton.jit
def row_rstd(squares, rstd_ptr, offs_m, M, eps, eps_outside, divisor, BLOCK_M: tl.constexpr):
    """LN.2: 1 / (sqrt(variance + eps) + eps_outside) of each row, written; all steps rounded correctly, as no
    approximation is.
    """
    ones = tl.full((BLOCK_M,), 1.0, tl.float32)
    rstd = tl.div_rn(ones, tl.sqrt_rn(tl.div_rn(squares, ones * divisor) + eps) + eps_outside)
    tl.store(rstd_ptr + offs_m, rstd, mask=offs_m < M)
    return rstd


@triton.jit
def normalize_tile(
    centred, rstd, weight_ptr, bias_ptr, y_ptr, offs_m, first, M, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """LN.3: y of a tile of z - mean, written."""
    y = centred * rstd[:, None]
    if weight_ptr is not None:
        y *= load_columns(weight_ptr, first, N, BLOCK_N, ALIGNED)
    if bias_ptr is not None:
        y += load_columns(bias_ptr, first, N, BLOCK_N, ALIGNED)
    store_tile(y, y_ptr, offs_m, first, M, N, BLOCK_M, BLOCK_N, ALIGNED)


@triton.jit(do_not_specialize=_RUNTIME)
def layer_norm_fwd_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, z_ptr, mean_ptr, rstd_ptr, seed_ptr, rows_ptr,
    M: tl.int64, N: tl.int32, x_stride_m: tl.int64, residual_stride_m: tl.int64, eps, eps_outside, divisor, scale,
    last_dropped,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Rows that stay in registers, N <= BLOCK_N."""
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    z = sum_tile(
        x_ptr, residual_ptr, z_ptr, seed_ptr, rows_ptr, offs_m, 0, M, N, x_stride_m, residual_stride_m, scale,
        last_dropped, BLOCK_M, BLOCK_N, ALIGNED,
    )  # fmt: skip
    mean = row_mean(z, mean_ptr, N, BLOCK_M)
    centred = centre(z, mean, 0, N, BLOCK_N, ALIGNED)
    squares = tl.sum(centred * centred, 1)
    if mean_ptr is not None:
        # LN.2: numbers far from 0, nearly equal or equal: the rounded mean of a number is not that number, so what is
        # left of it is taken off
        far = FAR * FAR * squares < N * mean * mean
        if tl.max(far.to(tl.int32), 0) != 0:
            before = mean
            mean += tl.sum(centred, 1) / N
            centred = centre(centred + before[:, None], mean, 0, N, BLOCK_N, ALIGNED)
            squares = tl.sum(centred * centred, 1)
        tl.store(mean_ptr + offs_m, mean, mask=offs_m < M)
    rstd = row_rstd(squares, rstd_ptr, offs_m, M, eps, eps_outside, divisor, BLOCK_M)
    normalize_tile(centred, rstd, weight_ptr, bias_ptr, y_ptr, offs_m, 0, M, N, BLOCK_M, BLOCK_N, ALIGNED)


@triton.jit(do_not_specialize=_RUNTIME)
def layer_norm_fwd_walk_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, z_ptr, mean_ptr, rstd_ptr, seed_ptr, rows_ptr,
    M: tl.int64, N: tl.int32, x_stride_m: tl.int64, residual_stride_m: tl.int64, eps, eps_outside, divisor, scale,
    last_dropped,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Rows in pieces, BLOCK_N < N: one walk for the sum (and z), one for the squares, one for y."""
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if residual_ptr is not None or mean_ptr is not None:
        for first in range(0, N, BLOCK_N):
            total += sum_tile(
                x_ptr, residual_ptr, z_ptr, seed_ptr, rows_ptr, offs_m, first, M, N, x_stride_m, residual_stride_m,
                scale, last_dropped, BLOCK_M, BLOCK_N, ALIGNED,
            )  # fmt: skip
    mean = row_mean(total, mean_ptr, N, BLOCK_M)
    if residual_ptr is not None:
        tl.debug_barrier()  # other threads may read z back than those that wrote it
        x_ptr = z_ptr
        x_stride_m = N.to(tl.int64)
    left = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    squares = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, N, BLOCK_N):
        z = load_tile(x_ptr, offs_m, first, M, N, x_stride_m, BLOCK_M, BLOCK_N, ALIGNED)
        centred = centre(z, mean, first, N, BLOCK_N, ALIGNED)
        left += centred
        squares += centred * centred
    squares = tl.sum(squares, 1)
    mean, missing = settle(mean, left, mean_ptr, offs_m, M, N, BLOCK_M)
    squares -= N * missing * missing
    squares = tl.where(squares < 0.0, 0.0, squares)  # a maximum would drop NaN
    rstd = row_rstd(squares, rstd_ptr, offs_m, M, eps, eps_outside, divisor, BLOCK_M)
    for first in range(0, N, BLOCK_N):
        z = load_tile(x_ptr, offs_m, first, M, N, x_stride_m, BLOCK_M, BLOCK_N, ALIGNED)
        centred = z - mean[:, None]
        normalize_tile(centred, rstd, weight_ptr, bias_ptr, y_ptr, offs_m, first, M, N, BLOCK_M, BLOCK_N, ALIGNED)


def layer_norm_fwd(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, eps_outside: float,
    rms: bool, unbiased: bool, dropout_p: float, seed: Tensor | None, dropout_rows: Tensor | None,
    keep_sum: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The operator layer_norm_fwd_triton; its contract is tfm_kernels/ops/layer_norm.py's."""
    op = "layer_norm_fwd_triton"
    _launch.check_device(op, x)
    M, N = _launch.check_rows(op, "x", x, MAX_FEATURES)
    floating, vector = _launch.DTYPES, (N,)
    _launch.check(
        op, x, x=(x, x.shape, floating), residual=(residual, x.shape, floating), weight=(weight, vector, floating),
        bias=(bias, vector, floating), dropout_rows=(dropout_rows, (M,), (torch.int64,)),
        seed=(seed, (), (torch.int64,)),
    )  # fmt: skip
    scale, last_dropped = _launch.check_dropout(op, dropout_p, seed)

    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    z = torch.empty(x.shape if residual is not None and keep_sum else (0,), dtype=dtype, device=x.device)
    mean = torch.empty((0,) if rms else (M,), dtype=torch.float32, device=x.device)
    rstd = torch.empty((M,), dtype=torch.float32, device=x.device)
    if M == 0:
        return y, z, mean, rstd

    dropped = residual is not None and dropout_p > 0.0
    x2, residual2 = _launch.rows(x), None if residual is None else _launch.rows(residual)
    weight, bias = (None if p is None else p.contiguous() for p in (weight, bias))
    aligned = _launch.aligned(N, x2, residual2, weight, bias)
    config = pick_config(N, aligned, dtype)
    kernel = layer_norm_fwd_kernel if N <= config.block_n else layer_norm_fwd_walk_kernel
    with _launch.on(x):
        _launch.launch(
            kernel, (_launch.cdiv(M, config.block_m),),
            x_ptr=x2, residual_ptr=residual2, weight_ptr=weight, bias_ptr=bias,
            y_ptr=y, z_ptr=None if residual is None else z if keep_sum else y, mean_ptr=None if rms else mean,
            rstd_ptr=rstd,
            seed_ptr=seed if dropped else None,
            rows_ptr=dropout_rows.contiguous() if dropped and dropout_rows is not None else None,
            M=M, N=N, x_stride_m=x2.stride(0), residual_stride_m=0 if residual2 is None else residual2.stride(0),
            eps=eps, eps_outside=eps_outside, divisor=float(N - 1 if unbiased else N), scale=scale,
            last_dropped=last_dropped,
            BLOCK_M=config.block_m, BLOCK_N=config.block_n,
            ALIGNED=aligned, num_warps=config.num_warps, maxnreg=config.max_registers, enable_fp_fusion=True,
        )  # fmt: skip
    return y, z, mean, rstd
