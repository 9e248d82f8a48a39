"""The pieces of a Transformer block over existing torch.nn children: what the recipes are put together from.

Every function reads the weights of its children past their forwards; the recipes check first that this is allowed
(guard.py). Under autocast the weights are cast here, since autocast does not see inside a registered operator.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from .._autocast import as_autocast
from ..nn import Int8Linear
from ..nn.attention_weights import with_weights
from ..nn.ffn import ACTIVATIONS, activation_name, biases_of
from ..nn.int8 import int8_feed_forward
from ..nn.packed import Packed
from ..ops.layer_norm import layer_norm_of_sum
from . import guard
from .linear import linear

_NAMED = {  # classes of transformers.activations, which need not be installed
    "GELUActivation": "gelu",
    "NewGELUActivation": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
    "GELUTanh": "gelu_tanh",
    "SiLUActivation": "silu",
}


def activation(function: Any) -> str | None:
    """The name by which ops.ffn knows an activation (a module or a function), or None where it does not."""
    if type(function).__module__ == "transformers.activations":
        return _NAMED.get(type(function).__name__)
    return activation_name(function)


def why_not_activation(function: Any) -> str | None:
    """None where an activation may be fused, else part of a sentence."""
    if activation(function) is None:
        name = type(function).__name__ if isinstance(function, nn.Module) else getattr(function, "__name__", function)
        return f"its activation {name} has no fused form"
    if isinstance(function, nn.Module) and guard.hooked(function):
        return "its activation has hooks"
    return None


def dropout_p(module: nn.Module) -> float:
    """The probability with which an nn.Dropout now drops."""
    return module.p if module.training else 0.0  # type: ignore[return-value]


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(..., T, E) -> (..., H, T, D), a view."""
    return x.view(*x.shape[:-1], heads, x.shape[-1] // heads).transpose(-3, -2)


def merge_heads(x: Tensor) -> Tensor:
    """(..., H, T, D) -> (..., T, E), a view of what ops.attention returns."""
    return x.transpose(-3, -2).flatten(-2)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Tensor:
    """Attention of (B, H, T, D) tensors under a Mask, a tensor, None or a Packed."""
    if isinstance(mask, Packed):
        return mask.attention(query, key, value, **options)
    return ops.attention(query, key, value, _added(mask, query), **options)  # type: ignore[return-value]


def attend_with_weights(query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """``attend`` under anything but a Packed, and the weights (B, H, Tq, Tk), with dropout's effect."""
    return with_weights(query, key, value, _added(mask, query), **options)


def _added(mask: Any, query: Tensor) -> Any:
    """A mask in a dtype that may be added to the scores of ``query``."""
    if isinstance(mask, Tensor) and mask.is_floating_point() and mask.dtype != torch.float32:
        return mask.to(query.dtype)
    return mask


def self_attention(x: Tensor, projections: tuple[nn.Module, ...], heads: int, mask: Any, **options: Any) -> Tensor:
    """Attention of ``x`` (..., T, E) to itself by three nn.Linear; the heads' results side by side."""
    query, key, value = (split_heads(linear(x, layer), heads) for layer in projections)
    return merge_heads(attend(query, key, value, mask, **options))


def feed_forward(
    x: Tensor,
    first: nn.Module,
    second: nn.Module,
    activation: str,
    gate: nn.Module | None = None,
    *,
    swapped: bool = False,
    **options: Any,
) -> Tensor:
    """ops.ffn with the weights of two (or, gated, three) nn.Linear; of Conv1D; of nn.Conv1d, width 1, x (..., T, E).

    ``gate`` may be ``first``, whose second half of rows then is the gate, ``swapped`` the first half. Where one is an
    Int8Linear, they are called.
    """
    halves = gate is first
    if any(type(layer) is Int8Linear for layer in (first, second, gate)):
        p = options.get("dropout_p", 0.0)
        y = int8_feed_forward(x, first, activation, second, gate) if p == 0.0 and not swapped else None
        if y is not None:
            return y
        hidden, *gated = linear(x, first).chunk(2 if halves else 1, dim=-1)[:: -1 if swapped else 1]
        hidden = ACTIVATIONS[activation](hidden)
        if gate is not None:
            hidden = hidden * (gated[0] if halves else linear(x, gate))
        return linear(F.dropout(hidden, p) if p else hidden, second)
    w1, w3 = _weight(first), None if gate is None else _weight(gate)
    b1: Any = first.bias if halves else biases_of(first, gate)
    if halves:
        w1, w3 = w1.chunk(2)[:: -1 if swapped else 1]
        b1 = b1.roll(w1.shape[0]) if swapped and b1 is not None else b1
    weights: list[Any] = [w1, b1, _weight(second), second.bias, w3]
    x, w1, b1, w2, b2, w3 = as_autocast(x, *weights)
    return ops.ffn(x, w1, b1, w2, b2, activation=activation, gate=w3, **options)


def dtypes(*layers: Any) -> list[torch.dtype]:
    """Those of the layers' weights that must be the input's: an Int8Linear takes any."""
    return [layer.weight.dtype for layer in layers if type(layer) is not Int8Linear]


def _weight(layer: Any) -> Tensor:
    """(out, in), whatever the layer keeps: transformers' Conv1D has it transposed, a convolution has a third axis."""
    weight = layer.weight
    if weight.dim() == 3:
        return weight.squeeze(-1)
    return weight.t() if type(layer).__name__ == "Conv1D" else weight


def add_norm(x: Tensor, residual: Tensor, norm: nn.Module, **options: Any) -> tuple[Tensor, Tensor]:
    """(y, z): z = residual + dropout(x), y = LayerNorm(z) with the parameters of an nn.LayerNorm over the last axis."""
    return ops.add_layer_norm(x, residual, norm.weight, norm.bias, norm.eps, **options)  # type: ignore[arg-type]


def norm_of_sum(x: Tensor, residual: Tensor, norm: nn.Module, **options: Any) -> Tensor:
    """y of ``add_norm``, where nobody goes on with z."""
    return layer_norm_of_sum(x, residual, norm.weight, norm.bias, norm.eps, **options)  # type: ignore[arg-type]
