"""Tensors between protected pages: a read or write outside of them ends the process instead of finding luck."""

import ctypes

import torch

_PAGE = 4096
_NONE, _READ_WRITE = 0, 3
_PRIVATE_ANONYMOUS, _NO_RESERVE = 0x22, 0x4000
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def fenced(t):
    """A contiguous copy of ``t`` that ends at a protected page; its memory is not given back."""
    size = t.numel() * t.element_size()
    copy = _map(size)[:size].view(t.dtype)[: t.numel()].view(t.shape)
    return copy.copy_(t)


def fenced_empty_like(t):
    """torch.empty_like(t), its strides too, that ends at a protected page."""
    strides = torch.empty_like(t, device="meta").stride()
    order = sorted(range(t.dim()), key=lambda i: (-strides[i], i))
    stored = fenced(torch.empty([t.shape[i] for i in order], dtype=t.dtype))
    return stored.permute([order.index(i) for i in range(t.dim())])


def huge(numel, dtype):
    """Zeros that take up memory only where they are written, with a fence of the same size on both sides."""
    return _map(numel * torch.empty(0, dtype=dtype).element_size(), fence=True).view(dtype)


def _map(size, fence=False):
    """``size`` bytes that end at a protected page."""
    pages = -(-size // _PAGE) * _PAGE
    around = pages if fence else _PAGE
    base = _libc.mmap(None, pages + 2 * around, _NONE, _PRIVATE_ANONYMOUS | _NO_RESERVE, -1, 0)
    assert base not in (None, ctypes.c_void_p(-1).value), "no room in the address space"
    assert size == 0 or _libc.mprotect(base + around, pages, _READ_WRITE) == 0
    start = base + around + pages - size
    return torch.frombuffer((ctypes.c_char * max(size, 1)).from_address(start), dtype=torch.uint8, count=max(size, 1))
