"""What Gluon's kernels share: names that changed from one release of Triton to another, and a layout of 16 bytes."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

# the names since Triton 3.7 and 3.9, and before
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
begin_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.constexpr_function
def by_16_bytes(width, WARPS):
    """The layout in which a thread has 8 of the ``width`` 16-bit numbers of a row, and a warp as few rows as can be."""
    return gl.BlockedLayout([1, 8], [32 // (width // 8), width // 8], [WARPS, 1], [1, 0])
