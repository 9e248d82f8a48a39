"""The stacks inside the models, built from their configurations, and their way past padding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .. import nn as fused
from ..mask import Mask
from ..nn.packed import Packed
from .config import StackConfig
from .padding import Padding

# Packing takes 0.13 ms of a call's time, and some passes over its tokens: so many have to be padding, and such a share
LEAST = 64
_SHARE = 1 / 16


def encoder(config: StackConfig, num_layers: int, **factory: Any) -> fused.TransformerEncoder:
    """A stack of encoder layers, its matrices drawn by Xavier's rule, as torch.nn.Transformer draws them."""
    stack = _stack(fused.TransformerEncoder, fused.TransformerEncoderLayer, config, num_layers, factory)
    for parameter in stack.parameters():
        if parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter)
    return stack


def encoded(stack: fused.TransformerEncoder, x: Tensor, found: Padding, sight: Mask | None = None) -> Tensor:
    """What an encoder makes of ``x`` (B, T, E), and 0 behind the last token of a row, at no cost where that is known.

    Args:
        stack: the encoder.
        x: embedded tokens.
        found: their padding.
        sight: what every position may see where there is no padding, None for everything.
    """
    packed = packing(stack, found, sight)
    if packed is not None:
        return packed.unpack(stack(packed.pack(x), mask=packed))
    return found.cleared(stack(x, mask=found.hidden_from(sight)))


def packing(stack: Any, found: Padding, sight: Mask | None) -> Packed | None:
    """How a batch runs packed through a stack, which may be another than the model was built with; None: it does not.

    It does where padding is known to stand behind the tokens and is worth it, nobody could tell, and ``sight`` is the
    same in each row.
    """
    keep = found.behind()
    if keep is None or not (sight is None or (sight.key_lengths is None and sight.keep_matrix is None)):
        return None
    hidden = keep.numel() - int(keep.sum())
    ours = isinstance(stack, (fused.TransformerEncoder, fused.TransformerDecoder))
    if hidden < LEAST or hidden < _SHARE * keep.numel() or not ours or not stack.takes_packed():
        return None
    return Packed.of(keep, sight=sight)


def decoded(
    stack: fused.TransformerDecoder, x: Tensor, found: Padding, memory: Tensor, memory_mask: Mask | None
) -> Tensor:
    """What a decoder makes of ``x`` (B, Tt, E), and 0 behind the last token of a row, at no cost where that is known.

    Args:
        stack: the decoder.
        x: embedded tokens.
        found: their padding.
        memory: (B, Ts, E), of the encoder.
        memory_mask: what of it every position may see, None for everything.
    """
    packed = packing(stack, found, Mask.causal()) if memory.shape[:1] == x.shape[:1] else None
    keep = None if packed is None else _seen(memory, memory_mask)
    if packed is not None and keep is not None:
        keys = Packed.of(keep)
        across = replace(packed, sight=None, keys=keys)
        return packed.unpack(stack(packed.pack(x), keys.pack(memory), tgt_mask=packed, memory_mask=across))
    return found.cleared(stack(x, memory, tgt_mask=found.hidden_from(Mask.causal()), memory_mask=memory_mask))


def _seen(memory: Tensor, mask: Mask | None) -> Tensor | None:
    """(B, Ts) bool, what a mask of lengths shows of the memory; None for other masks, and for what is refused."""
    batch, length = memory.shape[:2]
    if length == 0 or not (mask is None or isinstance(mask, Mask)):
        return None
    if mask is None or not mask.hides():
        return torch.ones(batch, length, dtype=torch.bool)
    lengths = mask.key_lengths
    if lengths is None or mask.keep_matrix is not None or mask.has_band():
        return None
    if lengths.shape != (batch,) or bool(((lengths < 0) | (lengths > length)).any()):
        return None
    return torch.arange(length) < lengths.unsqueeze(-1)


def encoder_decoder(config: StackConfig, encoder_layers: int, decoder_layers: int, **factory: Any) -> fused.Transformer:
    """Both stacks as a ``tfm_kernels.nn.Transformer``, which draws its matrices by Xavier's rule."""
    return fused.Transformer(
        config.d_model,
        config.nhead,
        custom_encoder=_stack(fused.TransformerEncoder, fused.TransformerEncoderLayer, config, encoder_layers, factory),
        custom_decoder=_stack(fused.TransformerDecoder, fused.TransformerDecoderLayer, config, decoder_layers, factory),
        batch_first=True,
    )


def _stack(stack: Any, layer: Any, config: StackConfig, num_layers: int, factory: dict[str, Any]) -> Any:
    first = layer(
        config.d_model,
        config.nhead,
        config.dim_feedforward,
        config.dropout,
        config.activation,
        config.layer_norm_eps,
        batch_first=True,
        norm_first=config.norm_first,
        bias=config.bias,
        **factory,
    )
    norm = fused.LayerNorm(config.d_model, config.layer_norm_eps, bias=config.bias, **factory)
    return stack(first, num_layers, norm if config.has_final_norm else None)
