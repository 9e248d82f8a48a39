"""The linear layers of a decoding step, whose rows are few."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from .. import _backend, ops
from .._autocast import autocast_dtype
from ._bypass import LINEARS, ordinary, plain


def project(x: Tensor, weight: Any, bias: Any) -> Tensor:
    """F.linear, by ops.linear where a kernel may read the weights; as everywhere in nn, no backend= is meant for it."""
    if autocast_dtype(x.device) is None and ordinary(x, weight, bias) and _backend.offers("linear"):
        return ops.linear(x, weight, bias)
    return F.linear(x, weight, bias)


def through(layer: nn.Module, x: Tensor) -> Tensor:
    """``layer``(x), by project() where it is an nn.Linear and nothing else."""
    if plain(layer, *LINEARS, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return project(x, layer.weight, layer.bias)
    return layer(x)
