"""Backend "aten" of int8_ffn: PyTorch's own functions, the hidden activation in float32 (float64)."""

from __future__ import annotations

import torch
from torch import Tensor

from .._autocast import beyond_autocast
from ._activation import ACTIVATE
from ._int8 import int8_linear


@beyond_autocast
def int8_ffn(
    x: Tensor,
    w1: Tensor,
    scale1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    scale2: Tensor,
    b2: Tensor | None,
    activation: str,
    gate: Tensor | None,
    gate_scale: Tensor | None,
    dynamic: bool,
    differentiable: bool,
) -> Tensor:
    """(M, E) -> (M, Eo); the arguments are those of ops.int8_ffn, already checked, and whether to differentiate."""

    def linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        shift = None if bias is None else bias.to(x.dtype)
        return int8_linear(x, weight, scale, shift, dynamic, differentiable)

    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    hidden = ACTIVATE[activation](linear(wide, w1, scale1, b1))
    if gate is not None and gate_scale is not None:
        hidden = hidden * linear(wide, gate, gate_scale, None)
    return linear(hidden, w2, scale2, b2).to(x.dtype)
