"""layer_norm_bwd, Triton. Implements LN.4 to LN.6 of tfm_kernels/ops/layer_norm.py.

Owns:    one program = every programs-th group of block_m rows. Rows of up to 16384 features stay in registers (8192
         unaligned); those of half as many leave room there for partial sums of dweight and dbias, a row of each from
         each program, which a second launch adds up. Longer rows are walked twice (the second walk finds them in L2).
         Where sums have no room, a launch of their own reads dy and z once more (_layer_norm_sums.py).
Traffic: reads dy, z (and dz), writes dx (and dresidual, which differs from dx only under dropout), M*N each;
         programs*N float32 twice for each of dweight and dbias, or dy and z again.
Limits:  N <= 65536; float16, bfloat16, float32 in any mixture; sums float32. No float64, no atomics. Products
         and sums are fused.
Config:  pick_config() below; timed on an H200, but for rows of more than 8192 features.
Source:  own work.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import _launch, _layer_norm_sums
from ._layer_norm_sums import load_statistics
from ._tile import inside, keep_blocks, load_row_numbers, sum_of_rows

MAX_FEATURES = 65536
# As in layer_norm_fwd: compilations for one combination of storage types and of optional arguments, all shapes:
# ten launches of aligned rows, nine of others, and those that sum over rows.
MAX_COMPILATIONS = 19 + _layer_norm_sums.MAX_COMPILATIONS


@dataclass(frozen=True)
class Config:
    """How a call is launched.

    Attributes:
        block_m: rows that a program holds at once.
        block_n: features held at once, a power of two; less than N: the row is walked in pieces.
        num_warps: warps of one program.
        num_stages: 2 asks for the next rows, or pieces of one, while these are computed, by copies to shared memory; 3:
            for those after, too.
        programs: how many programs share the rows.
        max_registers: of a thread; None: what the compiler takes.
        holds_sums: whether each program leaves one row of partial sums, which it holds in registers.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs: int
    max_registers: int | None
    holds_sums: bool = True


