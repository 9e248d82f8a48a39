"""Whole models in float64: two ways of computing the same differ by nothing but their roundings."""

from __future__ import annotations

import torch
from torch import Tensor

from .report import ContractError


def assert_same_in_float64(found: Tensor, expected: Tensor, what: str = "values") -> None:
    """Demands two results that were computed in float64 and are the same but for roundings.

    No bound explains the roundings of a whole model one by one: those of float64 stay far below 1e-9, and a mistake, or
    a step that was computed in float32, is far above it.

    Args:
        found: of any shape.
        expected: of the same shape.
        what: is said to differ where they do.

    Raises:
        ContractError: one of them is not float64.
        AssertionError: they differ.
    """
    if not found.dtype == expected.dtype == torch.float64:
        raise ContractError(f"{what}: must be computed in float64, got {found.dtype} and {expected.dtype}")
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12, msg=lambda message: f"{what}: {message}")
