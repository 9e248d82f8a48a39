"""oneDNN's matrix product, through PyTorch's own entries to it, where this build of PyTorch has them."""

from __future__ import annotations

import platform

import torch
from torch import Tensor

from .._library import bf16_tiles, cpu_extension

AVAILABLE = torch.backends.mkldnn.is_available() and all(
    hasattr(torch.ops.mkldnn, name) for name in ("_linear_pointwise", "_reorder_linear_weight", "_nbytes")
)

# F.linear in 16 bits is emulated, at a third of float32's rate or less, on x86 without bfloat16 dot products.
EMULATES_16_BIT = cpu_extension is not None and platform.machine() in ("x86_64", "AMD64") and not bf16_tiles


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x weight^T + bias in float32; the weight as it lies, or packed. It has no derivative."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def pack(weight: Tensor) -> Tensor:
    """A copy of a float32 weight (out, in), not empty, in the order in which oneDNN reads it; for any rows of x."""
    return torch.ops.mkldnn._reorder_linear_weight(weight)


def nbytes(packed: Tensor) -> int:
    """The memory of a packed weight, which may be filled up to whole blocks."""
    return int(torch.ops.mkldnn._nbytes(packed))
