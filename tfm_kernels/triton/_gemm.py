"""What the Triton kernels that multiply matrices share: the order of tiles, the sum over k, and the plain product.

C (M, N) = A B over k. A matrix whose neighbours in k lie side by side is "k inner": x (M, E) and w1 (F, E) in x w1^T;
else its neighbours in M or N do: dp (M, F) and x (M, E) in dp^T x. How many rows A has, the device alone may know, and
sums may go on from call to call, in float32.

Owns:    persistent programs: each takes every programs-th tile of block_m x block_n, whose sum stays in registers.
         Where there are few tiles and many k, k is cut in parts that are summed apart and added up in a fixed order.
Traffic: reads A tiles_n times and B tiles_m times, mostly from L2: group_m rows of tiles go together; writes C once.
         2 M N K FLOPs.
Limits:  float16, bfloat16, float32, sums float32, of IEEE float32 in two levels. float32 is IEEE unless torch allows
         TF32. No atomics.
Config:  pick_config() below; 16-bit launches are measured on an H200, float32 and other GPUs not yet.
Source:  own work; the grouped order of tiles as in Triton's tutorial 03.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import _launch
from ._sums import sum_rows
from ._tile import inside, load_columns, load_tile, store_tile, tile, unknown

# How often gemm_kernel is compiled at most for one combination of storage type, precision, optional arguments and what
# is k inner, whatever the shapes: three launches of aligned matrices and one of others; where k may be cut, two more
# that write parts.
MAX_COMPILATIONS = 6


@dataclass(frozen=True)
class Config:
    """How a product is launched.

    Attributes:
        block_m: rows of a tile.
        block_n: columns of a tile.
        block_k: summed at once.
        num_warps: warps of one program.
        num_stages: tiles of A and B in shared memory, those asked for ahead among them.
        programs: how many programs share the tiles.
        max_registers: of a thread, so that ``programs`` fit; None leaves it to the compiler.
        splits: parts of k that are summed apart.
        ahead: whether it is a launch of _gemm_ahead.py.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    programs: int
    max_registers: int | None = None
    splits: int = 1
    ahead: bool = False


GROUP_M = 8  # rows of tiles that go together: 8 x 8 tiles of 128 x 256 read 3 MB at K = 512, far less than an L2 holds
PART = tl.constexpr(32)  # columns() of this width at the end of a tile
LEAST_K = 512  # a part of k is not shorter: its partial sums cost 4 bytes an element, written and read

# Whether products that Gluon's kernels (_gemm_ahead.py and others) can do are done there, which no GPU has proven yet:
# `python -m bench.gpu --ahead` does that.
AHEAD = False


def precision(dtype: torch.dtype) -> str:
    """How the products of a storage type are formed: "half" (16 bits), "ieee" or, where torch allows it, "tf32"."""
    return _launch.float32_products() if dtype == torch.float32 else "half"


def candidates(kind: str, aligned: bool, major: int) -> tuple[Config, ...]:
    """From the largest tile to the smallest; ``programs`` is the number planned on one multiprocessor.

    On an H200, 128 x 128 in bfloat16 takes two programs of 4 warps 97 to 151 us where one of 8 takes 123 to 170 (8192 x
    4096 x 1024, 8192 x 1024 x 4096, a weight's gradient over 8192 rows); 128 x 256 takes a fifth less where it has
    work for all.
    """
    if kind == "ieee":  # no tensor cores: every thread multiplies, from registers, and holds a sum and a part of it
        if not aligned:
            return (Config(32, 32, 16, 4, 2, 2),)
        large = Config(128 if major in (9, 10) else 64, 128, 16, 8, 3, 1)  # on sm_80 128 x 128 spills
        return large, Config(64, 64, 16, 4, 2, 2)  # with 3 stages it spills
    block_k = 64 if kind == "half" and major in (9, 10) else 32  # others have half of their shared memory
    if (
        not aligned
    ):  # read element by element; left alone, the compiler takes 128 registers for TF32 on sm_80 and spills
        return (Config(64, 64, block_k, 8, 2, 1, 168 if kind == "tf32" and major not in (9, 10) else None),)
    small = Config(64, 64, block_k, 4, 3, 2)
    if kind == "half" and major == 9:
        return Config(128, 256, 64, 8, 3, 1), Config(128, 128, 64, 4, 3, 2), small
    return Config(128, 128, block_k, 8, 3, 1), small


