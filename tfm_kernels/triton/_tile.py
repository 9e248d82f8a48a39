"""What the Triton kernels share on the device: pointers to a tile, and the random rule of tfm_kernels/dropout.py."""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def tile(ptr, row_offsets, offs_n, ALIGNED: tl.constexpr):
    """Pointers to (rows, columns); ALIGNED promises that each row's run starts at a multiple of 16 bytes.

    The promise is made here and not by Triton's own specialisation of arguments, which would compile once more for
    every pattern of aligned pointers and strides.
    """
    ptrs = ptr + row_offsets[:, None] + offs_n[None, :]
    if ALIGNED:
        ptrs = tl.multiple_of(ptrs, (1, 16))
    return ptrs


@triton.jit
def near(x, BOUND: tl.constexpr):
    """A scalar as int32, clamped to -BOUND..BOUND."""
    return tl.minimum(tl.maximum(x, -BOUND), BOUND).to(tl.int32)


@triton.jit
def power_of_e(t):
    """e^t, to |t| 2^-24 of itself, and 0 below 2^-126: half of tl.exp's instructions are for what is less."""
    return tl.exp2(t * 1.44269504088896340736)


@triton.jit
def unknown(t):
    """A float32 tile, of whose values the compiler knows nothing, such as zeros that a loop begins with.

    Where a loop may be left out, the compiler sets sums that begin as constants beside it. NVIDIA's assembler finds a
    warp group's products under way on one path, their registers set on another, and then waits for each of them.
    """
    if not INTERPRETED:
        t = tl.inline_asm_elementwise("mov.f32 $0, $1;", "=f,f", (t,), dtype=tl.float32, is_pure=False, pack=1)
    return t


@triton.jit
def anew(x):
    """A number of a program, below 2^31, as one that no compiler knows to be ``x``: all programs lie along one axis.

    What follows from it is computed where it is used, instead of being kept in registers since it was used before.
    """
    return (x.to(tl.int32) + (tl.num_programs(2) - 1)).to(x.dtype)


@triton.jit
def settled(ptr):
    """A scalar pointer, as one number: else the parts that it was added up from may each be kept in registers."""
    if not INTERPRETED:
        number = ptr.to(tl.int64)
        number = tl.inline_asm_elementwise("mov.b64 $0, $1;", "=l,l", (number,), tl.int64, is_pure=False, pack=1)
        ptr = number.to(ptr.dtype)
    return ptr


@triton.jit
def inside(offs_n, N, ALIGNED: tl.constexpr):
    """Which columns exist; ALIGNED promises that N is a multiple of 8, so that 8 neighbours share their answer.

    ALIGNED of 16 promises it of 16, as 16 bytes of int8 ask for.
    """
    if ALIGNED:
        RUN: tl.constexpr = 16 if ALIGNED == 16 else 8
        N = N // RUN * RUN
    return offs_n < N


