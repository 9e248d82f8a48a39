"""How the C library's allocator treats the memory that a training step frees."""

from __future__ import annotations

import ctypes
import platform

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # of malloc.h
_TOP_PAD_BYTES = 256 << 20


def keep_freed_memory() -> bool:
    """Lets freed memory stay with this process, where the C library is glibc; for commands, which own theirs.

    A step frees and asks again for the same large tensors. glibc gives each of them back to the kernel, which then
    clears every page anew: about a sixth of a step's time for a small model on a CPU. With this they come from the
    heap, which is never trimmed: the process holds on to its peak until it ends.

    Returns:
        Whether anything was set.

    Source:
        https://man7.org/linux/man-pages/man3/mallopt.3.html
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all([mallopt(_MMAP_MAX, 0), mallopt(_TRIM_THRESHOLD, -1), mallopt(_TOP_PAD, _TOP_PAD_BYTES)])
