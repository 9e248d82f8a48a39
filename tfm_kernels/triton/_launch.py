"""What the Triton launchers share on the host: checks, rows, alignment, the device a kernel is launched on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
from torch import Tensor

from .. import dropout

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LARGE_SHARED = ((8, 0), (8, 7), (9, 0), (10, 0), (10, 1), (10, 3), (11, 0))  # capabilities with 163 KiB or more a block
MULTIPROCESSORS = {8: 108, 9: 132, 10: 148}  # major compute capability -> of A100, H100 and H200, B200

_listening = threading.local()


def launch(kernel: Any, grid: tuple[int, ...], **arguments: Any) -> None:
    """Launches a kernel of Triton on the current device.

    Args:
        kernel: it.
        grid: programs, along one to three axes.
        **arguments: its own and Triton's options.
    """
    compiled = kernel[grid](**arguments)
    tell = getattr(_listening, "tell", None)
    if tell is not None:
        tell(kernel, grid, compiled, arguments)


def tell(listener: Callable[..., None] | None) -> Callable[..., None] | None:
    """Has every launch of this thread told to ``listener``(kernel, grid, what was compiled, arguments).

    Returns:
        The listener before.
    """
    before = getattr(_listening, "tell", None)
    _listening.tell = listener
    return before


def check_device(op: str, x: Tensor) -> None:
    """Refuses tensors that a compiled kernel cannot reach."""
    if not (x.is_cuda or triton.knobs.runtime.interpret):
        raise ValueError(f"{op}: x must be a CUDA tensor, got {x.device}")


def check_rows(op: str, name: str, x: Tensor, most: int) -> tuple[int, int]:
    """(M, N) of ``x`` (..., N); refuses what has not 1 to ``most`` features."""
    if x.dim() < 1 or not 1 <= x.shape[-1] <= most:
        raise ValueError(f"{op}: {name} must have 1 to {most} features, got shape {tuple(x.shape)}")
    return x.numel() // x.shape[-1], x.shape[-1]


def check(op: str, like: Tensor, **tensors: tuple[Tensor | None, Sequence[int], Sequence[torch.dtype]]) -> None:
    """Refuses what would make a kernel read outside its buffers; the public functions have checked with better words.

    Args:
        op: the operator's name.
        like: a tensor on the call's device.
        **tensors: name -> (tensor, the shape it must have, the types it may have).
    """
    for name, (value, shape, dtypes) in tensors.items():
        if value is None:
            continue
        if tuple(value.shape) != tuple(shape):
            raise ValueError(f"{op}: {name} must have shape {tuple(shape)}, got {tuple(value.shape)}")
        if value.dtype not in dtypes:
            raise ValueError(f"{op}: {name} must be one of {dtypes}, got {value.dtype}")
        if value.device != like.device:
            raise ValueError(f"{op}: {name} must be on {like.device}, got {value.device}")


def check_dropout(op: str, p: float, seed: Tensor | None) -> tuple[float, int]:
    """(scale of kept elements, largest dropped draw - 2**31) of a call with dropout, (1, 0) of one without."""
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"{op}: dropout_p must lie in [0, 1], got {p}")
    if p == 0.0:
        return 1.0, 0
    if seed is None:
        raise ValueError(f"{op}: seed must be a tensor where dropout_p > 0, got None")
    return dropout.keep_scale(p), dropout.threshold(p) - 1 - 2**31


def rows(x: Tensor) -> Tensor:
    """``x`` as (M, N) with unit stride along N, copied only where its strides do not allow that."""
    return matrix(x.reshape(x.numel() // x.shape[-1], x.shape[-1]))


def aligned(features: int, *tensors: Tensor | None) -> bool:
    """Whether all rows of all tensors start and end at multiples of 16 bytes: loads of 16 bytes are then possible."""
    if features % 8:
        return False
    for t in tensors:
        if t is None:
            continue
        run = 16 if t.element_size() == 1 else 8
        if features % run or t.data_ptr() % 16 or t.stride(-1) != 1 or any(s % run for s in t.stride()[:-1]):
            return False
    return True


def float32_products() -> str:
    """How products of float32 are formed: "ieee", or "tf32" where torch allows it."""
    # not allow_tf32, which says the same but raises where the setting was made through fp32_precision
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up; Triton's own serves kernels, too, and takes the host 2 us."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two of at least n > 0."""
    return 1 << (n - 1).bit_length()


def on(x: Tensor) -> AbstractContextManager:
    """Makes the device of ``x`` the current one; Triton launches there."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def capability(x: Tensor) -> tuple[int, int]:
    """Compute capability of the device of ``x``; an interpreted call takes the launches of an H200."""
    return torch.cuda.get_device_capability(x.device) if x.is_cuda else (9, 0)


def small_shared(capability: tuple[int, int]) -> bool:
    """Whether a program may only take 99 KiB of shared memory, as on the cards for desktops (8.6, 8.9, 12.0)."""
    return capability not in LARGE_SHARED


def by_warps(capability: tuple[int, int]) -> bool:
    """Whether each warp multiplies 16-bit tiles by itself, as on all GPUs but those where groups of warps do (9 to 11).

    Of products that follow from each other Triton deals out the result's rows to warps, or columns, of the weights too,
    where these are more. A warp takes 16 rows or 8 columns: where there are fewer for each, warps do the same.
    """
    return capability[0] not in (9, 10, 11)


def matrix(x: Tensor) -> Tensor:
    """``x`` (M, N) with unit stride along N, copied only where its strides do not allow that; either may be 0."""
    return x if x.stride(1) == 1 or x.shape[1] <= 1 else x.contiguous()
