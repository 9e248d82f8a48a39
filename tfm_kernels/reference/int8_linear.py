"""Backend "reference" of int8_linear: the equations INT8_LINEAR.1 and .2 as they stand, the integers of x in the type
that defines them, the rest in float64, rounded once at the end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._int8 import rounded


def int8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dynamic: bool) -> Tensor:
    """(M, K) -> (M, N); the arguments are those of ops.int8_linear, already checked."""
    given = rounded(x.to(torch.promote_types(x.dtype, torch.float32))) if dynamic else x.double()
    y = given @ weight.double().T * scale.double()
    if bias is not None:
        y = y + bias.double()
    return y.to(x.dtype)
