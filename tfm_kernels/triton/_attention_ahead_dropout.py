"""Dropout in Gluon's attention kernels (_tile.keep_blocks).

Scores: drawn where the four keys of a counter are one thread's. Transposed scores: read as a bit a pair where they were
drawn before, else drawn by two threads that exchange bits.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ._attention_ahead_pairs import first_of_four, four_joined, half_of_two, key_of, key_of_row
from ._tile import philox


@gluon.jit
def kept_weights(
    seed, bits_ptr, bits_stride, first_row, m0, n0, last_dropped, scores: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
):  # fmt: skip
    """(BLOCK_M, BLOCK_N) bool of dropout (_tile.keep_blocks), which go to a head's bits, too, if there are any."""
    alike = gl.zeros([BLOCK_M, BLOCK_N], gl.int32, scores)
    keys = gl.expand_dims(key_of(gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores))), 0)
    keys = first_of_four(alike + keys, BLOCK_M, BLOCK_N)
    queries = gl.expand_dims(gl.arange(0, BLOCK_M, gl.SliceLayout(1, scores)), 1)
    queries = first_of_four(alike + queries, BLOCK_M, BLOCK_N)
    rows = first_row + m0 + queries
    upper = ((rows >> 32) & 0xFFFFFFFF).to(gl.uint32)
    w0, w1, w2, w3 = philox(
        seed, (keys // 4 + n0 // 4).to(gl.uint32), (rows & 0xFFFFFFFF).to(gl.uint32), upper, upper * 0
    )  # fmt: skip
    least = (last_dropped ^ -0x80000000).to(gl.uint32, bitcast=True)
    kept0, kept1, kept2, kept3 = w0 > least, w1 > least, w2 > least, w3 > least
    if bits_ptr is not None:
        bits = gl.where(kept0, 1, 0) + gl.where(kept1, 2, 0) + gl.where(kept2, 4, 0) + gl.where(kept3, 8, 0)
        store_bits(bits_ptr, bits, queries, keys, m0, n0, bits_stride, BLOCK_M, BLOCK_N)
    return four_joined(kept0, kept1, kept2, kept3, scores, BLOCK_M, BLOCK_N)


@gluon.jit
def of_thread(t, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, SUM: gl.constexpr):
    """(BLOCK_M // 16, 8, 4) of first_of_four()'s tile: the sum, or the largest, of what a thread has."""
    t = gl.reshape(t, [BLOCK_M // 16, 2, 8, BLOCK_N // 16, 4])
    if SUM:
        found = gl.sum(gl.sum(t, 3), 1)
    else:
        found = gl.max(gl.max(t, 3), 1)
    return found


@gluon.jit
def store_bits(ptr, bits, queries, keys, m0, n0, stride, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Writes ``bits`` of four keys each to those of a head, from which load_bits() reads.

    A head has a run of 32 words of 32 bits for each 64 keys and 16 queries, ``stride`` runs for each 64 keys. The
    word 4g + t of a run is that of queries g and g + 8 and of keys 4t..4t + 3 of each 16: the first 32 keys have its
    lower half, a query 8 bits of a half. Every thread of a warp group writes one word of a tile.
    """
    places = queries % 16 // 8 * 8 + keys % 32 // 16 * 4
    offsets = queries // 16 * 32 + (queries % 8 * 4 + keys % 16 // 4)
    offsets = of_thread(offsets, BLOCK_M, BLOCK_N, False)
    ptr += (n0 // 64).to(gl.int64) * (stride * 32) + m0 * 2
    if BLOCK_N == 64:
        words = of_thread(bits << (places + keys // 32 * 16), BLOCK_M, BLOCK_N, True)
        gl.store(ptr + offsets, words)
    else:
        words = of_thread(bits << places, BLOCK_M, BLOCK_N, True)
        halves = ptr.to(gl.pointer_type(gl.int16), bitcast=True) + n0 // 32 % 2
        gl.store(halves + offsets * 2, words.to(gl.int16))


@gluon.jit
def load_bits(ptr, m0, n0, stride, scores: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """(BLOCK_N // 2, BLOCK_M // 16, 8) int32 of a head's bits (store_bits): bits 0 and 1 say whether the two keys of a
    pair, in key_of_row()'s order, are kept for one of the first 8 of 16 queries, bits 8 and 9 for one of the others.
    """
    alike = gl.zeros([BLOCK_N, BLOCK_M], gl.int32, scores)
    rows = gl.expand_dims(gl.arange(0, BLOCK_N, gl.SliceLayout(1, scores)), 1)
    queries = gl.expand_dims(gl.arange(0, BLOCK_M, gl.SliceLayout(0, scores)), 0)
    keys = half_of_two(alike + key_of_row(rows), BLOCK_N, BLOCK_M)  # of a tile that begins at a multiple of 64
    queries = half_of_two(alike + queries, BLOCK_N, BLOCK_M)
    offsets = keys // 64 * (stride * 32) + (queries // 16 * 32 + queries % 8 * 4 + keys % 16 // 4)
    ptr += (n0 // 64).to(gl.int64) * (stride * 32) + m0 * 2
    return gl.load(ptr + offsets) >> (keys % 64 // 32 * 16 + keys % 32 // 16 * 4 + keys % 4)


@gluon.jit
def kept_of_bits(bits, scores: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """(BLOCK_N, BLOCK_M) bool of load_bits()."""
    t0 = gl.join((bits & 1) != 0, (bits & 256) != 0)
    t1 = gl.join((bits & 2) != 0, (bits & 512) != 0)
    t = gl.permute(gl.join(t0, t1), [0, 4, 1, 3, 2])  # pair, key, 16 queries, 8, 1
    t = gl.permute(gl.reshape(t, [BLOCK_N // 16, 8, 2, BLOCK_M]), [0, 2, 1, 3])
    return gl.convert_layout(gl.reshape(t, [BLOCK_N, BLOCK_M]), scores, assert_trivial=True)


@gluon.jit
def kept_transposed(
    seed, first_row, m0, n0, last_dropped, scores: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr
):
    """(BLOCK_N // 2, 4) int32 each: dropout (_tile.keep_blocks) of a tile of transposed scores, keys in key_of_row()'s
    order, of the first and of the second 8 queries of each 16; kept_of_words() makes a tile of them.

    Two threads hold the four keys of a counter: each draws for half of their queries, and they exchange the answers.
    """
    alike = gl.zeros([BLOCK_N, BLOCK_M], gl.int32, scores)
    rows = gl.expand_dims(gl.arange(0, BLOCK_N, gl.SliceLayout(1, scores)), 1)
    columns = gl.expand_dims(gl.arange(0, BLOCK_M, gl.SliceLayout(0, scores)), 0)
    pairs = half_of_two(alike + (rows // 16 * 8 + rows % 8), BLOCK_N, BLOCK_M)  # of keys
    columns = half_of_two(alike + columns, BLOCK_N, BLOCK_M)
    queries = first_row + m0 + (columns + pairs % 2 * 8)
    upper = ((queries >> 32) & 0xFFFFFFFF).to(gl.uint32)
    blocks = (pairs // 2 + n0 // 4).to(gl.uint32)
    w0, w1, w2, w3 = philox(seed, blocks, (queries & 0xFFFFFFFF).to(gl.uint32), upper, upper * 0)
    least = (last_dropped ^ -0x80000000).to(gl.uint32, bitcast=True)
    own = gl.where(w0 > least, 1, 0) + gl.where(w1 > least, 2, 0)
    own = own + gl.where(w2 > least, 4, 0) + gl.where(w3 > least, 8, 0)
    own = own << (columns // 16 * 8 + columns % 2 * 4)
    own = gl.sum(gl.sum(gl.reshape(own, [BLOCK_N // 2, BLOCK_M // 16, 4, 2]), 3), 1)
    other = gl.inline_asm_elementwise(
        "shfl.sync.bfly.b32 $0, $1, 4, 31, -1;", "=r,r", [own], gl.int32, is_pure=False, pack=1
    )  # of the pair beside this one, which is odd where this one is even, for the other queries
    odd = gl.max(gl.max(gl.reshape(pairs % 2, [BLOCK_N // 2, BLOCK_M // 16, 4, 2]), 3), 1)
    first = gl.where(odd == 0, own, other) >> (odd * 2)
    second = gl.where(odd == 0, other, own) >> (odd * 2)
    return first, second


@gluon.jit
def kept_of_words(first, second, scores: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """(BLOCK_N, BLOCK_M) bool of kept_transposed()."""
    alike = gl.zeros([BLOCK_N, BLOCK_M], gl.int32, scores)
    columns = gl.expand_dims(gl.arange(0, BLOCK_M, gl.SliceLayout(0, scores)), 0)
    columns = half_of_two(alike + columns, BLOCK_N, BLOCK_M)
    ones = gl.reshape(1 << (columns // 16 * 8 + columns % 2 * 4), [BLOCK_N // 2, BLOCK_M // 16, 4, 2])
    first = gl.expand_dims(gl.expand_dims(first, 1), 3)
    second = gl.expand_dims(gl.expand_dims(second, 1), 3)
    t0 = gl.join((first & ones) != 0, (second & ones) != 0)
    t1 = gl.join((first & (ones << 1)) != 0, (second & (ones << 1)) != 0)
    t = gl.permute(gl.join(t0, t1), [0, 5, 1, 4, 2, 3])  # pair, key, 16 queries, 8, 2, 1
    t = gl.reshape(t, [BLOCK_N // 16, 8, 2, BLOCK_M])
    t = gl.reshape(gl.permute(t, [0, 2, 1, 3]), [BLOCK_N, BLOCK_M])
    return gl.convert_layout(t, scores, assert_trivial=True)


@gluon.jit
def drawn_of(
    seed_ptr, bits_ptr, bits_stride, first_row, m0, n0, last_dropped, scores: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
):  # fmt: skip
    """What dropout says of a tile of transposed scores, for kept_of(): read where it was written, else drawn."""
    drawn = 0
    more_drawn = 0
    if bits_ptr is not None:
        drawn = load_bits(bits_ptr, m0, n0, bits_stride, scores, BLOCK_M, BLOCK_N)
    elif seed_ptr is not None:
        drawn, more_drawn = kept_transposed(
            gl.load(seed_ptr), first_row, m0, n0, last_dropped, scores, BLOCK_M, BLOCK_N
        )
    return drawn, more_drawn


@gluon.jit
def kept_of(drawn, more_drawn, bits_ptr, scores: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """(BLOCK_N, BLOCK_M) bool of drawn_of(), keys in key_of_row()'s order."""
    if bits_ptr is not None:
        kept = kept_of_bits(drawn, scores, BLOCK_M, BLOCK_N)
    else:
        kept = kept_of_words(drawn, more_drawn, scores, BLOCK_M, BLOCK_N)
    return kept