def tiles(M: int, N: int, config: Config) -> int:
    """How many tiles C has."""
    return _launch.cdiv(M, config.block_m) * _launch.cdiv(N, config.block_n)


def fills(M: int, N: int, config: Config, multiprocessors: int) -> bool:
    """Whether tiles give work to nearly every multiprocessor.

    On an H200, 128 tiles of 128 x 256 for its 132 take 98 us, as long as twice as many of 128 x 128.
    """
    return 8 * tiles(M, N, config) >= 7 * multiprocessors


def pick(found: tuple[Config, ...], M: int, N: int, capability: tuple[int, int]) -> Config:
    """Of ``found``, the largest tile that fills() the GPU; ``programs`` as many as its multiprocessors hold."""
    multiprocessors = _launch.MULTIPROCESSORS.get(capability[0], 132)
    config = next((c for c in found if fills(M, N, c, multiprocessors)), found[-1])
    return replace(config, programs=max(1, min(config.programs * multiprocessors, tiles(M, N, config))))


def pick_config(M: int, N: int, kind: str, aligned: bool, capability: tuple[int, int]) -> Config:
    """The launch for C (M, N) on a GPU of this compute capability; ``kind`` as precision() says.

    Large tiles read least; a tile's registers and shared memory are planned for ``programs`` of candidates() on a
    multiprocessor (tests/aot/ffn.json).
    """
    return pick(candidates(kind, aligned, capability[0]), M, N, capability)


