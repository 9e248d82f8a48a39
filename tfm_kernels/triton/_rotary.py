"""rotary, Triton: the kernel of both directions, ROTARY.1 and ROTARY.2 of tfm_kernels/ops/rotary.py.

Owns:    one program = block_m rows of a sequence, a row being one head at one position. They are counted heads first,
         then positions, whatever the strides: neighbours turn by the same factors and find them in L1.
Traffic: reads x and writes y once; the factors of a position come once from L2 for each program that has a head of it.
         16 bytes a load and store where everything is aligned.
Limits:  B, H T and D below 2**30; float16, bfloat16, float32, factors of x's type or float32; computed in float32,
         products and sums rounded each. No float64. Any strides, nothing is copied.
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
from ._tile import inside, tile

LARGEST = 1 << 30  # numbers of rows and of features are int32, what lies between them in memory is int64
# How often the kernel is compiled at most for one combination of storage types, order of pairs and direction, whatever
# the shapes: once for each Config, with and without rows that start and end at multiples of 16 bytes.
MAX_COMPILATIONS = 8


@dataclass(frozen=True)
class Config:
    """How a call is launched.

    Attributes:
        block_m: rows of one program.
        block_n: features held at once, a power of two; less than D: the row is turned in pieces.
        num_warps: warps of one program.
    """

    block_m: int
    block_n: int
    num_warps: int


def pick_config(width: int, aligned: bool) -> Config:
    """The launch for heads of ``width`` features; how many rows there are, their type and the GPU do not change it.

    A thread holds 16 elements, the two loads of 16 bytes that a run of 8 pairs takes in 16 bits: with the registers
    of tests/aot/rotary.json some 800 threads of a multiprocessor ask for 25 KB at once. Rows that are not ``aligned``
    are read element by element, which takes registers: half as many.
    """
    block_n = min(256, max(32, _launch.next_power_of_2(width)))
    return Config(block_m=(2048 if aligned else 1024) // block_n, block_n=block_n, num_warps=4)


# Nothing but types and the constexprs may cause a compilation: see _tile.tile.
_RUNTIME = (
    "x_ptr", "y_ptr", "cos_ptr", "sin_ptr", "H", "T", "D", "R", "x_stride_b", "x_stride_h", "x_stride_t",
    "x_stride_d", "y_stride_b", "y_stride_h", "y_stride_t", "y_stride_d", "cos_stride_b", "cos_stride_t",
    "cos_stride_d", "sin_stride_b", "sin_stride_t", "sin_stride_d",
)  # fmt: skip


@triton.jit
def columns(ptr, offs_m, begin, offs_n, stride_d, ALIGNED: tl.constexpr):
    """Pointers to features begin + offs_n of rows at offs_m; ALIGNED promises that they lie side by side."""
    if ALIGNED:
        return tile(ptr + begin, offs_m, offs_n, True)
    return tile(ptr, offs_m, (begin + offs_n).to(tl.int64) * stride_d, False)


@triton.jit
def load_pairs(
    ptr, offs_m, mask_m, first, R, stride_d, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ALIGNED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """The two features of pairs first // 2 + 0, 1, ..., each (BLOCK_M, BLOCK_N // 2) float32."""
    if INTERLEAVED:
        offs_n = first + tl.arange(0, BLOCK_N)
        mask = mask_m[:, None] & inside(offs_n, R, ALIGNED)[None, :]
        both = tl.load(columns(ptr, offs_m, 0, offs_n, stride_d, ALIGNED), mask=mask, other=0.0).to(tl.float32)
        i, j = tl.split(both.reshape(BLOCK_M, BLOCK_N // 2, 2))
    else:
        offs_n = first // 2 + tl.arange(0, BLOCK_N // 2)
        mask = mask_m[:, None] & inside(offs_n, R // 2, ALIGNED)[None, :]
        i = tl.load(columns(ptr, offs_m, 0, offs_n, stride_d, ALIGNED), mask=mask, other=0.0).to(tl.float32)
        j = tl.load(columns(ptr, offs_m, R // 2, offs_n, stride_d, ALIGNED), mask=mask, other=0.0).to(tl.float32)
    return i, j


@triton.jit
def store_pairs(
    i, j, ptr, offs_m, mask_m, first, R, stride_d, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ALIGNED: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Writes what load_pairs() reads, rounded once to its type."""
    i = i.to(ptr.dtype.element_ty)
    j = j.to(ptr.dtype.element_ty)
    if INTERLEAVED:
        offs_n = first + tl.arange(0, BLOCK_N)
        mask = mask_m[:, None] & inside(offs_n, R, ALIGNED)[None, :]
        both = tl.join(i, j).reshape(BLOCK_M, BLOCK_N)
        tl.store(columns(ptr, offs_m, 0, offs_n, stride_d, ALIGNED), both, mask=mask)
    else:
        offs_n = first // 2 + tl.arange(0, BLOCK_N // 2)
        mask = mask_m[:, None] & inside(offs_n, R // 2, ALIGNED)[None, :]
        tl.store(columns(ptr, offs_m, 0, offs_n, stride_d, ALIGNED), i, mask=mask)
        tl.store(columns(ptr, offs_m, R // 2, offs_n, stride_d, ALIGNED), j, mask=mask)


@triton.jit(do_not_specialize=_RUNTIME)
def rotary_kernel(
    x_ptr, y_ptr, cos_ptr, sin_ptr, H: tl.int32, T: tl.int32, D: tl.int32, R: tl.int32,
    x_stride_b: tl.int64, x_stride_h: tl.int64, x_stride_t: tl.int64, x_stride_d: tl.int64,
    y_stride_b: tl.int64, y_stride_h: tl.int64, y_stride_t: tl.int64, y_stride_d: tl.int64,
    cos_stride_b: tl.int64, cos_stride_t: tl.int64, cos_stride_d: tl.int64,
    sin_stride_b: tl.int64, sin_stride_t: tl.int64, sin_stride_d: tl.int64,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ALIGNED: tl.constexpr, INTERLEAVED: tl.constexpr,
    BACK: tl.constexpr,
):  # fmt: skip
    """BLOCK_M of the H T rows of a sequence: the first R features turned, or turned BACK, the others copied."""
    tiles = tl.cdiv(H * T, BLOCK_M)
    b = (tl.program_id(0) // tiles).to(tl.int64)
    offs_m = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < H * T
    t = (offs_m // H).to(tl.int64)
    h = (offs_m % H).to(tl.int64)
    x_ptr += b * x_stride_b
    y_ptr += b * y_stride_b
    cos_ptr += b * cos_stride_b
    sin_ptr += b * sin_stride_b
    offs_x = h * x_stride_h + t * x_stride_t
    offs_y = h * y_stride_h + t * y_stride_t
    offs_cos = t * cos_stride_t
    offs_sin = t * sin_stride_t
    for first in range(0, R, BLOCK_N):
        xi, xj = load_pairs(x_ptr, offs_x, mask_m, first, R, x_stride_d, BLOCK_M, BLOCK_N, ALIGNED, INTERLEAVED)
        ci, cj = load_pairs(cos_ptr, offs_cos, mask_m, first, R, cos_stride_d, BLOCK_M, BLOCK_N, ALIGNED, INTERLEAVED)
        si, sj = load_pairs(sin_ptr, offs_sin, mask_m, first, R, sin_stride_d, BLOCK_M, BLOCK_N, ALIGNED, INTERLEAVED)
        if BACK:
            yi = xi * ci + xj * sj
            yj = xj * cj - xi * si
        else:
            yi = xi * ci - xj * si
            yj = xj * cj + xi * sj
        store_pairs(yi, yj, y_ptr, offs_y, mask_m, first, R, y_stride_d, BLOCK_M, BLOCK_N, ALIGNED, INTERLEAVED)
    if R < D:
        for first in range(0, D - R, BLOCK_N):
            offs_n = first + tl.arange(0, BLOCK_N)
            mask = mask_m[:, None] & inside(offs_n, D - R, ALIGNED)[None, :]
            kept = tl.load(columns(x_ptr, offs_x, R, offs_n, x_stride_d, ALIGNED), mask=mask, other=0.0)
            tl.store(columns(y_ptr, offs_y, R, offs_n, y_stride_d, ALIGNED), kept, mask=mask)


def turned(op: str, name: str, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool) -> Tensor:
    """``x`` (B, H, T, D) turned, or turned back, on behalf of the operator ``op``, which calls it ``name``."""
    _launch.check_device(op, x)
    if x.dim() != 4:
        raise ValueError(f"{op}: {name} must have shape (B, H, T, D), got {tuple(x.shape)}")
    B, H, T, D = x.shape
    R = cos.shape[-1] if cos.dim() else 0
    if cos.shape not in ((T, R), (1, T, R), (B, T, R)) or R % 2 or R > D:
        raise ValueError(f"{op}: cos must have shape ({T}, R), R even and at most {D}, got {tuple(cos.shape)}")
    factors = tuple(dict.fromkeys((x.dtype, torch.float32)))
    _launch.check(
        op, x, **{name: (x, x.shape, _launch.DTYPES)}, cos=(cos, cos.shape, factors),
        sin=(sin, cos.shape, (cos.dtype,)),
    )  # fmt: skip

    out = y = torch.empty_like(x)
    if y.numel() == 0:
        return out
    cos, sin = (t.expand(B, T, R) for t in (cos, sin))
    if T == 1:  # decoding: sequences lie beside each other as positions do
        x, y, cos, sin, B, T = *(t.transpose(0, -2) for t in (x, y, cos, sin)), T, B
    if max(B, H * T, D) >= LARGEST:
        raise ValueError(f"{op}: {name} must have B, H T and D below 2**30, got {tuple(out.shape)}")
    aligned = R % (8 if interleaved else 16) == 0 and _launch.aligned(D, x, y, cos, sin)
    config = pick_config(D, aligned)
    strides = {
        f"{tensor}_stride_{dim}": stride
        for tensor, dims, t in (("x", "bhtd", x), ("y", "bhtd", y), ("cos", "btd", cos), ("sin", "btd", sin))
        for dim, stride in zip(dims, t.stride(), strict=True)
    }
    with _launch.on(x):
        _launch.launch(
            rotary_kernel, (B * _launch.cdiv(H * T, config.block_m),),
            x_ptr=x, y_ptr=y, cos_ptr=cos, sin_ptr=sin, H=H, T=T, D=D, R=R, **strides,
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, ALIGNED=aligned, INTERLEAVED=interleaved, BACK=back,
            num_warps=config.num_warps, enable_fp_fusion=False,
        )  # fmt: skip
    return out
