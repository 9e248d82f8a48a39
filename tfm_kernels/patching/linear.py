"""Linear layers, in fused blocks and by themselves: x W^T + b by the fastest way that this machine has for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import _backend, _check, _library
from ..nn import Int8Linear
from ..nn._bypass import ordinary
from ..ops.linear import kernel_for
from . import frozen, onednn

_WIDEN_ROWS = 16  # below, widening the weights costs more than it gains
_ONEDNN_ROWS = 256  # below, oneDNN's reordering of the weights shows (1.05 to 1.2 of F.linear's time, 2.6 GHz Xeon)
_WAYS = _backend.Choices()  # a function of (x, weight, bias)


def linear(x: Tensor, layer: nn.Module) -> Tensor:
    """An nn.Linear by its weights; an Int8Linear in its place."""
    if type(layer) is Int8Linear:
        return layer(x)
    weight: Any = layer.weight
    bias: Any = layer.bias
    if frozen.is_frozen(layer) and _is_product(x, weight, bias):
        y = frozen.product(x, layer, weight, bias)
        if y is not None:
            return y
    if torch.is_autocast_enabled("cpu"):  # which has a type of its own
        return F.linear(x, weight, bias)
    key = _library.signature(x, weight, bias)
    way = _WAYS.get(key)
    if way is None:
        way = _WAYS.keep(key, _way(x, weight, bias))
    return way(x, weight, bias)


def _is_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a call is a product of floats in ordinary tensors; all else, bad calls among it, is PyTorch's.

    F.linear also takes a weight (K,) and any bias that can be added to the product.
    """
    if not ordinary(x, weight, bias) or x.dtype not in _check.FLOATING or x.is_nested or weight.dim() != 2:
        return False
    return x.dim() > 0 and x.shape[-1] == weight.shape[1] and (bias is None or bias.shape == weight.shape[:1])


def _way(x: Tensor, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """What computes the product of such tensors best; what it reads of them is in their signature."""
    if x.device.type != "cpu" or not _is_product(x, weight, bias):
        return F.linear
    rows = x.numel() // max(x.shape[-1], 1)
    if _alone(x, weight, bias):
        kernel = kernel_for(x, weight, bias)
        if kernel is not None:
            return kernel
        compiling = torch.compiler.is_compiling()  # it has products of its own
        if not compiling and x.dtype == torch.float32 and rows >= _ONEDNN_ROWS and onednn.gains():
            return onednn.product  # it adds the bias as it stores; F.linear takes a pass of its own
    emulated = x.dtype in onednn.EMULATED and weight.dtype == x.dtype
    return _widened if emulated and _library.certain(rows >= _WIDEN_ROWS) else F.linear


def _widened(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


def _alone(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a kernel without gradients may take the call: no graph, no transform, one dtype, some elements."""
    if _check.records_graph(x, weight, bias) or _library.transformed():
        return False
    return weight.dtype == x.dtype and _library.certain(x.numel() > 0)
