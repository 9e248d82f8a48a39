"""Backend "reference" of linear: the equation LINEAR.1 as it stands, in float64, rounded once at the end."""

from __future__ import annotations

from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(M, K) -> (M, N); the arguments are those of ops.linear, already checked."""
    y = x.double() @ weight.double().T
    if bias is not None:
        y = y + bias.double()
    return y.to(x.dtype)
