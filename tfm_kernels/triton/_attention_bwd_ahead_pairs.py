"""Bias and keep matrix in Gluon's backward kernels of attention: transposed scores meet them, and dx leaves as dbias.

Of transposed scores (_attention_ahead_pairs.key_of_row) a thread has two keys that follow each other for one query: 4
bytes of a bias of 16 bits, 2 of a keep matrix. Eight threads have 16 keys of a query, a sector of such a bias.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ._attention_ahead_pairs import by_four, by_two, first_of_four, key_of, key_of_row, shown_tile, shown_transposed
from ._attention_ahead_pairs import scored as scored_by_four
from ._attention_bwd_ahead_tile import marked, negative
from ._tile import near


@gluon.jit
def weights_of(
    x, top, shift, kept, bias_ptr, keep_ptr, bias_words, more_bias, keep_words, m0, n0, live, low, high, scale, step,
    MASKED: gl.constexpr, DROPPED: gl.constexpr, scores: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """marked() weights of a tile of products (queries, keys), keys in key_of()'s order."""
    shown = x
    if bias_ptr is not None or keep_ptr is not None:
        x = scored_by_four(
            x, bias_ptr, keep_ptr, bias_words, more_bias, keep_words, m0, n0, live, low, high, scale, MASKED, scores,
            BLOCK_M, BLOCK_N,
        )  # fmt: skip
        shown = x != float("-inf")
    elif MASKED:
        shown = shown_tile(m0, n0, live, low, high, scores, BLOCK_M, BLOCK_N)
    power = gl.fma(x - top, step, negative(shift))
    return marked(power, shown, kept, MASKED or bias_ptr is not None, DROPPED)


@gluon.jit
def first_of_two(t, BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr):
    """(BLOCK_N // 2, BLOCK_M) of a tile of transposed scores: that of the first of two keys."""
    first, _ = gl.split(by_two(t, BLOCK_N, BLOCK_M))
    return first


