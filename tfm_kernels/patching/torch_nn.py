"""torch.nn's attention, norms and Transformer layers become those of tfm_kernels.nn, which have the same state.

A Linear that no block runs takes the product that suits its rows: in decoding, where they are few, a kernel's.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from .. import nn as fused
from ..nn._bypass import LINEARS, plain
from ..nn.transformer_layer import CHAINED
from . import frozen, swap
from .linear import linear
from .registry import Recipe, register_recipe


def _same(original: type) -> type:
    return getattr(fused, original.__name__)


def _nested(original: Any) -> type:
    """Nested tensors, which a torch.nn.TransformerEncoder in other hands may pass on, keep torch's own code."""
    first = swap.first_parameter(original)

    class Fused(getattr(fused, original.__name__)):  # type: ignore[misc]
        @functools.wraps(original.forward)
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            given = args[0] if args else kwargs.get(first)
            if isinstance(given, Tensor) and given.is_nested:
                return original.forward(self, *args, **kwargs)
            return super().forward(*args, **kwargs)

    return Fused


_LINEARS = (nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear)


def _attention(original: Any) -> type:
    """Self-attention of a frozen model reads the packed copies of its projections."""

    class Fused(_nested(original)):  # type: ignore[misc]
        def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
            if query is key is value and self._qkv_same_embed_dim:
                y = frozen.product(query, self, self.in_proj_weight, self.in_proj_bias)
                if y is not None:
                    return y.unflatten(-1, (3, self.embed_dim)).unbind(-2)
            return super()._project(query, key, value)

        def _output(self, x: Tensor) -> Tensor:
            return linear(x, self.out_proj) if plain(self.out_proj, *_LINEARS) else super()._output(x)

    return Fused


def _is_linear(module: nn.Module) -> bool | str:
    if type(module) is not nn.Linear:
        return False
    return module.weight.device.type == "cpu" or "away from the CPU a Linear by itself has nothing to fuse with"


def _linear(original: Any) -> type:
    class Fused(original):
        def forward(self, input: Tensor) -> Tensor:
            return linear(input, self)

    return Fused


_ATTENTION = ("self_attn", "multihead_attn")


def _itself(module: nn.Module) -> list[nn.Module]:
    return [module]


def _register(cls: type, what: str, fuse: Any = _same, covers: tuple[str, ...] = (), **more: Any) -> None:
    def recognise(module: nn.Module) -> bool | str:
        if type(module) is not cls:
            return False
        compiled = (name for name in _ATTENTION if isinstance(module._modules.get(name), torch.jit.ScriptModule))
        child = next(compiled, None)  # which a fused layer could not call without weights
        return True if child is None else f"TorchScript has compiled its {child}"

    def inside(module: nn.Module) -> list[nn.Module]:
        return [inner for name in covers if (inner := module._modules.get(name)) is not None]

    name = f"torch.nn.{cls.__name__}"
    register_recipe(Recipe(name, recognise, fuse, what, inside, **more), first=False)
    if fuse is _same:  # a pickle names the class of tfm_kernels.nn alone; unpatch then knows what it stands for
        swap.fused_class(cls, name)


_register(nn.LayerNorm, "layer_norm")
_register(nn.RMSNorm, "rms_norm")
_register(nn.MultiheadAttention, "projections and fused attention", _attention, ("out_proj",), projects=_itself)
_BLOCK = ("linear1", "activation", "dropout", "linear2", "dropout1", "dropout2", "dropout3")
_LAYER = "attention, sums with LayerNorm, and feed-forward"
_register(nn.TransformerEncoderLayer, _LAYER, _nested, _BLOCK)
_register(nn.TransformerDecoderLayer, _LAYER, covers=_BLOCK)
_register(nn.TransformerEncoder, "the stack of tfm_kernels.nn")
_register(nn.TransformerDecoder, "the stack of tfm_kernels.nn")
_register(nn.Transformer, "the encoder-decoder of tfm_kernels.nn")
register_recipe(
    Recipe("torch.nn.Linear", _is_linear, _linear, "the product that suits its rows", projects=_itself), first=False
)
LINEARS.append(swap.fused_class(nn.Linear, "torch.nn.Linear"))
CHAINED.append(swap.fused_class(nn.TransformerEncoderLayer, "torch.nn.TransformerEncoderLayer"))
