"""What _attention_fwd_ahead.py does to pairs of a query and a key: their order in registers, bias, masks, dropout.

A thread of a warp group holds columns 2t, 2t + 1, 2t + 8 and 2t + 9 of each 16 of a tile of scores. Keys and values lie
in shared memory in such an order (``key_of``) that these are four keys that follow each other: one counter of the
random rule, 4 bytes of a keep matrix, 8 of a bias. So none of these moves between threads.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ._attention import near
from ._attention_pairs import shown_pairs
from ._tile import philox


@gluon.jit
def key_of(columns):
    """The key of a tile that each column of its scores is of."""
    return columns // 16 * 16 + columns % 8 // 2 * 4 + columns % 16 // 8 * 2 + columns % 2


@gluon.jit
def by_four(t, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """A tile of scores as (BLOCK_M, BLOCK_N // 16, 4, 2, 2): four keys that follow each other last, in their order."""
    return gl.permute(gl.reshape(t, [BLOCK_M, BLOCK_N // 16, 2, 4, 2]), [0, 1, 3, 2, 4])


@gluon.jit
def first_of_four(t, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """(BLOCK_M, BLOCK_N // 16, 4) of a tile of scores: that of the first of four keys."""
    first, _ = gl.split(by_four(t, BLOCK_M, BLOCK_N))
    first, _ = gl.split(first)
    return first


@gluon.jit
def four_joined(t0, t1, t2, t3, scores: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """A tile of scores from (BLOCK_M, BLOCK_N // 16, 4) of each of four keys."""
    t = gl.join(gl.join(t0, t2), gl.join(t1, t3))
    t = gl.reshape(gl.permute(t, [0, 1, 3, 2, 4]), [BLOCK_M, BLOCK_N])
    return gl.convert_layout(t, scores, assert_trivial=True)


@gluon.jit
def pair_words(ptr, m0, n0, tq, tk, stride_t, scores: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """What a tile's pairs have in a bias or a keep matrix, of four keys at once: one or two integers of its bytes."""
    BYTES: gl.constexpr = 4 * ptr.dtype.element_ty.primitive_bitwidth // 8
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores))
    rows = gl.arange(0, BLOCK_M, gl.SliceLayout(1, scores))
    keys = key_of(columns)
    some = gl.expand_dims(rows < near(tq - m0, 4096), 1) & gl.expand_dims(keys < near(tk - n0, 4096), 0)
    offsets = gl.expand_dims(rows * stride_t, 1) + gl.expand_dims(keys, 0)
    some, offsets = first_of_four(some, BLOCK_M, BLOCK_N), first_of_four(offsets, BLOCK_M, BLOCK_N)
    ptrs = ptr + m0 * stride_t + n0 + offsets
    if BYTES == 4:
        words = gl.load(ptrs.to(gl.pointer_type(gl.int32), bitcast=True), mask=some, other=0)
        more = words
    else:
        ptrs = ptrs.to(gl.pointer_type(gl.int64), bitcast=True)
        words = gl.load(ptrs, mask=some, other=0)
        more = words
        if BYTES == 16:
            more = gl.load(ptrs + 1, mask=some, other=0)
    return words, more


@gluon.jit
def bias_of(words, more, kind: gl.constexpr, scores: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """A tile of a bias, float32, of pair_words()."""
    if kind.primitive_bitwidth == 32:
        t0, t1 = (words & 0xFFFFFFFF).to(gl.int32), (words >> 32).to(gl.int32)
        t2, t3 = (more & 0xFFFFFFFF).to(gl.int32), (more >> 32).to(gl.int32)
    else:
        lower, upper = (words & 0xFFFFFFFF).to(gl.int32), (words >> 32).to(gl.int32)
        t0, t1 = lower.to(gl.int16), (lower >> 16).to(gl.int16)
        t2, t3 = upper.to(gl.int16), (upper >> 16).to(gl.int16)
    t0, t1 = t0.to(kind, bitcast=True).to(gl.float32), t1.to(kind, bitcast=True).to(gl.float32)
    t2, t3 = t2.to(kind, bitcast=True).to(gl.float32), t3.to(kind, bitcast=True).to(gl.float32)
    return four_joined(t0, t1, t2, t3, scores, BLOCK_M, BLOCK_N)


@gluon.jit
def keep_of(words, scores: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """A tile of a keep matrix, bool, of pair_words()."""
    return four_joined(
        (words & 0xFF) != 0, (words & 0xFF00) != 0, (words & 0xFF0000) != 0, (words >> 24) != 0, scores, BLOCK_M,
        BLOCK_N
    )  # fmt: skip


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
def shown_tile(m0, n0, live, low, high, scores: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """(BLOCK_M, BLOCK_N) bool, keys in key_of()'s order: what band and length show."""
    rows = gl.expand_dims(gl.arange(0, BLOCK_M, gl.SliceLayout(1, scores)), 1)
    columns = gl.expand_dims(key_of(gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores))), 0)
    return shown_pairs(rows, columns, m0, n0, live, low, high)


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


@gluon.jit
def shown_transposed(m0, n0, tq, live, low, high, scores: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """(BLOCK_N, BLOCK_M) bool, keys in key_of_row()'s order: what band and length show to queries that there are."""
    rows = gl.arange(0, BLOCK_M, gl.SliceLayout(0, scores))
    columns = gl.expand_dims(key_of_row(gl.arange(0, BLOCK_N, gl.SliceLayout(1, scores))), 1)
    from_key = rows + near(low - (n0 - m0), 4096)
    to_key = gl.minimum(rows + near(high - (n0 - m0), 4096), near(live - n0, 4096) - 1)
    length = gl.where(rows < near(tq - m0, 4096), gl.maximum(to_key - from_key + 1, 0), 0)
    # shown_pairs(), by one comparison of each pair: registers are few
    return (columns - gl.expand_dims(from_key, 0)).to(gl.uint32) < gl.expand_dims(length, 0).to(gl.uint32)


@gluon.jit
def scored(
    x, bias_ptr, keep_ptr, bias_words, more_bias, keep_words, m0, n0, live, low, high, scale, MASKED: gl.constexpr,
    scores: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """A.1 of a tile of products (_attention_pairs.score_tile)."""
    if bias_ptr is not None:
        bias = bias_of(bias_words, more_bias, bias_ptr.dtype.element_ty, scores, BLOCK_M, BLOCK_N)
        x = gl.where(bias == float("-inf"), float("-inf"), gl.fma(x, scale, bias))
    if MASKED:
        x = gl.where(shown_tile(m0, n0, live, low, high, scores, BLOCK_M, BLOCK_N), x, float("-inf"))
        if keep_ptr is not None:
            x = gl.where(keep_of(keep_words, scores, BLOCK_M, BLOCK_N), x, float("-inf"))
    return x


@gluon.jit
def words_of(
    bias_ptr, keep_ptr, m0, n0, tq, tk, bias_stride_t, keep_stride_t, none, scores: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """(bias, more of it, keep): pair_words() of a tile, ``none`` where there is no such matrix."""
    bias_words = none
    more_bias = none
    keep_words = none
    if bias_ptr is not None:
        bias_words, more_bias = pair_words(bias_ptr, m0, n0, tq, tk, bias_stride_t, scores, BLOCK_M, BLOCK_N)
    if keep_ptr is not None:
        keep_words, _ = pair_words(keep_ptr, m0, n0, tq, tk, keep_stride_t, scores, BLOCK_M, BLOCK_N)
    return bias_words, more_bias, keep_words


@gluon.jit
def key_of_row(rows):
    """The key of a tile that each row of its transposed scores (keys, queries) is of.

    A thread of a warp group holds rows g and g + 8 of each 16: two keys that follow each other, and the thread four
    lanes on the two beside them.
    """
    return rows // 16 * 16 + rows % 8 * 2 + rows % 16 // 8


@gluon.jit
def by_two(t, BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr):
    """A tile of transposed scores as (BLOCK_N // 2, BLOCK_M, 2): two keys that follow each other last."""
    t = gl.permute(gl.reshape(t, [BLOCK_N // 16, 2, 8, BLOCK_M]), [0, 2, 3, 1])
    return gl.reshape(t, [BLOCK_N // 2, BLOCK_M, 2])


@gluon.jit
def half_of_two(t, BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr):
    """(BLOCK_N // 2, BLOCK_M // 16, 8) of a tile of transposed scores: the first of two keys, 8 queries of 16."""
    first, _ = gl.split(by_two(t, BLOCK_N, BLOCK_M))
    first = gl.permute(gl.reshape(first, [BLOCK_N // 2, BLOCK_M // 16, 2, 8]), [0, 1, 3, 2])
    first, _ = gl.split(first)
    return first


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
