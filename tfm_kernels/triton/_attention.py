"""What the attention kernels share on the device: sequences, which tiles meet, rows of heads, the softmax of a tile.

Row i of a tile of queries is m0 + i, column j of a tile of keys n0 + j; both within their sequence. Positions are
int32, which sequences shorter than 2**30 never leave; offsets in memory are int64.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from ._tile import inside, keep_tile, near, tile


def kernel(function: Callable[..., Any]) -> Any:
    """triton.jit, told that nothing but types, which arguments are None, and the constexprs may cause a compilation."""
    runtime = [
        name for name, given in inspect.signature(function).parameters.items() if given.annotation != "tl.constexpr"
    ]
    return triton.jit(do_not_specialize=runtime)(function)


@triton.jit
def sequence(b, Tq, Tk, total_q, total_k, lengths_ptr, cu_q_ptr, cu_k_ptr):
    """(first query, first key) int64, (queries, keys, live keys) int32 of sequence b.

    What is loaded is clamped: no length can make a kernel read outside of its tensors.
    """
    q0 = total_q * 0
    k0 = total_k * 0
    tq = Tq
    tk = Tk
    if cu_q_ptr is not None:
        q0 = tl.minimum(tl.maximum(tl.load(cu_q_ptr + b).to(tl.int64), 0), total_q)
        k0 = tl.minimum(tl.maximum(tl.load(cu_k_ptr + b).to(tl.int64), 0), total_k)
        tq = tl.minimum(tl.load(cu_q_ptr + b + 1).to(tl.int64), total_q) - q0
        tk = tl.minimum(tl.load(cu_k_ptr + b + 1).to(tl.int64), total_k) - k0
        tq = tl.minimum(tl.maximum(tq, 0), Tq).to(tl.int32)
        tk = tl.minimum(tl.maximum(tk, 0), Tk).to(tl.int32)
    live = tk
    if lengths_ptr is not None:
        live = tl.minimum(tl.maximum(tl.load(lengths_ptr + b).to(tl.int64), 0), tk).to(tl.int32)
    return q0, k0, tq, tk, live


@triton.jit
def band(tq, tk, low, high, end_low, end_high):
    """Both bands as one, low <= j - i <= high from the top-left corner, int32."""
    low = tl.maximum(low, end_low + (tk - tq))
    high = tl.minimum(high, end_high + (tk - tq))
    return near(low, 1 << 30), near(high, 1 << 30)


@triton.jit
def tiles_met(begin, end, full_begin, full_end, BLOCK: tl.constexpr):
    """(first, full_first, full_last, last): tiles of BLOCK positions that meet begin..end - 1, and those of them
    that lie in full_begin..full_end - 1.
    """
    first = begin // BLOCK
    last = tl.maximum((end + BLOCK - 1) // BLOCK, first)
    last = tl.where(end > begin, last, first)
    full_first = tl.minimum(tl.maximum((full_begin + BLOCK - 1) // BLOCK, first), last)
    full_last = tl.minimum(tl.maximum(tl.maximum(full_end, 0) // BLOCK, full_first), last)
    return first, full_first, full_last, last


@triton.jit
def edges_first(c, full_first, full_last, last, WHOLE: tl.constexpr):
    """The tile at place c of first..last - 1, where those come first that lie outside of full_first..full_last - 1.

    WHOLE promises that it is one of these.
    """
    whole = full_last - full_first
    t = c + tl.where(c >= full_first, whole, 0)
    if not WHOLE:
        t = tl.where(c < last - whole, t, c - (last - full_last))
    return t


@triton.jit
def start(t, length, BLOCK: tl.constexpr):
    """The first position of tile t, of the type of ``length``; interpreted, a loop's t is a plain int."""
    return length * 0 + t * BLOCK


@triton.jit
def keys_met(m0, tq, live, low, high, BLOCK_M: tl.constexpr):
    """(begin, end, full_begin, full_end): the keys that some row of a tile of queries sees, and those that all see."""
    m1 = tl.minimum(m0 + BLOCK_M, tq)
    begin = tl.maximum(m0 + low, 0)
    end = tl.minimum(live, m1 + high)
    return begin, end, tl.maximum(m1 - 1 + low, 0), tl.minimum(live, m0 + high + 1)


@triton.jit
def queries_met(n0, tq, live, low, high, BLOCK_N: tl.constexpr):
    """(begin, end, full_begin, full_end): the queries that see some key of a tile, and those that see them all."""
    n1 = tl.minimum(n0 + BLOCK_N, live)
    begin = tl.maximum(n0 - high, 0)
    end = tl.where(n1 > n0, tl.minimum(tq, n1 - low), 0)
    return begin, end, tl.maximum(n1 - 1 - high, 0), tl.minimum(tq, n0 - low + 1)


