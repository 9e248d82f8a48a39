"""Backend "reference" of ffn: the equations FFN.1 to FFN.4 as they stand, in float64, rounded once at the end."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import dropout
from ._activation import activate


def ffn(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    activation: str,
    gate: Tensor | None,
    dropout_p: float,
    seed: Tensor | None,
    dropout_rows: Tensor | None,
) -> Tensor:
    """(M, E) -> (M, Eo); the arguments are those of ops.ffn, already checked."""
    x64 = x.double()
    preact = x64 @ w1.double().T
    if b1 is not None:
        preact = preact + b1[: w1.shape[0]].double()
    hidden = activate(preact, activation)
    if gate is not None:
        linear = x64 @ gate.double().T
        if b1 is not None and b1.shape[0] != w1.shape[0]:
            linear = linear + b1[w1.shape[0] :].double()
        hidden = hidden * linear
    if seed is not None:
        rows = torch.arange(x.shape[0], device=x.device) if dropout_rows is None else dropout_rows
        keep = dropout.keep_mask(seed, dropout_p, rows, w1.shape[0])
        hidden = torch.where(keep, hidden * dropout.keep_scale(dropout_p), 0.0)
    y = hidden @ w2.double().T
    if b2 is not None:
        y = y + b2.double()
    return y.to(x.dtype)
