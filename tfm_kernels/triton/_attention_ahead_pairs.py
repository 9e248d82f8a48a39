"""What Gluon's attention kernels do to pairs of a query and a key: their order in registers, bias, masks.

A thread of a warp group holds columns 2t, 2t + 1, 2t + 8 and 2t + 9 of each 16 of a tile of scores, and rows g and
g + 8. Keys and values lie in shared memory in such an order (``key_of``) that these columns are four keys that follow
each other: one counter of the random rule, 4 bytes of a keep matrix, 8 of a bias. So none of these moves between
threads. Of transposed scores (``key_of_row``) the rows are two such keys.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ._attention_pairs import shown_pairs
from ._tile import near


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
def shown_tile(m0, n0, live, low, high, scores: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """(BLOCK_M, BLOCK_N) bool, keys in key_of()'s order: what band and length show."""
    rows = gl.expand_dims(gl.arange(0, BLOCK_M, gl.SliceLayout(1, scores)), 1)
    columns = gl.expand_dims(key_of(gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores))), 0)
    return shown_pairs(rows, columns, m0, n0, live, low, high)


@gluon.jit
def seen_keys(shown, m0, tq, scores: gl.constexpr, BLOCK_M: gl.constexpr):
    """(BLOCK_N,) int32: more than 0 where a query that there is sees a key of a tile."""
    rows = gl.arange(0, BLOCK_M, gl.SliceLayout(1, scores))
    return gl.max((shown & gl.expand_dims(rows < near(tq - m0, 4096), 1)).to(gl.int32), 0)


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
