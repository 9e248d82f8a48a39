"""oneDNN's matrix product, through PyTorch's own entries to it, where this build of PyTorch has them."""

from __future__ import annotations

import platform

import torch
from torch import Tensor

from .. import _library

AVAILABLE = torch.backends.mkldnn.is_available() and all(
    hasattr(torch.ops.mkldnn, name) for name in ("_linear_pointwise", "_reorder_linear_weight", "_nbytes")
)


def gains() -> bool:
    """Whether its product is worth asking for: on Zen 3 it reaches 0.8 to 0.9 of F.linear's rate, packed or not."""
    return AVAILABLE and _library.nearest != _library.ZEN3


def _emulated() -> frozenset[torch.dtype]:
    if _library.cpu_extension is None or platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()
    native = {torch.bfloat16: _library.bf16_tiles, torch.float16: _library.f16_products}
    return frozenset(dtype for dtype, has in native.items() if not has)


# The types that F.linear emulates, at a third of float32's rate or less: x86 without dot products of theirs.
EMULATED = _emulated()


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x weight^T + bias in float32; the weight as it lies, or packed. It has no derivative."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def pack(weight: Tensor) -> Tensor:
    """A copy of a float32 weight (out, in), not empty, in the order in which oneDNN reads it; for any rows of x."""
    return torch.ops.mkldnn._reorder_linear_weight(weight)


def nbytes(packed: Tensor) -> int:
    """The memory of a packed weight, which may be filled up to whole blocks."""
    return int(torch.ops.mkldnn._nbytes(packed))