def pick_split(M: int, N: int, K: int, kind: str, aligned: bool, capability: tuple[int, int]) -> Config:
    """The launch where k is long and C may be small, as a weight's gradient: parts of k feed all multiprocessors."""
    found = candidates(kind, aligned, capability[0])
    multiprocessors = _launch.MULTIPROCESSORS.get(capability[0], 132)
    large = found[:-1] or found  # parts of k fill the GPU, not small tiles
    if K < 2 * LEAST_K or any(fills(M, N, c, multiprocessors) for c in large):
        return pick(found, M, N, capability)
    count, most = tiles(M, N, large[-1]), large[-1].programs * multiprocessors
    splits = max(1, min(most // max(count, 1), K // LEAST_K))
    return replace(large[-1], programs=max(1, min(most, count * splits)), splits=splits)


def pick_added(M: int, N: int, K: int, aligned: bool, dtype: torch.dtype, capability: tuple[int, int]) -> Config:
    """The launch of products that are all added to the same sums, whose k are ``K`` and of the last one fewer."""
    if AHEAD:
        from . import _gemm_ahead as ahead

        chosen = ahead.pick_config(M, N, K, True, aligned, dtype, capability)
        if chosen is not None:
            return chosen
    return pick_split(M, N, K, precision(dtype), aligned, capability)


@triton.jit
def place(number, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Row and column of a tile: GROUP_M rows go together, column by column, and find in L2 what they share."""
    first_m = number // (GROUP_M * tiles_n) * GROUP_M
    rows = tl.minimum(tiles_m - first_m, GROUP_M)
    within = number % (GROUP_M * tiles_n)
    return first_m + within % rows, within // rows


@triton.jit
def load_factor(
    ptr, offs, count, left, stride, BLOCK_K: tl.constexpr, K_INNER: tl.constexpr, ALIGNED: tl.constexpr
):  # fmt: skip
    """A tile of a matrix whose first k ``ptr`` points to, 0 beyond its edges: (offs, BLOCK_K), or its transpose.

    ``offs`` (int64) are its rows, or columns where it is not K_INNER, of ``count``; ``left`` is how many k there are.
    """
    offs_k = tl.arange(0, BLOCK_K)
    if K_INNER:
        mask = (offs < count)[:, None] & inside(offs_k, left, ALIGNED)[None, :]
        value = tl.load(tile(ptr, offs * stride, offs_k, ALIGNED), mask=mask, other=0.0)
    else:
        mask = (offs_k < left)[:, None] & inside(offs, count, ALIGNED)[None, :]
        value = tl.load(tile(ptr, offs_k.to(tl.int64) * stride, offs, ALIGNED), mask=mask, other=0.0)
    return value


@triton.jit
def up_to_8(size):
    """The next multiple of 8."""
    return (size + 7) // 8 * 8


@triton.jit
def widen(t, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """A tile of integers in a floating type that holds them exactly."""
    wide = t.to(dtype)
    if dtype == tl.float32 and PRECISION == "ieee":
        # On sm_100 triton 3.6.0 takes TF32 for products of what it sees to be narrow, on either side; behind a sum, if
        # only of one term, it does not see it.
        wide = tl.sum(wide[:, :, None], 2)
    return wide


@triton.jit
def add_product(acc, a, b, PRECISION: tl.constexpr):
    """acc + a b of two tiles."""
    if b.dtype == tl.float32 and PRECISION == "ieee":
        # In two levels: each tile's k are summed from zero, for the error grows with the length of a chain of sums. The
        # compiler would fold a plain + into the product again, as one chain; of this it makes a sum of its own.
        part = tl.dot(a, b, input_precision=PRECISION)
        total = tl.fma(part, tl.full(part.shape, 1.0, tl.float32), acc)
    else:
        total = tl.dot(a, b, acc, input_precision=PRECISION, out_dtype=acc.dtype)
    return total


@triton.jit
def product(
    acc, a_ptr, b_ptr, offs_m, offs_n, M, N, first, last, a_stride, b_stride, BLOCK_K: tl.constexpr,
    A_K_INNER: tl.constexpr, B_K_INNER: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr, A_PADDED: tl.constexpr = False,
):  # fmt: skip
    """acc (offs_m, offs_n) + the sum over k = first..last - 1; ``first`` is a multiple of BLOCK_K.

    A of another type than B is widened to it in registers. int8 by int8 is summed in int32.
    A_PADDED: rows of A end at a multiple of 8, with zeros, so that they are aligned where their length is not.
    """
    for k in tl.range(first, last, BLOCK_K, num_stages=STAGES):
        left = tl.minimum(last - k, BLOCK_K).to(tl.int32)
        at = tl.zeros((), tl.int64) + k
        left_a, end_a = left, M
        if A_PADDED:
            left_a, end_a = (up_to_8(left), M) if A_K_INNER else (left, up_to_8(M))
        a = load_factor(
            a_ptr + (at if A_K_INNER else at * a_stride), offs_m, end_a, left_a, a_stride, BLOCK_K, A_K_INNER, ALIGNED
        )
        b = load_factor(
            b_ptr + (at if B_K_INNER else at * b_stride), offs_n, N, left, b_stride, BLOCK_K, B_K_INNER, ALIGNED
        )
        a = a if A_K_INNER else tl.trans(a)
        if a.dtype != b.dtype:
            a = widen(a, b.dtype, PRECISION)
        b = tl.trans(b) if B_K_INNER else b
        acc = add_product(acc, a, b, PRECISION)
    return acc


@triton.jit
def columns(t, part: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Part 0, 1, ... of the columns of a tile; what ends a sum needs as many registers less as there are PARTS."""
    tl.static_assert(PARTS == 1 or PARTS == 2 or PARTS == 4 or PARTS == 8)
    value = t
    if PARTS > 1:
        left, right = tl.split(tl.permute(tl.reshape(t, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))
        value = left if part < PARTS // 2 else right
        if PARTS >= 4:
            left, right = tl.split(tl.permute(tl.reshape(value, (BLOCK_M, 2, BLOCK_N // 4)), (0, 2, 1)))
            value = left if part // (PARTS // 4) % 2 == 0 else right
        if PARTS == 8:
            left, right = tl.split(tl.permute(tl.reshape(value, (BLOCK_M, 2, BLOCK_N // 8)), (0, 2, 1)))
            value = left if part % 2 == 0 else right
    return value


@triton.jit
def add_tile(acc, c_ptr, offs_m, first, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ALIGNED: tl.constexpr):
    """Adds a tile to what a contiguous C (M, N) of float32 holds."""
    PARTS: tl.constexpr = 4 if BLOCK_N >= 128 else 1
    for part in tl.static_range(PARTS):
        at = first + part * (BLOCK_N // PARTS)
        more = columns(acc, part, PARTS, BLOCK_M, BLOCK_N)
        more += load_tile(c_ptr, offs_m, at, M, N, N, BLOCK_M, BLOCK_N // PARTS, ALIGNED)
        store_tile(more, c_ptr, offs_m, at, M, N, BLOCK_M, BLOCK_N // PARTS, ALIGNED)


_RUNTIME = (
    "a_ptr", "b_ptr", "a2_ptr", "b2_ptr", "bias_ptr", "c_ptr", "rows_ptr", "count_ptr", "M", "N", "K", "part", "splits",
    "a_stride", "b_stride", "a2_stride", "b2_stride",
)  # fmt: skip


@triton.jit(do_not_specialize=_RUNTIME)
def gemm_kernel(
    a_ptr, b_ptr, a2_ptr, b2_ptr, bias_ptr, c_ptr, rows_ptr, count_ptr, M: tl.int64, N: tl.int64, K: tl.int64,
    part: tl.int64, splits: tl.int32, a_stride: tl.int64, b_stride: tl.int64, a2_stride: tl.int64, b2_stride: tl.int64,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    A_K_INNER: tl.constexpr, B_K_INNER: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr, A_PADDED: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """C = A B [+ A2 B2] [+ bias], contiguous; (splits, M, N) float32 of parts of ``part`` k where splits > 1.

    count_ptr: A has so many rows. rows_ptr (M,): where each of them is in C. ADDS: C += A B instead.
    """
    live = M
    if count_ptr is not None:
        if A_K_INNER:
            live = tl.load(count_ptr)
        else:
            K = tl.load(count_ptr)
    tiles_m = tl.cdiv(live, BLOCK_M).to(tl.int32)
    tiles_n = tl.cdiv(N, BLOCK_N).to(tl.int32)
    for number in tl.range(tl.program_id(0), tiles_m * tiles_n * splits, tl.num_programs(0)):
        split = (number // (tiles_m * tiles_n)).to(tl.int64)
        m, n = place(number % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
        offs_m = m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        offs_n = n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if ADDS:
            acc = unknown(acc)
        acc = product(
            acc, a_ptr, b_ptr, offs_m, offs_n, live, N, split * part, tl.minimum(split * part + part, K), a_stride,
            b_stride, BLOCK_K, A_K_INNER, B_K_INNER, ALIGNED, PRECISION, STAGES, A_PADDED,
        )  # fmt: skip
        if a2_ptr is not None:
            acc = product(
                acc, a2_ptr, b2_ptr, offs_m, offs_n, M, N, split * 0, K, a2_stride, b2_stride, BLOCK_K, A_K_INNER,
                B_K_INNER, ALIGNED, PRECISION, STAGES,
            )  # fmt: skip
        if bias_ptr is not None:
            acc += load_columns(bias_ptr, n * BLOCK_N, N, BLOCK_N, ALIGNED)
        if rows_ptr is not None:
            offs_m = tl.load(rows_ptr + offs_m, mask=offs_m < live, other=M)
        if ADDS:
            add_tile(acc, c_ptr + split * M * N, offs_m, n * BLOCK_N, M, N, BLOCK_M, BLOCK_N, ALIGNED)
        else:
            store_tile(acc, c_ptr + split * M * N, offs_m, n * BLOCK_N, M, N, BLOCK_M, BLOCK_N, ALIGNED)


def parts(K: int, config: Config) -> tuple[int, int]:
    """(k of a part of the sum, how many parts there are)."""
    part = max(1, _launch.cdiv(_launch.cdiv(K, config.splits), config.block_k) * config.block_k)
    return part, max(1, _launch.cdiv(K, part))


def gemm(
    a: Tensor, b: Tensor, config: Config, kind: str, aligned: bool, *, a_k_inner: bool, b_k_inner: bool,
    bias: Tensor | None = None, a2: Tensor | None = None, b2: Tensor | None = None, padded: bool = False,
    count: Tensor | None = None, rows: Tensor | None = None, into: Tensor | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """C = A B [+ A2 B2] [+ bias], (M, N) in the type of ``a``, launched on the current device.

    Args:
        a: (M, K), or (K, M) where it is not ``a_k_inner``; unit stride along its last axis.
        b: (N, K), or (K, N) where it is not ``b_k_inner``; likewise.
        config: of pick_config() or, without bias and second product, of pick_split(); of pick_added() for ``into``.
        kind: of precision().
        aligned: whether all rows of all matrices, C's too, start and end at multiples of 16 bytes (_launch.aligned).
        bias: (N,).
        a2: as ``a``, with ``b2`` a second product that is added.
        b2: as ``b``.
        padded: whether rows of ``a`` go on with zeros up to a multiple of 8 elements; they may be ``aligned`` then.
        count: () int64, how many rows of ``a`` there are in truth, M or K of it; the others may hold anything.
        rows: (M,) int64, the row of C that each row of A B belongs to.
        into: float32 (config.splits, C's rows, N) that A B is added to and that is returned; its sum over the first
            axis is C. Without bias and second product, and where ``b`` is not ``b_k_inner``.
        out: (M, N) contiguous in the type of ``a``, where C is written; else it is a new tensor.
    """
    M, K = a.shape if a_k_inner else (a.shape[1], a.shape[0])
    N = b.shape[0] if b_k_inner else b.shape[1]
    kernel, own = gemm_kernel, {
        "rows_ptr": rows, "count_ptr": count, "ALIGNED": aligned, "PRECISION": "tf32" if kind == "tf32" else "ieee",
        "STAGES": config.num_stages, "A_PADDED": padded, "ADDS": into is not None, "maxnreg": config.max_registers,
    }  # fmt: skip
    if AHEAD and into is None and rows is None and (bias is None or b_k_inner):
        from . import _gemm_ahead as ahead  # Gluon, which is Triton's experiment: not for every import

        plain = bias is None and a2 is None
        config = ahead.pick_config(M, N, K, plain, aligned, a.dtype, _launch.capability(a)) or config
    if config.ahead:
        from . import _gemm_ahead as ahead

        kernel = ahead.gemm_ahead_kernel
        own = {"rows_ptr": rows, "count_ptr": count, "A_PADDED": padded, "ADDS": into is not None}
    part, splits = parts(K, config)
    shape, dtype = ((M, N), a.dtype) if splits == 1 else ((splits, M * N), torch.float32)
    if M == 0 or N == 0:
        return a.new_empty((M, N)) if into is None else into
    c = into if into is not None else out if splits == 1 else None
    if c is None:
        c = torch.empty(shape, dtype=dtype, device=a.device)
    _launch.launch(
        kernel, (config.programs,),
        a_ptr=a, b_ptr=b, a2_ptr=a2, b2_ptr=b2, bias_ptr=bias, c_ptr=c, M=M, N=N, K=K, part=part, splits=splits,
        a_stride=a.stride(0), b_stride=b.stride(0), a2_stride=0 if a2 is None else a2.stride(0),
        b2_stride=0 if b2 is None else b2.stride(0), BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        BLOCK_K=config.block_k, GROUP_M=GROUP_M, A_K_INNER=a_k_inner, B_K_INNER=b_k_inner, num_warps=config.num_warps,
        enable_fp_fusion=False, **own,
    )  # fmt: skip
    if splits == 1 or into is not None:
        return c
    return sum_rows(c, a.dtype, None if out is None else out.view(-1)).view(M, N)
