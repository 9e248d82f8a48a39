"""Linear layers, in fused blocks and by themselves: x W^T + b by the fastest way that this machine has for it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import _check, _library
from ..nn import Int8Linear
from ..ops.linear import linear_by_kernel
from . import frozen, onednn

_WIDEN_ROWS = 16  # below, widening the weights costs more than it gains
_ONEDNN_ROWS = 256  # below, oneDNN's reordering of the weights shows (1.05 to 1.2 of F.linear's time, 2.6 GHz Xeon)


def linear(x: Tensor, layer: nn.Module) -> Tensor:
    """An nn.Linear by its weights; an Int8Linear in its place."""
    if type(layer) is Int8Linear:
        return layer(x)
    weight: Any = layer.weight
    bias: Any = layer.bias
    y = frozen.product(x, layer, weight, bias)
    if y is not None:
        return y
    if x.device.type != "cpu":
        return F.linear(x, weight, bias)
    rows = x.numel() // max(x.shape[-1], 1)
    if _alone(x, weight, bias):
        y = linear_by_kernel(x, weight, bias)
        if y is not None:
            return y
        compiling = torch.compiler.is_compiling()  # it has products of its own
        if not compiling and x.dtype == torch.float32 and rows >= _ONEDNN_ROWS and onednn.gains():
            return onednn.product(x, weight, bias)  # it adds the bias as it stores; F.linear takes a pass of its own
    if x.dtype in onednn.EMULATED and weight.dtype == x.dtype and _widens(rows):
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)
    return F.linear(x, weight, bias)


def _widens(rows: Any) -> bool:
    """Whether a product in an emulated type gains by float32; autocast, which has a type of its own, is left alone."""
    return not torch.is_autocast_enabled("cpu") and _library.certain(rows >= _WIDEN_ROWS)


def _alone(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the call is nobody's matter but ours: no gradient, no transform, no autocast, one dtype."""
    if _check.records_graph(x, weight, bias) or _library.transformed():
        return False
    return weight.dtype == x.dtype and not torch.is_autocast_enabled("cpu") and _library.certain(x.numel() > 0)
