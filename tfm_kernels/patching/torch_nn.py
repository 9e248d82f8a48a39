"""torch.nn's attention, norms and Transformer layers become those of tfm_kernels.nn, which have the same state."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .. import nn as fused
from .recipe import Recipe, register_recipe


def _same(original: type) -> type:
    return getattr(fused, original.__name__)


def _nested(original: Any) -> type:
    """Nested tensors, which a torch.nn.TransformerEncoder in other hands may pass on, keep torch's own code."""

    class Fused(getattr(fused, original.__name__)):  # type: ignore[misc]
        def forward(self, query: Tensor, *args: Any, **kwargs: Any) -> Any:
            if query.is_nested:
                return original.forward(self, query, *args, **kwargs)
            return super().forward(query, *args, **kwargs)

    return Fused


def _register(cls: type, what: str, fuse: Any = _same) -> None:
    def recognise(module: nn.Module) -> bool:
        return type(module) is cls

    register_recipe(Recipe(f"torch.nn.{cls.__name__}", recognise, fuse, what), first=False)


_register(nn.LayerNorm, "layer_norm")
_register(nn.RMSNorm, "rms_norm")
_register(nn.MultiheadAttention, "projections and fused attention", _nested)
_register(nn.TransformerEncoderLayer, "fused attention, sums with LayerNorm, and feed-forward", _nested)
_register(nn.TransformerDecoderLayer, "fused attention, sums with LayerNorm, and feed-forward")
_register(nn.TransformerEncoder, "the stack of tfm_kernels.nn")
_register(nn.TransformerDecoder, "the stack of tfm_kernels.nn")
_register(nn.Transformer, "the encoder-decoder of tfm_kernels.nn")
