"""Backend "aten" of ffn: PyTorch's own linear layers and activations; the dropout mask by the project's rule."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .. import dropout
from .._autocast import beyond_autocast
from ._activation import ACTIVATE
from ._rows import closed


@beyond_autocast
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
    recompute: bool,
) -> Tensor:
    """(..., E) -> (..., Eo); the arguments are those of ops.ffn, already checked."""
    arguments = (x, w1, b1, w2, b2, activation, gate, dropout_p, seed, dropout_rows)
    if recompute and torch.is_grad_enabled():
        return checkpoint(_block, *arguments, use_reentrant=False, preserve_rng_state=False)
    return _block(*arguments)


def _block(x, w1, b1, w2, b2, activation, gate, dropout_p, seed, dropout_rows):
    x, b_gate = closed(x), None
    if b1 is not None and b1.shape[0] != w1.shape[0]:
        b1, b_gate = b1.chunk(2)
    hidden = ACTIVATE[activation](F.linear(x, w1, b1))
    if gate is not None:
        hidden = hidden * F.linear(x, gate, b_gate)
    if seed is not None:
        if dropout_rows is None:
            dropout_rows = torch.arange(math.prod(x.shape[:-1]), device=x.device)
        keep = dropout.keep_mask(seed, dropout_p, dropout_rows, w1.shape[0]).view(hidden.shape)
        hidden = torch.where(keep, hidden * dropout.keep_scale(dropout_p), 0.0)
    return F.linear(hidden, w2, b2)
