"""What the backward kernels of attention share on the device: a row's statistics, and A.3, A.6 and A.7 of a tile.

A weight is p = 2^min((x - top) step - shift, 0), with top and shift of each row from _attention_bwd_rows.py; or, unless
EXACT, 2^min(x step - offset, 0), which takes fewer registers and is as good but for rows far from 0, whose offset is
NaN. Tiles are (queries, keys), or (keys, queries) where TRANSPOSED.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._attention import kept_tile
from ._attention_pairs import score_tile
from ._tile import near

TOP, SHIFT, OFFSET, DELTA = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
NUMBERS = 8  # kept of each row; the rest is there for the length of a load


@triton.jit
def load_row_numbers(ptr, m0, end, BLOCK_M: tl.constexpr):
    """(BLOCK_M,) float32 of a number per row, from row m0; 0 from row ``end`` on."""
    offs_m = tl.arange(0, BLOCK_M)
    return tl.load(ptr + m0 + offs_m, mask=offs_m < near(end - m0, 4096), other=0.0)


@triton.jit
def load_statistics(ptr, m0, end, BLOCK_M: tl.constexpr, MASKED: tl.constexpr):
    """(BLOCK_M, 8) float32: what the backward knows of each row, in the order of TOP, ...; 0 from row ``end`` on.

    All numbers of a row at once, because a vector along the columns of a tile would be loaded by every thread.
    Rows that do not exist have queries, output gradients and delta of 0, so that their weights, being finite, add 0.
    """
    offs_m = tl.arange(0, BLOCK_M)
    ptrs = tl.multiple_of(ptr + m0.to(tl.int64) * 8 + offs_m[:, None] * 8 + tl.arange(0, 8)[None, :], (1, 8))
    if MASKED:
        return tl.load(ptrs, mask=(offs_m < near(end - m0, 4096))[:, None], other=0.0)
    return tl.load(ptrs)


@triton.jit
def statistic(statistics, NUMBER: tl.constexpr):
    """(BLOCK_M,) of one of the numbers of each row."""
    return tl.sum(tl.where(tl.arange(0, 8)[None, :] == NUMBER, statistics, 0.0), 1)


@triton.jit
def along_rows(row, TRANSPOSED: tl.constexpr):
    """A vector over a tile's queries, ready to be broadcast along its keys."""
    return row[None, :] if TRANSPOSED else row[:, None]


@triton.jit
def weight_of(power):
    """2^min(power, 0), NaN where it is."""
    return tl.exp2(tl.minimum(power, 0.0, propagate_nan=tl.PropagateNan.ALL))  # which without a word drops the NaN


@triton.jit
def at_least_0(p):
    """max(p, 0), NaN where p is."""
    return tl.maximum(p, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def gradient_tile(
    dots, products, top, shift, offset, delta, bias_ptr, keep_ptr, seed_ptr, first_row, m0, n0, tq, tk, live, low, high,
    bias_stride_t, bias_stride_d, keep_stride_t, keep_stride_d, scale, step, keep_scale, last_dropped,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAIRS_ALIGNED: tl.constexpr, MASKED: tl.constexpr,
    TRANSPOSED: tl.constexpr, EXACT: tl.constexpr, SHIELDED: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """(f p, dx, hidden) of a tile, from q k^T and dout v^T; 0, not a product with 0, where a pair is hidden."""
    x = score_tile(
        dots, bias_ptr, keep_ptr, m0, n0, tq, tk, live, low, high, bias_stride_t, bias_stride_d, keep_stride_t,
        keep_stride_d, scale, BLOCK_M, BLOCK_N, PAIRS_ALIGNED, MASKED, TRANSPOSED, SHIELDED, AHEAD,
    )  # fmt: skip
    if EXACT:
        power = tl.fma(x - along_rows(top, TRANSPOSED), step, -along_rows(shift, TRANSPOSED))
    else:
        power = tl.fma(x, step, -along_rows(offset, TRANSPOSED))
    p = weight_of(power)
    hidden = x == float("-inf")
    dropped = p
    if seed_ptr is not None:
        kept = kept_tile(seed_ptr, first_row, m0, n0, last_dropped, BLOCK_M, BLOCK_N, False)
        if TRANSPOSED:
            kept = tl.trans(kept)
        dropped = p * keep_scale
        if TRANSPOSED and (bias_ptr is not None or keep_ptr is not None):
            # -1 says that it is not: asked twice, Triton draws the numbers twice, for tiles of different layouts
            kept = tl.where(kept, dropped, -1.0) != -1.0
        dropped = tl.where(kept, dropped, 0.0)
        products = tl.where(kept, products * keep_scale, 0.0)
    dx = p * (products - along_rows(delta, TRANSPOSED))
    if MASKED or bias_ptr is not None:
        dropped = tl.where(hidden, 0.0, dropped)
        dx = tl.where(hidden, 0.0, dx)
    return dropped, dx, hidden
