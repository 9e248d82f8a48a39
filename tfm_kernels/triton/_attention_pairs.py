"""What the attention kernels share on the device about pairs of a query and a key: what hides them, bias, scores."""

from __future__ import annotations

import triton
import triton.language as tl

from ._tile import inside, near


@triton.jit
def rows_of(BLOCK_M: tl.constexpr, TRANSPOSED: tl.constexpr):
    """0, 1, ... along the queries of a tile (queries, keys), or (keys, queries) where TRANSPOSED."""
    offs_m = tl.arange(0, BLOCK_M)
    return offs_m[None, :] if TRANSPOSED else offs_m[:, None]


@triton.jit
def columns_of(BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr):
    """0, 1, ... along the keys of a tile."""
    offs_n = tl.arange(0, BLOCK_N)
    return offs_n[:, None] if TRANSPOSED else offs_n[None, :]


@triton.jit
def shown_pairs(rows, columns, m0, n0, live, low, high):
    """What band and length show of queries m0 + rows and keys n0 + columns, bool; rows and columns are small."""
    from_key = rows + near(low - (n0 - m0), 4096)
    to_key = tl.minimum(rows + near(high - (n0 - m0), 4096), near(live - n0, 4096) - 1)
    return (columns >= from_key) & (columns <= to_key)


@triton.jit
def visible_tile(m0, n0, live, low, high, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr):
    """What band and length show of a tile, bool."""
    return shown_pairs(rows_of(BLOCK_M, TRANSPOSED), columns_of(BLOCK_N, TRANSPOSED), m0, n0, live, low, high)


