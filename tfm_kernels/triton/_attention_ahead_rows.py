"""The order of tiles, and their rows on their way to and from shared memory: what Gluon's attention kernels share.

Rows lie there in one of the orders of _attention_ahead_pairs.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from ._ahead import begin_copy, by_16_bytes
from ._attention_ahead_pairs import key_of, key_of_row
from ._tile import near

AS_THEY_ARE, BY_FOUR, BY_TWO = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)


@gluon.jit
def tile_of(c, first, full_first, full_last, last):
    """The number of the c-th of tiles first..last - 1: those that the band cuts come first."""
    left = full_first - first
    cut = left + last - full_last
    return gl.where(c < left, first + c, gl.where(c < cut, full_last + c - left, full_first + c - cut))


@gluon.jit
def listed_tile_of(c, count, first, full_first, full_last, last, list_ptr):
    """The number of the c-th of ``count`` tiles: of a list, or in tile_of()'s order."""
    if list_ptr is not None:
        number = gl.load(list_ptr + c, mask=c < count, other=0)
    else:
        number = tile_of(c, first, full_first, full_last, last)
    return number


@gluon.jit
def tiles_from(c, tile0, tile1, tile2, count, first, full_first, full_last, last, list_ptr):
    """(the numbers of tiles c, c + 1 and c + 2; the same from c + 1 on, which a list's are carried in).

    tile0, tile1 and tile2 are a list's numbers from c on; without one they are left alone, and numbers computed.
    """
    if list_ptr is not None:
        now, after, later = tile0, tile1, tile2
        tile0, tile1 = after, later
        tile2 = listed_tile_of(c + 3, count, first, full_first, full_last, last, list_ptr)
    else:
        now = tile_of(c, first, full_first, full_last, last)
        after = tile_of(c + 1, first, full_first, full_last, last)
        later = tile_of(c + 2, first, full_first, full_last, last)
    return now, after, later, tile0, tile1, tile2


@gluon.jit
def place_of(offs_t, ORDER: gl.constexpr):
    """The row that lies at each place of a tile."""
    if ORDER == BY_FOUR:
        offs_t = key_of(offs_t)
    if ORDER == BY_TWO:
        offs_t = key_of_row(offs_t)
    return offs_t


@gluon.jit
def copy_rows(
    to, ptr, first, begin, end, stride_t, D, ORDER: gl.constexpr, BLOCK_T: gl.constexpr, BLOCK_D: gl.constexpr,
    WARPS: gl.constexpr, chosen=None, none=None,
):  # fmt: skip
    """Begins to copy rows first + 0, 1, ... of one head to shared memory; 0 beyond D, outside begin..end - 1, and in
    rows that are not ``chosen`` (BLOCK_T,) bool, in their places.

    With ``none``, a 0 of which the compiler knows nothing, no pointers of rows are kept in registers from tile to tile:
    a thread's rows are written as one that depends on it and on ``none``, and others that depend on neither.
    """
    by: gl.constexpr = by_16_bytes(BLOCK_D, WARPS)
    AT_ONCE: gl.constexpr = BLOCK_T if none is None else WARPS * 32 // (BLOCK_D // 8)  # copied by one instruction
    offs = gl.arange(0, BLOCK_T, gl.SliceLayout(1, by))
    own, common = place_of(offs % AT_ONCE, ORDER), place_of(offs // AT_ONCE * AT_ONCE, ORDER)
    if none is not None:
        own += none
    offs_d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, by))
    rows = (own + common >= near(begin - first, 4096)) & (own + common < near(end - first, 4096))
    if chosen is not None:
        rows = rows & chosen
    mask = gl.expand_dims(rows, 1) & gl.expand_dims(offs_d < D // 8 * 8, 0)
    ptrs = ptr + first * stride_t + gl.expand_dims(own * stride_t, 1) + gl.expand_dims(offs_d, 0)
    begin_copy(to, gl.multiple_of(ptrs + gl.expand_dims(common * stride_t, 1), [1, 16]), mask=mask)
    async_copy.commit_group()


@gluon.jit
def store_rows(
    value, ptr, first, end, stride_t, D, ORDER: gl.constexpr, ALIGNED: gl.constexpr, BLOCK_T: gl.constexpr,
    BLOCK_D: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Writes rows first + 0, 1, ... < end of one head, rounded once to its type."""
    by: gl.constexpr = by_16_bytes(BLOCK_D, WARPS)
    value = gl.convert_layout(value.to(ptr.dtype.element_ty), by)
    offs_t = place_of(gl.arange(0, BLOCK_T, gl.SliceLayout(1, by)), ORDER)
    offs_d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, by))
    width = D
    if ALIGNED:
        width = D // 8 * 8
    mask = gl.expand_dims(offs_t < near(end - first, 4096), 1) & gl.expand_dims(offs_d < width, 0)
    ptrs = ptr + first * stride_t + gl.expand_dims(offs_t * stride_t, 1) + gl.expand_dims(offs_d, 0)
    if ALIGNED:
        ptrs = gl.multiple_of(ptrs, [1, 16])
    gl.store(ptrs, value, mask=mask)


@gluon.jit
def copy_numbers(to, ptr, first, end, BLOCK_T: gl.constexpr, WARPS: gl.constexpr):
    """Begins to copy one of the 8 float32 that each row of a head has to shared memory; 0 from row ``end`` on."""
    offs_t = gl.arange(0, BLOCK_T, gl.BlockedLayout([1], [32], [WARPS], [0]))
    ptrs = ptr + first.to(gl.int64) * 8 + offs_t * 8
    begin_copy(to, ptrs, mask=offs_t < near(end - first, 4096))
    async_copy.commit_group()
