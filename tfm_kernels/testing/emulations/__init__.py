"""Clean emulations of the kernels' algorithms in plain float32 tensors: what an honest kernel's rounding looks like.

The contract must pass every one of them on every data class, or its bounds are wrong. Each step of interest goes
through ``Emulation.step``, where tfm_kernels/testing/defects plants its errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..judge import main_tensor
from .attention import attention, attention_varlen
from .emulation import Emulation as Emulation
from .emulation import Hook as Hook
from .emulation import Results
from .ffn import activation as activation
from .ffn import ffn
from .linear_cross_entropy import linear_cross_entropy
from .norm import norm


def emulate(
    op: str,
    inputs: Mapping[str, Any],
    douts: Mapping[str, Tensor | None],
    *,
    tile: int = 64,
    lazy: bool = False,
    hooks: Mapping[str, Hook] | None = None,
) -> Results:
    """Runs an op's algorithm, forward and backward.

    Args:
        op: the public function's name.
        inputs: its arguments by name.
        douts: output name -> output gradient.
        tile: keys, hidden columns, classes or rows at a time.
        lazy: see Emulation.
        hooks: step name -> function(value, emulation) that a planted defect puts in its place.

    Returns:
        (outputs, grads) as judge() takes them.
    """
    run = Emulation(main_tensor(inputs).dtype, tile, lazy, hooks)
    with torch.no_grad():
        if op == "attention":
            return attention(run, inputs, douts)
        if op == "attention_varlen":
            return attention_varlen(run, inputs, douts)
        if op == "linear_cross_entropy":
            return linear_cross_entropy(run, inputs, douts)
        return ffn(run, inputs, douts) if op == "ffn" else norm(run, op, inputs, douts)