@gluon.jit
def two_joined(t0, t1, scores: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr):
    """A tile of transposed scores from (BLOCK_N // 2, BLOCK_M) of each of two keys."""
    t = gl.permute(gl.reshape(gl.join(t0, t1), [BLOCK_N // 16, 8, BLOCK_M, 2]), [0, 3, 1, 2])
    return gl.convert_layout(gl.reshape(t, [BLOCK_N, BLOCK_M]), scores, assert_trivial=True)


@gluon.jit
def pair_words(ptr, m0, n0, tq, tk, stride_t, scores: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """What a tile's pairs have in a bias or a keep matrix, of two keys at once: an integer of its bytes.

    A thread's queries are written as one that depends on it and others that do not, which take no registers of its own.
    """
    BITS: gl.constexpr = 2 * ptr.dtype.element_ty.primitive_bitwidth
    word: gl.constexpr = gl.int16 if BITS == 16 else gl.int32 if BITS == 32 else gl.int64
    keys = gl.expand_dims(key_of_row(gl.arange(0, BLOCK_N, gl.SliceLayout(1, scores))), 1)
    queries = gl.expand_dims(gl.arange(0, BLOCK_M, gl.SliceLayout(0, scores)), 0)
    some = (keys < near(tk - n0, 4096)) & (queries < near(tq - m0, 4096))
    own, common = queries % 8 // 2 * 2 * stride_t + keys, (queries // 8 * 8 + queries % 2) * stride_t + keys * 0
    ptrs = ptr + m0 * stride_t + n0 + first_of_two(own, BLOCK_N, BLOCK_M)
    ptrs = ptrs + first_of_two(common, BLOCK_N, BLOCK_M)
    some = first_of_two(some, BLOCK_N, BLOCK_M)
    return gl.load(ptrs.to(gl.pointer_type(word), bitcast=True), mask=some, other=0)


@gluon.jit
def words_of(
    bias_ptr, keep_ptr, m0, n0, tq, tk, bias_stride_t, keep_stride_t, none, scores: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """(bias, keep): pair_words() of a tile, ``none`` where there is no such matrix."""
    bias_words = none
    keep_words = none
    if bias_ptr is not None:
        bias_words = pair_words(bias_ptr, m0, n0, tq, tk, bias_stride_t, scores, BLOCK_M, BLOCK_N)
    if keep_ptr is not None:
        keep_words = pair_words(keep_ptr, m0, n0, tq, tk, keep_stride_t, scores, BLOCK_M, BLOCK_N)
    return bias_words, keep_words


@gluon.jit
def bias_of(words, kind: gl.constexpr, scores: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """A tile of a bias, float32, of pair_words()."""
    if kind.primitive_bitwidth == 32:
        t0, t1 = (words & 0xFFFFFFFF).to(gl.int32), (words >> 32).to(gl.int32)
    else:
        t0, t1 = words.to(gl.int16), (words >> 16).to(gl.int16)
    t0, t1 = t0.to(kind, bitcast=True).to(gl.float32), t1.to(kind, bitcast=True).to(gl.float32)
    return two_joined(t0, t1, scores, BLOCK_N, BLOCK_M)


@gluon.jit
def keep_of(words, scores: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """A tile of a keep matrix, bool, of pair_words()."""
    words = words.to(gl.int32)
    return two_joined((words & 0xFF) != 0, (words & 0xFF00) != 0, scores, BLOCK_N, BLOCK_M)


@gluon.jit
def scored(
    x, bias_ptr, keep_ptr, bias_words, keep_words, m0, n0, tq, live, low, high, scale, MASKED: gl.constexpr,
    scores: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """A.1 of a tile of transposed products (_attention_pairs.score_tile)."""
    if bias_ptr is not None:
        bias = bias_of(bias_words, bias_ptr.dtype.element_ty, scores, BLOCK_M, BLOCK_N)
        x = gl.where(bias == float("-inf"), float("-inf"), gl.fma(x, scale, bias))
    if MASKED:
        x = gl.where(shown_transposed(m0, n0, tq, live, low, high, scores, BLOCK_M, BLOCK_N), x, float("-inf"))
        if keep_ptr is not None:
            x = gl.where(keep_of(keep_words, scores, BLOCK_M, BLOCK_N), x, float("-inf"))
    return x


@gluon.jit
def store_pairs(
    dx, ptr, m0, n0, tq, tk, stride_t, scores: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr
):  # fmt: skip
    """Writes a tile of dx, keys in key_of()'s order, as one of a head's dbias, four keys at once."""
    kind: gl.constexpr = ptr.dtype.element_ty
    keys = gl.expand_dims(key_of(gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores))), 0)
    queries = gl.expand_dims(gl.arange(0, BLOCK_M, gl.SliceLayout(1, scores)), 1)
    some = (keys < near(tk - n0, 4096)) & (queries < near(tq - m0, 4096))
    offsets = keys + queries * stride_t
    some, offsets = first_of_four(some, BLOCK_M, BLOCK_N), first_of_four(offsets, BLOCK_M, BLOCK_N)
    ptrs = (ptr + m0 * stride_t + n0 + offsets).to(gl.pointer_type(gl.int64), bitcast=True)
    even, odd = gl.split(by_four(dx.to(kind), BLOCK_M, BLOCK_N))
    t0, t2 = gl.split(even)
    t1, t3 = gl.split(odd)
    if kind.primitive_bitwidth == 32:
        gl.store(ptrs, two_words(t0, t1), mask=some)
        gl.store(ptrs + 1, two_words(t2, t3), mask=some)
    else:
        gl.store(ptrs, two_words(two_halves(t0, t1), two_halves(t2, t3)), mask=some)


@gluon.jit
def two_words(first, second):
    """int64 of two numbers of 32 bits."""
    first, second = first.to(gl.uint32, bitcast=True), second.to(gl.uint32, bitcast=True)
    return (first.to(gl.uint64) | (second.to(gl.uint64) << 32)).to(gl.int64, bitcast=True)


@gluon.jit
def two_halves(first, second):
    """uint32 of two numbers of 16 bits."""
    first, second = first.to(gl.uint16, bitcast=True), second.to(gl.uint16, bitcast=True)
    return first.to(gl.uint32) | (second.to(gl.uint32) << 16)