@triton.jit
def pair_tile(
    ptr, m0, n0, stride_t, stride_d,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ALIGNED: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Pointers to a tile of something per pair; ALIGNED promises unit stride along the keys, and rows that start at
    multiples of 16 bytes.
    """
    rows = rows_of(BLOCK_M, TRANSPOSED) * stride_t
    if ALIGNED:
        ptrs = ptr + m0 * stride_t + n0 + rows + columns_of(BLOCK_N, TRANSPOSED)
        return tl.multiple_of(ptrs, (16, 1) if TRANSPOSED else (1, 16))
    return ptr + m0 * stride_t + n0 * stride_d + rows + columns_of(BLOCK_N, TRANSPOSED) * stride_d


@triton.jit
def pair_mask(
    m0, n0, tq, tk, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ALIGNED: tl.constexpr, TRANSPOSED: tl.constexpr
):
    """Which pairs of a tile exist; ALIGNED promises that there are 8 keys or none in a row."""
    columns = inside(columns_of(BLOCK_N, TRANSPOSED), near(tk - n0, 4096), ALIGNED)
    return (rows_of(BLOCK_M, TRANSPOSED) < near(tq - m0, 4096)) & columns


@triton.jit
def load_blocks(
    ptr, m0, n0, tq, tk, stride_t, other, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr
):
    """load_pairs of ALIGNED pairs for loops whose loads Triton sends ahead.

    They wait in shared memory in the order in which they were loaded, and 8 rows of a tile are read at once: of a tile
    loaded row by row these lie in the same banks. So blocks of 8 x 8 pairs are loaded, one after another.
    """
    runs = tl.arange(0, BLOCK_M * BLOCK_N // 8)[:, None]  # of 8 keys: (BLOCK_M // 8, BLOCK_N // 8, 8 queries)
    rows = runs // BLOCK_N * 8 + runs % 8
    blocks = runs // 8 % (BLOCK_N // 8)
    mask = (rows < near(tq - m0, 4096)) & (blocks < near(tk - n0, 4096) // 8)
    ptrs = ptr + m0 * stride_t + n0 + rows * stride_t + (blocks * 8 + tl.arange(0, 8)[None, :])
    t = tl.load(tl.multiple_of(ptrs, (1, 16)), mask=mask, other=other)
    t = tl.reshape(t, (BLOCK_M // 8, BLOCK_N // 8, 8, 8))
    if TRANSPOSED:
        found = tl.reshape(tl.permute(t, (1, 3, 0, 2)), (BLOCK_N, BLOCK_M))
    else:
        found = tl.reshape(tl.permute(t, (0, 2, 1, 3)), (BLOCK_M, BLOCK_N))
    return found


@triton.jit
def load_pairs(
    ptr, m0, n0, tq, tk, stride_t, stride_d, other, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ALIGNED: tl.constexpr, TRANSPOSED: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """A tile of one head's bias or keep matrix; ``other``, what hides, where there is no pair.

    AHEAD says that it is loaded in a loop of more than one stage.
    """
    if ALIGNED and AHEAD:
        found = load_blocks(ptr, m0, n0, tq, tk, stride_t, other, BLOCK_M, BLOCK_N, TRANSPOSED)
    else:
        mask = pair_mask(m0, n0, tq, tk, BLOCK_M, BLOCK_N, ALIGNED, TRANSPOSED)
        ptrs = pair_tile(ptr, m0, n0, stride_t, stride_d, BLOCK_M, BLOCK_N, ALIGNED, TRANSPOSED)
        found = tl.load(ptrs, mask=mask, other=other)
    return found


@triton.jit
def kept_pairs(shown, keep, keep_stride_t, SHIELDED: tl.constexpr):
    """Those ``shown`` that keep shows too; SHIELDED hides its bits from Triton (_attention_call.py's shielded()).

    Both ways read keep: of what one way leaves as it was, Triton computes the softmax anew for each layout that the
    products ask for, and all that follows in layouts in which lanes of a warp do the same.
    """
    if SHIELDED:
        if keep_stride_t >= 0:  # as every stride is
            shown = shown & (keep != 0)
        else:
            shown = shown & (keep == 0)
    else:
        shown = shown & (keep != 0)
    return shown


@triton.jit
def score_tile(
    dots, bias_ptr, keep_ptr, m0, n0, tq, tk, live, low, high, bias_stride_t, bias_stride_d, keep_stride_t,
    keep_stride_d, scale, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAIRS_ALIGNED: tl.constexpr,
    MASKED: tl.constexpr, TRANSPOSED: tl.constexpr, SHIELDED: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """A.1 of a tile, float32: q k^T itself, or scale q k^T + bias; -inf where a pair is hidden."""
    x = dots
    if bias_ptr is not None:
        bias = load_pairs(
            bias_ptr, m0, n0, tq, tk, bias_stride_t, bias_stride_d, float("-inf"), BLOCK_M, BLOCK_N, PAIRS_ALIGNED,
            TRANSPOSED, AHEAD,
        ).to(tl.float32)  # fmt: skip
        # a finite bias is added in float32 units of the scores; log2(e) waits until the maximum is subtracted
        x = tl.fma(x, scale, bias)
        # -inf by way of x, else Triton may compare before it moves bias to where x lies, and move the answers as well
        x = tl.where(bias == tl.minimum(x, float("-inf")), float("-inf"), x)
    if MASKED:
        shown = visible_tile(m0, n0, live, low, high, BLOCK_M, BLOCK_N, TRANSPOSED)
        # rows that do not exist, and have no bias or keep, add 0 to a key, and not 0 times NaN to one that no row sees
        if TRANSPOSED and bias_ptr is None and keep_ptr is None:
            shown = shown & (rows_of(BLOCK_M, True) < near(tq - m0, 4096))
        if keep_ptr is not None:
            keep = load_pairs(
                keep_ptr, m0, n0, tq, tk, keep_stride_t, keep_stride_d, 0, BLOCK_M, BLOCK_N, PAIRS_ALIGNED, TRANSPOSED,
                AHEAD,
            )  # fmt: skip
            shown = kept_pairs(shown, keep, keep_stride_t, SHIELDED)
        x = tl.where(shown, x, float("-inf"))  # chosen, not multiplied: NaN in hidden keys ends here
    return x
