"""Which tiles of a keep matrix show anything: lists that the attention kernels walk, so that hidden tiles cost nothing.

For each row of tiles of each matrix a count, and the numbers of the tiles in rising order. Made anew in every call: one
read of the matrix, which is shared by all heads and sequences that the matrix is broadcast over.
"""

from __future__ import annotations

import triton.language as tl

from ._attention import band, kernel, keys_met, queries_met, sequence, start, tiles_met
from ._attention_pairs import load_pairs, visible_tile
from ._tile import near


@kernel
def keep_tiles_kernel(
    keep_ptr, lengths_ptr, counts_ptr, tiles_ptr, H: tl.int32, Tq: tl.int32, Tk: tl.int32, keep_stride_b: tl.int64,
    keep_stride_h: tl.int64, keep_stride_t: tl.int64, keep_stride_d: tl.int64, list_width: tl.int64,
    low: tl.int64, high: tl.int64, end_low: tl.int64, end_high: tl.int64,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, OF_KEYS: tl.constexpr, PAIRS_ALIGNED: tl.constexpr,
):  # fmt: skip
    """One program = one row of tiles: the tiles of keys of a tile of queries, or, OF_KEYS, the other way round.

    H counts the matrices of one sequence. A matrix that is the same for all queries is read in one row.
    """
    length = Tk if OF_KEYS else Tq
    tiles = (length + (BLOCK_N if OF_KEYS else BLOCK_M) - 1) // (BLOCK_N if OF_KEYS else BLOCK_M)
    row_tile = tl.program_id(0) % tiles
    b = (tl.program_id(0) // tiles // H).to(tl.int64)
    h = (tl.program_id(0) // tiles % H).to(tl.int64)
    _, _, tq, tk, live = sequence(b, Tq, Tk, list_width, list_width, lengths_ptr, None, None)
    low, high = band(tq, tk, low, high, end_low, end_high)
    keep_ptr += b * keep_stride_b + h * keep_stride_h
    if OF_KEYS:
        n0 = row_tile * BLOCK_N
        begin, end, full_begin, full_end = queries_met(n0, tq, live, low, high, BLOCK_N)
        first, _, _, last = tiles_met(begin, end, full_begin, full_end, BLOCK_M)
    else:
        m0 = row_tile * BLOCK_M
        begin, end, full_begin, full_end = keys_met(m0, tq, live, low, high, BLOCK_M)
        first, _, _, last = tiles_met(begin, end, full_begin, full_end, BLOCK_N)
    slot = tl.program_id(0).to(tl.int64)
    count = first * 0
    for t in range(first, last):
        if OF_KEYS:
            m0 = start(t, tq, BLOCK_M)
        else:
            n0 = start(t, tk, BLOCK_N)
        rows_end = tl.where(keep_stride_t == 0, tl.minimum(m0 + 1, tq), tq)
        keep = load_pairs(
            keep_ptr, m0, n0, rows_end, tk, keep_stride_t, keep_stride_d, 0, BLOCK_M, BLOCK_N, PAIRS_ALIGNED, False,
            False,
        )  # fmt: skip
        shown = visible_tile(m0, n0, live, low, high, BLOCK_M, BLOCK_N, False)
        # the one row that was read stands for all; what the band hides of it may be shown to others
        alike = tl.zeros((BLOCK_M, BLOCK_N), tl.int1) | (keep_stride_t == 0)
        alike = alike & (tl.arange(0, BLOCK_N) < near(live - n0, 4096))[None, :]
        found = tl.max(((keep != 0) & (shown | alike)).to(tl.int32))
        tl.store(tiles_ptr + slot * list_width + count, t, mask=found > 0)
        count += found
    tl.store(counts_ptr + slot, count)
