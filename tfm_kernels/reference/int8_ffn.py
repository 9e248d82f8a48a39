"""Backend "reference" of int8_ffn: the equations INT8_FFN.1 to .4 as they stand, integers in the type that defines
them, the rest in float64, rounded once at the end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._activation import activate
from ._int8 import rounded


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
) -> Tensor:
    """(M, E) -> (M, Eo); the arguments are those of ops.int8_ffn, already checked."""
    compute = torch.promote_types(x.dtype, torch.float32)
    given = rounded(x.to(compute)) if dynamic else x.double()
    p = given @ w1.double().T * scale1.double()
    if b1 is not None:
        p = p + b1.double()
    hidden = activate(p, activation)
    if gate is not None and gate_scale is not None:
        hidden = hidden * (given @ gate.double().T * gate_scale.double())
    hidden = rounded(hidden.to(compute)) if dynamic else hidden
    y = hidden @ w2.double().T * scale2.double()
    if b2 is not None:
        y = y + b2.double()
    return y.to(x.dtype)