@triton.jit
def load_rows(
    ptr, first, begin, end, stride_t, D,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """(BLOCK_T, BLOCK_D) of rows first + 0, 1, ... of one head; 0 beyond D, and outside begin..end - 1 if MASKED.

    Rows start and end at multiples of 16 bytes: the host has seen to that.
    """
    offs_t = tl.arange(0, BLOCK_T)
    offs_d = tl.arange(0, BLOCK_D)
    mask = inside(offs_d, D, True)[None, :]
    if MASKED:
        rows = (offs_t >= near(begin - first, 4096)) & (offs_t < near(end - first, 4096))
        mask = rows[:, None] & mask
    return tl.load(tile(ptr + first * stride_t, offs_t * stride_t, offs_d, True), mask=mask, other=0.0)


@triton.jit
def load_at(ptr, offsets, chosen, D, BLOCK_D: tl.constexpr):
    """(rows, BLOCK_D) as load_rows, of the rows that begin at ``offsets``; 0 in those that are not ``chosen``."""
    offs_d = tl.arange(0, BLOCK_D)
    mask = chosen[:, None] & inside(offs_d, D, True)[None, :]
    return tl.load(tile(ptr, offsets, offs_d, True), mask=mask, other=0.0)


@triton.jit
def load_chosen_rows(ptr, first, chosen, end, stride_t, D, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    """(BLOCK_T, BLOCK_D) as load_rows; 0 in rows that are not ``chosen`` (BLOCK_T,) bool."""
    offs_t = tl.arange(0, BLOCK_T)
    rows = chosen & (offs_t < near(end - first, 4096))
    return load_at(ptr + first * stride_t, offs_t * stride_t, rows, D, BLOCK_D)


@triton.jit
def dots(
    a, a_ptr, a_first, a_begin, a_end, a_stride_t, b, b_ptr, b_first, b_begin, b_end, b_stride_t, D,
    BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(BLOCK_A, BLOCK_B) float32: the dot products of the rows of two heads.

    ``a`` and ``b`` are their tiles if CHUNK is 0. Else they count for nothing, and the rows are read again, CHUNK
    elements at once: without matrix units each thread would hold the whole rows in registers.
    """
    if CHUNK == 0:
        found = tl.dot(a, tl.trans(b), input_precision=PRECISION)
    else:
        found = tl.zeros((BLOCK_A, BLOCK_B), tl.float32)
        for d in range(0, D, CHUNK):
            left = load_rows(a_ptr + d, a_first, a_begin, a_end, a_stride_t, D - d, BLOCK_A, CHUNK, True)
            right = load_rows(b_ptr + d, b_first, b_begin, b_end, b_stride_t, D - d, BLOCK_B, CHUNK, True)
            found = tl.dot(left, tl.trans(right), found, input_precision=PRECISION)
    return found


@triton.jit
def store_rows(
    value, ptr, first, end, stride_t, D, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, ALIGNED: tl.constexpr
):
    """Writes rows first + 0, 1, ... < end of one head, rounded once to its type."""
    offs_t = tl.arange(0, BLOCK_T)
    store_at(value, ptr + first * stride_t, offs_t * stride_t, offs_t < near(end - first, 4096), D, BLOCK_D, ALIGNED)


@triton.jit
def store_at(value, ptr, offsets, chosen, D, BLOCK_D: tl.constexpr, ALIGNED: tl.constexpr):
    """Writes the ``chosen`` rows to where they begin, ``offsets``, rounded once to ptr's type."""
    offs_d = tl.arange(0, BLOCK_D)
    mask = chosen[:, None] & inside(offs_d, D, ALIGNED)[None, :]
    tl.store(tile(ptr, offsets, offs_d, ALIGNED), value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def weigh(x, sums, tops, step, SEEN: tl.constexpr):
    """(p, sums, tops, decay): A.3 of a tile of scores but for the division, and what earlier sums are multiplied by.

    SEEN promises that every row has a score that is not -inf, here or before.
    """
    most = tl.maximum(tops, tl.max(x, 1))
    shift = most
    if not SEEN:
        shift = tl.where(most == float("-inf"), 0.0, most)
    # the difference comes first, so that large scores lose nothing
    p = tl.exp2((x - shift[:, None]) * step)
    decay = tl.exp2((tops - shift) * step)
    return p, sums * decay + tl.sum(p, 1), most, decay


@triton.jit
def finish(acc, sums, tops, unit, keep_scale):
    """(out, lse) of rows: A.4 and A.2; 0 and -inf where a row saw nothing."""
    sees = sums != 0.0
    out = tl.where(sees[:, None], acc * (keep_scale / tl.where(sees, sums, 1.0))[:, None], 0.0)
    return out, tl.where(sees, tops * unit + tl.log(tl.where(sees, sums, 1.0)), float("-inf"))


@triton.jit
def kept_tile(
    seed_ptr, first_row, m0, n0, last_dropped, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FRUGAL: tl.constexpr
):
    """(BLOCK_M, BLOCK_N) bool of dropout; ``first_row`` is the number of the head's row 0 in the random rule."""
    rows = first_row + m0 + tl.arange(0, BLOCK_M)
    return keep_tile(seed_ptr, rows, n0, last_dropped, BLOCK_M, BLOCK_N, FRUGAL)


@triton.jit
def is_finite(x):
    """Whether all of a tile is: the sum of its zeros is 0, and NaN where one is none."""
    return tl.sum(x * 0.0) == 0.0