def pick_config(rows: int, features: int, aligned: bool, capability: tuple[int, int]) -> Config:
    """The launch for ``rows`` rows of ``features`` features on a GPU of this compute capability.

    A thread holds 16 elements of a row, or fewer, and their partial sums: in 168 registers of 4 warps, of which three
    programs fit on a multiprocessor, or in 128 of 8 or 16 (tests/aot/layer_norm.json). Rows that are not ``aligned``
    are read element by element, which takes registers: half as many or fewer, not asked for ahead. Two rows ahead took
    0.67 to 0.89 of the time of one on an H200, for more shared memory.
    """
    room = 8192 if aligned else 4096  # features with their sums
    block_n = max(64, _launch.next_power_of_2(features))
    if features > 2 * room:
        block_n = 4096
    if features > room // 2:
        block_m, num_warps, each = 1, 16, 1
    elif not aligned:
        block_m, num_warps, each = max(1, 1024 // block_n), 8, 2
    elif features > 2048:
        block_m, num_warps, each = 1, 8, 2
    else:
        block_m, num_warps, each = 2048 // block_n, 4, 3
    programs = each * _launch.MULTIPROCESSORS.get(capability[0], 132)
    programs = max(1, min(programs, _launch.cdiv(rows, block_m)))
    limit = (168 if num_warps == 4 else 128) if aligned else None
    ahead = 3 if capability[0] == 9 else 2
    if room < features <= 2 * room:  # float32 rows and their dz are 192 KiB
        ahead = 2 if capability[0] in (9, 10) else 1
    return Config(block_m, block_n, num_warps, ahead if aligned else 1, programs, limit, features <= room)


_RUNTIME = (
    "dy_ptr", "dz_ptr", "z_ptr", "mean_ptr", "rstd_ptr", "weight_ptr", "dx_ptr", "dresidual_ptr", "seed_ptr",
    "rows_ptr", "M", "N", "dy_stride_m", "dz_stride_m", "z_stride_m", "eps_outside", "divisor", "scale", "last_dropped",
)  # fmt: skip


@triton.jit
def columns(first, PARTS: tl.constexpr, RUN: tl.constexpr):
    """(1, PARTS, RUN): first + 0, 1, ... A tile is (BLOCK_M, PARTS, RUN), so that warps are dealt to rows before parts
    and a thread's packs are of one row.
    """
    return first + (tl.arange(0, PARTS) * RUN)[None, :, None] + tl.arange(0, RUN)[None, None, :]


@triton.jit
def by_row(t):
    """(BLOCK_M, 1, 1) of (BLOCK_M,), by the way back that row_sums came."""
    return tl.expand_dims(tl.expand_dims(t, 1), 1)


@triton.jit
def place(ptr, offs_m, offs_n, M, N, stride_m, ALIGNED: tl.constexpr):
    """Pointers to a tile of rows offs_m (int64) and columns(), and which of it exists."""
    ptrs = ptr + by_row(offs_m * stride_m) + offs_n
    if ALIGNED:
        ptrs = tl.multiple_of(ptrs, (1, 1, 16))
    return ptrs, by_row(offs_m < M) & inside(offs_n, N, ALIGNED)


@triton.jit
def load(ptr, offs_m, offs_n, M, N, stride_m, ALIGNED: tl.constexpr):
    """A tile in float32; 0 where there are no rows or columns."""
    ptrs, mask = place(ptr, offs_m, offs_n, M, N, stride_m, ALIGNED)
    return tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store(value, ptr, offs_m, offs_n, M, N, ALIGNED: tl.constexpr):
    """Writes a tile of a contiguous (M, N), rounded once to its type."""
    ptrs, mask = place(ptr, offs_m, offs_n, M, N, N, ALIGNED)
    tl.store(ptrs, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def row_sums(t):
    """(BLOCK_M,) sums of a tile's rows, a thread's own parts first."""
    return tl.sum(tl.sum(t, 1), 1)


@triton.jit
def column_sums(t, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, RUN: tl.constexpr):
    """(PARTS * RUN,) sums of a tile's columns."""
    return sum_of_rows(t.reshape(BLOCK_M, PARTS * RUN), BLOCK_M, PARTS * RUN)


@triton.jit
def gradient(g, centred, rstd, dot, offset):
    """LN.4 but for dz, by two multiply-adds an element: ``dot`` is row_dots, ``offset`` the mean of g."""
    return g * by_row(rstd) - (centred * by_row(dot * rstd * rstd * rstd) + by_row(offset * rstd))


@triton.jit
def row_dots(dots, rstd, eps_outside, divisor):
    """(BLOCK_M,) of a tile of g (z - mean): its rows' means, times a of LN.4."""
    # the root's share of 1 / rstd, which is 1 / a; where it is no more than its rounding, the dots are nothing
    share = tl.maximum(1.0 - eps_outside * rstd, 2.0**-24)
    return row_sums(dots) / (divisor * share)


@triton.jit
def store_gradients(
    dz, dz_ptr, dx_ptr, dresidual_ptr, seed_ptr, rows_ptr, offs_m, first, M, N, dz_stride_m, scale, last_dropped,
    PARTS: tl.constexpr, BLOCK_M: tl.constexpr, RUN: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """LN.4's last term and LN.6: adds the gradient of z itself, writes dresidual and dx."""
    offs_n = columns(first, PARTS, RUN)
    if dz_ptr is not None:
        dz += load(dz_ptr, offs_m, offs_n, M, N, dz_stride_m, ALIGNED)
    if seed_ptr is not None:
        store(dz, dresidual_ptr, offs_m, offs_n, M, N, ALIGNED)
        row_numbers = by_row(load_row_numbers(rows_ptr, offs_m, M))
        # where no registers are left (tests/aot/layer_norm.json), or memory is waited for
        SIZE: tl.constexpr = PARTS * RUN
        FRUGAL: tl.constexpr = SIZE <= 512 or SIZE > 8192 or dx_ptr.dtype.element_ty != tl.bfloat16
        keep = keep_blocks(seed_ptr, row_numbers, columns(first // 4, PARTS, RUN // 4), last_dropped, FRUGAL)
        dz = tl.where(keep.reshape(BLOCK_M, PARTS, RUN), dz * scale, 0.0)
    store(dz, dx_ptr, offs_m, offs_n, M, N, ALIGNED)


@triton.jit(do_not_specialize=(*_RUNTIME, "dweight_ptr", "dbias_ptr"))
def layer_norm_bwd_kernel(
    dy_ptr, dz_ptr, z_ptr, mean_ptr, rstd_ptr, weight_ptr, dx_ptr, dresidual_ptr, dweight_ptr, dbias_ptr, seed_ptr,
    rows_ptr, M: tl.int64, N: tl.int32, dy_stride_m: tl.int64, dz_stride_m: tl.int64, z_stride_m: tl.int64,
    eps_outside, divisor, scale, last_dropped, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ALIGNED: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Rows that stay in registers, N <= BLOCK_N; dweight_ptr and dbias_ptr are (programs, N), or None.

    What columns that do not exist hold meets what others do in row_sums alone, where their g of 0 meets z - mean, which
    is finite as xhat need not be.
    """
    # packs of 16 bytes of a thread's 16 elements, where a part of a row has 128 bytes: all banks of shared memory
    PARTS: tl.constexpr = z_ptr.dtype.element_ty.primitive_bitwidth // (16 if BLOCK_N == 64 else 8) if ALIGNED else 1
    RUN: tl.constexpr = BLOCK_N // PARTS
    offs_n = columns(0, PARTS, RUN)
    if weight_ptr is not None:  # as a tile, which lies as the others do
        weight = load(weight_ptr, tl.zeros((BLOCK_M,), tl.int64), offs_n, 1, N, 0, ALIGNED)
    dweight = tl.zeros((BLOCK_M, PARTS, RUN), tl.float32)
    dbias = tl.zeros((BLOCK_M, PARTS, RUN), tl.float32)
    groups, programs = tl.cdiv(M, BLOCK_M), tl.num_programs(0)
    # what does not change from group to group stays in the loop, for its registers
    for group in tl.range(tl.program_id(0), groups, programs, num_stages=STAGES, disable_licm=True):
        offs_m = (tl.zeros((BLOCK_M,), tl.int64) + group) * BLOCK_M + tl.arange(0, BLOCK_M)
        mean, rstd = load_statistics(mean_ptr, rstd_ptr, offs_m, M, BLOCK_M)
        g = load(dy_ptr, offs_m, offs_n, M, N, dy_stride_m, ALIGNED)
        centred = load(z_ptr, offs_m, offs_n, M, N, z_stride_m, ALIGNED) - by_row(mean)
        if dweight_ptr is not None:
            dweight += g * by_row(rstd) * centred
        if dbias_ptr is not None:
            dbias += g
        if weight_ptr is not None:
            g *= weight
        dot = row_dots(g * centred, rstd, eps_outside, divisor)
        offset = tl.zeros((BLOCK_M,), tl.float32)
        if mean_ptr is not None:
            offset = row_sums(g) / N
        store_gradients(
            gradient(g, centred, rstd, dot, offset), dz_ptr, dx_ptr, dresidual_ptr, seed_ptr, rows_ptr, offs_m, 0, M, N,
            dz_stride_m, scale, last_dropped, PARTS, BLOCK_M, RUN, ALIGNED,
        )  # fmt: skip
    offs_n = tl.arange(0, BLOCK_N)
    partial = tl.program_id(0).to(tl.int64) * N + offs_n
    if dweight_ptr is not None:
        tl.store(dweight_ptr + partial, column_sums(dweight, PARTS, BLOCK_M, RUN), mask=offs_n < N)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + partial, column_sums(dbias, PARTS, BLOCK_M, RUN), mask=offs_n < N)


@triton.jit(do_not_specialize=_RUNTIME)
def layer_norm_bwd_walk_kernel(
    dy_ptr, dz_ptr, z_ptr, mean_ptr, rstd_ptr, weight_ptr, dx_ptr, dresidual_ptr, seed_ptr,
    rows_ptr, M: tl.int64, N: tl.int32, dy_stride_m: tl.int64, dz_stride_m: tl.int64, z_stride_m: tl.int64,
    eps_outside, divisor, scale, last_dropped, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ALIGNED: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One row at a time, BLOCK_M = 1, in pieces of BLOCK_N < N; their sums over rows are another launch's."""
    offs_0 = tl.zeros((BLOCK_M,), tl.int64)
    for group in range(tl.program_id(0), M, tl.num_programs(0)):
        offs_m = offs_0 + group
        mean, rstd = load_statistics(mean_ptr, rstd_ptr, offs_m, M, BLOCK_M)
        dots = tl.zeros((BLOCK_M, 1, BLOCK_N), tl.float32)
        sums = tl.zeros((BLOCK_M, 1, BLOCK_N), tl.float32)
        for first in tl.range(0, N, BLOCK_N, num_stages=STAGES):
            offs_n = columns(first, 1, BLOCK_N)
            g = load(dy_ptr, offs_m, offs_n, M, N, dy_stride_m, ALIGNED)
            centred = load(z_ptr, offs_m, offs_n, M, N, z_stride_m, ALIGNED) - by_row(mean)
            if weight_ptr is not None:
                g *= load(weight_ptr, offs_0, offs_n, 1, N, 0, ALIGNED)
            dots += g * centred
            if mean_ptr is not None:
                sums += g
        dot, offset = row_dots(dots, rstd, eps_outside, divisor), row_sums(sums) / N
        for first in tl.range(0, N, BLOCK_N, num_stages=STAGES):
            offs_n = columns(first, 1, BLOCK_N)
            g = load(dy_ptr, offs_m, offs_n, M, N, dy_stride_m, ALIGNED)
            centred = load(z_ptr, offs_m, offs_n, M, N, z_stride_m, ALIGNED) - by_row(mean)
            if weight_ptr is not None:
                g *= load(weight_ptr, offs_0, offs_n, 1, N, 0, ALIGNED)
            store_gradients(
                gradient(g, centred, rstd, dot, offset), dz_ptr, dx_ptr, dresidual_ptr, seed_ptr, rows_ptr, offs_m,
                first, M, N, dz_stride_m, scale, last_dropped, 1, BLOCK_M, BLOCK_N, ALIGNED,
            )  # fmt: skip


def layer_norm_bwd(
    dy: Tensor, dz: Tensor | None, z: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None,
    eps_outside: float, rms: bool, unbiased: bool, dropout_p: float, seed: Tensor | None, dropout_rows: Tensor | None,
    need_weight: bool, need_bias: bool,
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
    capability = _launch.capability(z)
    config = pick_config(M, N, aligned, capability)
    apart = None if config.holds_sums else _layer_norm_sums.pick_config(M, N, aligned, capability)
    parts = config.programs if apart is None else apart.parts
    new = torch.zeros if M == 0 else torch.empty  # without rows there is nothing to launch
    dweights, dbiases = (
        new((parts, N), dtype=torch.float32, device=z.device) if needed else None for needed in (need_weight, need_bias)
    )
    dtypes = [rstd.dtype if parameter is None else parameter.dtype for parameter in (weight, bias)]
    direct = M == 0 or (parts == 1 and dtypes == [torch.float32] * 2)
    dweight, dbias = (
        partial[0].to(dtype)
        if direct and partial is not None
        else torch.empty((0 if partial is None else N,), dtype=dtype, device=z.device)
        for partial, dtype in zip((dweights, dbiases), dtypes, strict=True)
    )
    if M == 0:
        return dx, dresidual, dweight, dbias

    mean_rows, rstd = None if rms else mean.contiguous(), rstd.contiguous()
    sums = (
        {"dweight_ptr": dweights, "dbias_ptr": dbiases} if apart is None else {"dweight_ptr": None, "dbias_ptr": None}
    )
    walks = N > config.block_n
    with _launch.on(z):
        _launch.launch(
            layer_norm_bwd_walk_kernel if walks else layer_norm_bwd_kernel, (config.programs,),
            dy_ptr=dy2, dz_ptr=dz2, z_ptr=z2, mean_ptr=mean_rows, rstd_ptr=rstd,
            weight_ptr=weight, dx_ptr=dx, dresidual_ptr=dresidual if dropped else None, **({} if walks else sums),
            seed_ptr=seed if dropped else None,
            rows_ptr=dropout_rows.contiguous() if dropped and dropout_rows is not None else None,
            M=M, N=N, dy_stride_m=dy2.stride(0), dz_stride_m=0 if dz2 is None else dz2.stride(0),
            z_stride_m=z2.stride(0), eps_outside=eps_outside, divisor=float(N - 1 if unbiased else N), scale=scale,
            last_dropped=last_dropped,
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, ALIGNED=aligned,
            STAGES=config.num_stages, num_warps=config.num_warps, enable_fp_fusion=True,
            maxnreg=config.max_registers,
        )  # fmt: skip
        if need_weight or need_bias:
            if apart is not None:
                _layer_norm_sums.launch_columns(apart, dy2, z2, mean_rows, rstd, dweights, dbiases, aligned)
            if not direct:
                _layer_norm_sums.launch_sum(
                    dweights, dbiases, dweight if need_weight else None, dbias if need_bias else None, parts, N
                )
    return dx, dresidual, dweight, dbias
