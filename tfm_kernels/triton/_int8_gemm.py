"""The product of rows with weights of 8 bits, for the Triton kernels of int8_linear and int8_ffn; not an op by itself.

Owns:    persistent programs: each takes every programs-th tile of y, turned: features are the product's rows, so that
         weights are widened in registers and a few rows of x are its short side. Where there are fewer tiles than
         multiprocessors, k is cut in parts, which another launch adds up in a fixed order. Sums are scaled at the end.
Traffic: reads the weights, a byte each, once for each block_m rows, and x once for each block_n features, mostly from
         L2; writes y once. 2 M N K operations.
Limits:  float16, bfloat16, float32, sums float32; of rows that were rounded (_int8.py) int32, exactly. float32 is IEEE
         unless torch allows TF32. No atomics.
Config:  pick_config() below; timed on an H200.
Source:  own work.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import _gemm, _launch
from ._gemm import Config, columns, place, product, up_to_8
from ._tile import load_columns, store_strided, store_tile, tile

FEW = 16  # rows of the smallest tile: their product takes what reading the weights takes
LEAST_K = 128  # a part of k is not shorter
JOIN_N = 512  # features of a program that adds up parts
# How often int8_gemm_kernel is compiled at most for one combination of storage type, precision, bias and dynamic,
# whatever the shapes: four launches of aligned factors for y whose rows are aligned or not, two of other factors for
# either y, and the two smallest of both that write parts. The kernel that adds these up: once for either y.
MAX_COMPILATIONS = 16
MAX_JOIN_COMPILATIONS = 2


def candidates(kind: str, aligned: bool, major: int) -> tuple[Config, ...]:
    """From the largest tile to the smallest, then that of few rows; ``programs`` is planned on one multiprocessor."""
    if kind == "ieee":  # no tensor cores: every thread multiplies, from registers
        few = Config(FEW, 64, 32, 4, 2, 2)
        # left alone, the compiler takes 128 registers for the middle one and spills
        found = Config(128, 128, 16, 8, 3, 1), Config(64, 64, 16, 4, 3, 2, 168), few
        return found if aligned else (few, few)
    block_k = 64 if major in (9, 10) else 32  # others have half of their shared memory
    if not aligned:  # read element by element
        return Config(64, 64, block_k, 8, 2, 1), Config(FEW, 64, block_k, 4, 2, 2)
    if kind == "int8" and major == 9:  # a byte each; elsewhere they are multiplied from registers
        block_k *= 2
    found = Config(128, 128, block_k, 8, 3, 1), Config(64, 64, block_k, 4, 3, 2), Config(FEW, 64, 128, 4, 4, 2)
    return (Config(256, 128, block_k, 8, 3, 1), *found) if kind in ("half", "int8") and major == 9 else found


def pick_config(M: int, N: int, K: int, kind: str, aligned: bool, capability: tuple[int, int]) -> Config:
    """The launch for y (M, N) on a GPU of this compute capability; ``kind`` as _gemm.precision() says, or "int8"."""
    return pick(candidates(kind, aligned, capability[0]), M, N, K, capability)


def pick(found: tuple[Config, ...], M: int, N: int, K: int, capability: tuple[int, int]) -> Config:
    """Of ``found``, in the order of candidates(), the largest tile that gives work to every multiprocessor.

    Where none does, the smallest, and parts of k.
    """
    *many, few = found
    multiprocessors = _launch.MULTIPROCESSORS.get(capability[0], 132)
    filling = (c for c in many if _gemm.tiles(M, N, c) >= multiprocessors)
    config = few if M <= FEW else next(filling, many[-1])
    count, most = _gemm.tiles(M, N, config), config.programs * multiprocessors
    splits = 1 if count >= multiprocessors else max(1, min(most // max(count, 1), K // LEAST_K))
    return replace(config, programs=max(1, min(most, count * splits)), splits=splits)


def cut(config: Config, K: int) -> tuple[int, int]:
    """How many parts k is cut in, and how many k each has, a multiple of block_k."""
    part = max(1, _launch.cdiv(_launch.cdiv(K, config.splits), config.block_k)) * config.block_k
    return max(1, _launch.cdiv(K, part)), part


@triton.jit
def scaled(
    sums, scale_ptr, step_ptr, bias_ptr, offs_m, first, M, N, BLOCK_N: tl.constexpr, ALIGNED: tl.constexpr
):  # fmt: skip
    """The sums of columns first + 0, 1, ... times their scales and the rows' steps, and the bias."""
    y = sums.to(tl.float32) * load_columns(scale_ptr, first, N, BLOCK_N, ALIGNED)
    if step_ptr is not None:
        y *= tl.load(step_ptr + offs_m, mask=offs_m < M, other=0.0)[:, None]
    if bias_ptr is not None:
        y += load_columns(bias_ptr, first, N, BLOCK_N, ALIGNED)
    return y