@triton.jit
def load_tile(ptr, offs_m, first, M, N, stride_m, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ALIGNED: tl.constexpr):
    """(BLOCK_M, BLOCK_N) float32 of rows offs_m (int64) and columns first + 0, 1, ...; 0 where there are none."""
    offs_n = first + tl.arange(0, BLOCK_N)
    mask = (offs_m < M)[:, None] & inside(offs_n, N, ALIGNED)[None, :]
    return tl.load(tile(ptr, offs_m * stride_m, offs_n, ALIGNED), mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_columns(ptr, first, N, BLOCK_N: tl.constexpr, ALIGNED: tl.constexpr):
    """(1, BLOCK_N) float32 of a vector (N,), from column ``first``; 0 where there is none."""
    offs_n = (first + tl.arange(0, BLOCK_N))[None, :]
    ptrs = ptr + offs_n
    if ALIGNED:
        ptrs = tl.multiple_of(ptrs, (1, 16))
    return tl.load(ptrs, mask=inside(offs_n, N, ALIGNED), other=0.0).to(tl.float32)


@triton.jit
def store_tile(value, ptr, offs_m, first, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ALIGNED: tl.constexpr):
    """Writes a tile of a contiguous (M, N), rounded once to its type; returns what was written."""
    offs_n = first + tl.arange(0, BLOCK_N)
    mask = (offs_m < M)[:, None] & inside(offs_n, N, ALIGNED)[None, :]
    rounded = value.to(ptr.dtype.element_ty)
    tl.store(tile(ptr, offs_m * N, offs_n, ALIGNED), rounded, mask=mask)
    return rounded


@triton.jit
def store_strided(value, ptr, offs_m, first, M, N, stride_m, BLOCK_N: tl.constexpr, ALIGNED: tl.constexpr):
    """Writes a tile of (M, N) with rows ``stride_m`` apart (int64), rounded once to its type."""
    offs_n = first + tl.arange(0, BLOCK_N)
    mask = (offs_m < M)[:, None] & inside(offs_n, N, ALIGNED)[None, :]
    tl.store(tile(ptr, offs_m * stride_m, offs_n, ALIGNED), value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_row_numbers(rows_ptr, offs_m, M):
    """(BLOCK_M,) int64: the rows' numbers in the random rule."""
    row_numbers = offs_m
    if rows_ptr is not None:
        row_numbers = tl.load(rows_ptr + offs_m, mask=offs_m < M, other=0)
    return row_numbers


@triton.jit
def wide_product(factor: tl.constexpr, t):
    """(upper, lower) halves, uint32, of the product of a constant and a uint32 tensor, by one instruction."""
    if INTERPRETED:
        product = t.to(tl.uint64) * factor
        upper, lower = (product >> 32).to(tl.uint32), (product & 0xFFFFFFFF).to(tl.uint32)
    else:  # of a product of uint64 the compiler makes more than this
        upper, lower = tl.inline_asm_elementwise(
            "{ .reg .b64 product; mul.wide.u32 product, $2, $3; mov.b64 {$1, $0}, product; }", "=r,=r,r,n",
            (t, factor), dtype=(tl.uint32, tl.uint32), is_pure=True, pack=1,
        )  # fmt: skip
    return upper, lower


@triton.jit
def philox(seed, c0, c1, c2, c3):
    """Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011): four uint32 draws for each counter and an int64 seed.

    tl.philox takes two multiplications for a product, and fewer registers.
    """
    seed = seed.to(tl.uint64, bitcast=True)
    k0, k1 = (seed & 0xFFFFFFFF).to(tl.uint32), (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        upper0, lower0 = wide_product(0xD2511F53, c0)
        upper2, lower2 = wide_product(0xCD9E8D57, c2)
        c0, c1, c2, c3 = upper2 ^ c1 ^ k0, lower2, upper0 ^ c3 ^ k1, lower0
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def keep_blocks(seed_ptr, rows, blocks, last_dropped, FRUGAL: tl.constexpr = False):
    """(..., 2, 2) bool, True = kept, of four columns each, for row numbers (int64) and blocks, which are column / 4.

    Both broadcast to (...). ``last_dropped`` is ceil(p * 2**32) - 1 - 2**31, which is an int32 for every p > 0.
    FRUGAL: with as few registers as can be, by more instructions.
    """
    seed = tl.load(seed_ptr)
    c0 = (blocks + tl.zeros_like(rows).to(tl.int32)).to(tl.uint32)
    c1, c2, c3 = (rows & 0xFFFFFFFF).to(tl.uint32), ((rows >> 32) & 0xFFFFFFFF).to(tl.uint32), tl.zeros_like(c0)
    # (w0, w2) x (w1, w3) gives w0, w1, w2, w3 along the columns
    if FRUGAL:
        w0, w1, w2, w3 = tl.philox(seed, c0, c1, c2, c3, 10)
        draws = tl.join(tl.join(w0, w2), tl.join(w1, w3))
        keep = (draws ^ 0x80000000).to(tl.int32, bitcast=True) > last_dropped
    else:
        w0, w1, w2, w3 = philox(seed, c0, c1, c2, c3)
        draws = tl.join(tl.join(w0, w2), tl.join(w1, w3))
        keep = draws > (last_dropped ^ -0x80000000).to(tl.uint32, bitcast=True)
    return keep


@triton.jit
def keep_tile(
    seed_ptr, rows, first, last_dropped, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FRUGAL: tl.constexpr = False
):
    """(BLOCK_M, BLOCK_N) bool, True = kept, for row numbers ``rows`` (BLOCK_M,) int64 and columns first + 0, 1, ...

    ``first`` must be a multiple of 4; ``last_dropped`` and FRUGAL are keep_blocks()'s.
    """
    blocks = first // 4 + tl.arange(0, BLOCK_N // 4)
    return keep_blocks(seed_ptr, rows[:, None], blocks[None, :], last_dropped, FRUGAL).reshape(BLOCK_M, BLOCK_N)


@triton.jit
def rows_joined(t, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LARGEST: tl.constexpr):
    """(BLOCK_N,) sums, or the LARGEST, of the columns of a tile: half joined to half, until one row is left.

    tl.sum would send them through shared memory a column at a time, where up to 32 lanes of a warp meet in one bank;
    before a tile is split its layout changes, by words of different banks.
    """
    half: tl.constexpr = BLOCK_M // 2
    if BLOCK_M == 1:
        joined = tl.reshape(t, (BLOCK_N,))
    else:
        upper, lower = tl.split(tl.permute(tl.reshape(t, (2, half, BLOCK_N)), (1, 2, 0)))
        both = tl.maximum(upper, lower) if LARGEST else upper + lower
        joined = rows_joined(both, half, BLOCK_N, LARGEST)
    return joined


@triton.jit
def sum_of_rows(t, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(BLOCK_N,) sums of the columns of a tile."""
    return rows_joined(t, BLOCK_M, BLOCK_N, False)


@triton.jit
def max_of_rows(t, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(BLOCK_N,) of the largest of each column of a tile; drops NaN."""
    return rows_joined(t, BLOCK_M, BLOCK_N, True)
