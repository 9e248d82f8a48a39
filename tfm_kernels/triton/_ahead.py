"""What Gluon's kernels share: names that changed from one release of Triton to another, a layout of 16 bytes, rings."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

# the names since Triton 3.7 and 3.9, and before
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
begin_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.constexpr_function
def by_16_bytes(width, WARPS):
    """The layout in which a thread has 8 of the ``width`` 16-bit numbers of a row, and a warp as few rows as can be."""
    return gl.BlockedLayout([1, 8], [32 // (width // 8), width // 8], [WARPS, 1], [1, 0])


@gluon.jit
def barriers(COUNT: gl.constexpr, RING: gl.constexpr):
    """One for each of RING places in shared memory, at which COUNT arrivals are awaited."""
    found = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(RING):
        mbarrier.init(found.index(place), count=COUNT)
    return found


@gluon.jit
def next_place(slot, turn, RING: gl.constexpr):
    """A ring's next place, and the parity of its turn."""
    slot += 1
    if slot == RING:
        slot = 0
        turn ^= 1
    return slot, turn


@gluon.jit
def zero():
    """0, of which the compiler knows nothing: what follows from it is not kept in registers from tile to tile."""
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r", [], gl.int32, is_pure=False, pack=1)