@triton.jit
def store_part(sums, parts_ptr, number, offs_m, first, M, N, BLOCK_N: tl.constexpr):
    """Writes a turned tile of part ``number`` (int64) of (parts, M, N up to a multiple of 8)."""
    width = up_to_8(N)
    store_strided(
        tl.trans(sums), parts_ptr + number * M * width, offs_m, first, M, width, width, BLOCK_N, True
    )  # fmt: skip


@triton.jit
def add_parts(parts_ptr, offs_m, first, M, N, splits, apart, BLOCK_N: tl.constexpr):
    """(1, BLOCK_N): ``splits`` parts, every ``apart``-th of all, added up from the first to the last."""
    width = up_to_8(N)
    offs_n = first + tl.arange(0, BLOCK_N)
    sums = tl.zeros((1, BLOCK_N), parts_ptr.dtype.element_ty)
    for split in range(splits):
        parts = parts_ptr + (tl.zeros((), tl.int64) + split) * apart * M * width
        sums += tl.load(tile(parts, offs_m * width, offs_n, True), mask=(offs_n < width)[None, :], other=0)
    return sums


@triton.jit
def finish(
    sums, scale_ptr, step_ptr, bias_ptr, y_ptr, offs_m, first, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Scales the sums of columns first + 0, 1, ..., adds the bias and writes y."""
    y = scaled(sums, scale_ptr, step_ptr, bias_ptr, offs_m, first, M, N, BLOCK_N, ALIGNED)
    store_tile(y, y_ptr, offs_m, first, M, N, BLOCK_M, BLOCK_N, ALIGNED)


_RUNTIME = (
    "x_ptr", "weight_ptr", "scale_ptr", "step_ptr", "bias_ptr", "y_ptr", "M", "N", "K", "part", "splits", "x_stride_m",
    "weight_stride_n",
)  # fmt: skip


@triton.jit(do_not_specialize=_RUNTIME)
def int8_gemm_kernel(
    x_ptr, weight_ptr, scale_ptr, step_ptr, bias_ptr, y_ptr, M: tl.int64, N: tl.int64, K: tl.int64, part: tl.int64,
    splits: tl.int32, x_stride_m: tl.int64, weight_stride_n: tl.int64, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, ALIGNED: tl.constexpr, Y_ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y_ptr (M, N); without scales (splits, M, N), rows up to a multiple of 8, the sums of parts of ``part`` k.

    x_ptr: rows of x, or the integers that were made of them; then step_ptr (M,) holds their steps.
    """
    SUM: tl.constexpr = tl.int32 if x_ptr.dtype.element_ty == tl.int8 else tl.float32
    tiles_m = tl.cdiv(M, BLOCK_M).to(tl.int32)
    tiles_n = tl.cdiv(N, BLOCK_N).to(tl.int32)
    for number in tl.range(tl.program_id(0), tiles_m * tiles_n * splits, tl.num_programs(0)):
        split = (number // (tiles_m * tiles_n)).to(tl.int64)
        m, n = place(number % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
        offs_m = m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        first = n.to(tl.int64) * BLOCK_N
        sums = tl.zeros((BLOCK_N, BLOCK_M), SUM)
        sums = product(
            sums, weight_ptr, x_ptr, first + tl.arange(0, BLOCK_N), offs_m, N, M, split * part,
            tl.minimum(split * part + part, K), weight_stride_n, x_stride_m, BLOCK_K, True, True, ALIGNED, PRECISION,
            STAGES,
        )  # fmt: skip
        if scale_ptr is None:
            store_part(sums, y_ptr, split, offs_m, first, M, N, BLOCK_N)
        else:
            PARTS: tl.constexpr = 4 if BLOCK_M >= 128 else 1
            ROWS: tl.constexpr = BLOCK_M // PARTS
            for few in tl.static_range(PARTS):
                finish(
                    tl.trans(columns(sums, few, PARTS, BLOCK_N, BLOCK_M)), scale_ptr, step_ptr, bias_ptr, y_ptr,
                    m.to(tl.int64) * BLOCK_M + few * ROWS + tl.arange(0, ROWS), first, M, N, ROWS, BLOCK_N, Y_ALIGNED,
                )  # fmt: skip


_JOIN_RUNTIME = ("parts_ptr", "scale_ptr", "step_ptr", "bias_ptr", "y_ptr", "M", "N", "splits")


@triton.jit(do_not_specialize=_JOIN_RUNTIME)
def int8_gemm_join_kernel(
    parts_ptr, scale_ptr, step_ptr, bias_ptr, y_ptr, M: tl.int64, N: tl.int64, splits: tl.int32,
    BLOCK_N: tl.constexpr, Y_ALIGNED: tl.constexpr,
):  # fmt: skip
    """y (M, N) of the sums that ``splits`` parts left, added up from the first to the last."""
    blocks = tl.cdiv(N, BLOCK_N)
    offs_m = tl.program_id(0).to(tl.int64) // blocks + tl.arange(0, 1)
    first = tl.program_id(0).to(tl.int64) % blocks * BLOCK_N
    sums = add_parts(parts_ptr, offs_m, first, M, N, splits, 1, BLOCK_N)
    finish(sums, scale_ptr, step_ptr, bias_ptr, y_ptr, offs_m, first, M, N, 1, BLOCK_N, Y_ALIGNED)


def multiply(factor: Tensor, weight: Tensor, K: int, y: Tensor, **ends: Tensor | None) -> None:
    """y from the rows of x, or the integers that were made of them, and the weights; ``ends`` is what scales sums."""
    M, N = y.shape
    kind = "int8" if factor.dtype == torch.int8 else _gemm.precision(factor.dtype)
    aligned, y_aligned = _launch.aligned(K, factor, weight), _launch.aligned(N, *ends.values())
    config = pick_config(M, N, K, kind, aligned, _launch.capability(y))
    splits, part = cut(config, K)
    sums = y
    if splits > 1:
        dtype = torch.int32 if kind == "int8" else torch.float32
        sums = torch.empty((splits, M, _launch.cdiv(N, 8) * 8), dtype=dtype, device=y.device)
    _launch.launch(
        int8_gemm_kernel, (config.programs,),
        x_ptr=factor, weight_ptr=weight, y_ptr=sums, M=M, N=N, K=K, part=part, splits=splits,
        x_stride_m=factor.stride(0), weight_stride_n=weight.stride(0), BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        BLOCK_K=config.block_k, GROUP_M=_gemm.GROUP_M, ALIGNED=16 if aligned else 0,
        Y_ALIGNED=y_aligned or splits > 1, PRECISION="tf32" if kind == "tf32" else "ieee", STAGES=config.num_stages,
        num_warps=config.num_warps, maxnreg=config.max_registers, enable_fp_fusion=False,
        **(ends if splits == 1 else dict.fromkeys(ends)),
    )  # fmt: skip
    if splits > 1:
        _launch.launch(
            int8_gemm_join_kernel, (M * _launch.cdiv(N, JOIN_N),),
            parts_ptr=sums, y_ptr=y, M=M, N=N, splits=splits, BLOCK_N=JOIN_N, Y_ALIGNED=y_aligned, num_warps=4,
            enable_fp_fusion=False, **ends,
        )  # fmt: skip
