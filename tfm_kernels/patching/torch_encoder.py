"""torch.nn.TransformerEncoder: padded batches run packed through its layers.

Inside a torch.nn.Transformer only where the decoder does not see the padding, which is 0 after a packed run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .. import nn as fused
from ..mask import Mask
from ..nn.attention import causal_hint
from . import block, guard
from .packed import packing
from .registry import Recipe, register_recipe
from .swap import original_class

_DROPOUTS = ("dropout", "dropout1", "dropout2")


def _recognise(module: nn.Module) -> bool:
    return type(module) is nn.TransformerEncoder


def _why_not(layer: Any) -> str | None:
    """None where a layer may run on packed tokens: every part of it then works row by row, attention aside."""
    if guard.hooked_everywhere():
        return guard.GLOBAL_HOOKS
    if original_class(layer) is not nn.TransformerEncoderLayer:
        return f"it is {type(layer).__name__}, not TransformerEncoderLayer"
    attention = layer.self_attn
    if not isinstance(attention, fused.MultiheadAttention):
        return "its attention is not fused"
    if attention.bias_k is not None or attention.add_zero_attn or not attention._qkv_same_embed_dim:
        return "its attention has add_bias_kv, add_zero_attn, kdim or vdim"
    reason = guard.why_not_plain(layer, "self_attn", nn.MultiheadAttention)
    linears = (nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear)
    for path in ("linear1", "linear2", "self_attn.out_proj"):
        reason = reason or guard.why_not_plain(layer, path, *linears)
    for path in ("norm1", "norm2"):
        reason = reason or guard.why_not_plain(layer, path, nn.LayerNorm)
    for path in _DROPOUTS:
        reason = reason or guard.why_not_plain(layer, path, nn.Dropout)
    if any(name in layer.__dict__ for name in ("_sa_block", "_ff_block")):
        reason = reason or "its blocks were replaced"
    return reason or block.why_not_activation(layer.activation)


def _why_not_norm(stack: Any) -> str | None:
    """None where the last norm works row by row and nobody watches it."""
    return None if stack.norm is None else guard.why_not_plain(stack, "norm", nn.LayerNorm, nn.RMSNorm)


def _fuse(original: type) -> type:
    class Fused(fused.TransformerEncoder):
        packs = True

        def forward(
            self,
            src: Tensor,
            mask: Any = None,
            src_key_padding_mask: Tensor | None = None,
            is_causal: bool | None = None,
            *,
            padded: str | None = None,  # why the caller needs the values at padded positions
        ) -> Tensor:
            hint = causal_hint(mask, is_causal)
            padding = src_key_padding_mask
            packs = padding is not None and padding.dtype == torch.bool and src.dim() == 3 and padding.dim() == 2
            if packs and (mask is None or hint):
                assert padding is not None
                batch_first = self.layers[0].self_attn.batch_first if len(self.layers) else True
                hidden = Mask.hide(padding[:, None, None, :])
                reason = padded or _why_not_norm(self)
                packed = packing(self, hidden, src, self.layers, _why_not, reason, batch_first=batch_first)
                if packed is not None:
                    told = replace(packed, sight=Mask.causal()) if hint else packed
                    return packed.unpack(super().forward(packed.pack(src), told))
            return super().forward(src, mask, padding, is_causal)

    return Fused


# --- the encoder-decoder ----------------------------------------------------------------------------------------------


def _recognise_transformer(module: nn.Module) -> bool:
    return type(module) is nn.Transformer and original_class(module.encoder) is nn.TransformerEncoder


def _fuse_transformer(original: type) -> type:
    class Fused(fused.Transformer):
        def _encode(
            self, src: Tensor, mask: Any, key_padding_mask: Any, is_causal: bool | None, memory_key_padding_mask: Any
        ) -> Tensor:
            masks = key_padding_mask, memory_key_padding_mask
            if not getattr(self.encoder, "packs", False) or guard.tracing(src) or _unseen(*masks):
                return super()._encode(src, mask, key_padding_mask, is_causal, memory_key_padding_mask)
            told = {"padded": "memory_key_padding_mask shows what src_key_padding_mask hides"}
            return self.encoder(src, mask=mask, src_key_padding_mask=key_padding_mask, is_causal=is_causal, **told)

    return Fused


def _unseen(padding: Tensor | None, across: Tensor | None) -> bool:
    """Whether all that ``padding`` (B, T) hides from the encoder ``across`` hides from the decoder."""
    if padding is None or padding is across:
        return True
    if across is None or across.shape != padding.shape or across.device != padding.device:
        return False
    hidden = across if across.dtype == torch.bool else across == -torch.inf
    return padding.dtype == torch.bool and not bool((padding & ~hidden).any())


register_recipe(
    Recipe(
        "torch.nn.Transformer.packed", _recognise_transformer, _fuse_transformer,
        "the encoder-decoder of tfm_kernels.nn; padding that the decoder sees keeps its values", packs=True,
    ),
    first=False,
)  # fmt: skip
register_recipe(
    Recipe(
        "torch.nn.TransformerEncoder.packed", _recognise, _fuse,
        "the stack of tfm_kernels.nn; padded batches run packed; padded positions give 0", packs=True,
    ),
    first=False,
)  # fmt: skip
