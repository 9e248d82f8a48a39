"""The stacks inside the models, built from their configurations, and their way past padding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from .. import nn as fused
from ..mask import Mask
from ..nn.packed import Packed
from .config import StackConfig
from .padding import Padding


def encoder(config: StackConfig, num_layers: int, **factory: Any) -> fused.TransformerEncoder:
    """A stack of encoder layers, its matrices drawn by Xavier's rule, as torch.nn.Transformer draws them."""
    stack = _stack(fused.TransformerEncoder, fused.TransformerEncoderLayer, config, num_layers, factory)
    for parameter in stack.parameters():
        if parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter)
    return stack


def encoded(stack: fused.TransformerEncoder, x: Tensor, found: Padding, sight: Mask | None = None) -> Tensor:
    """What an encoder makes of ``x`` (B, T, E), and 0 at padding; where that is known to stand behind, at no cost.

    Args:
        stack: the encoder.
        x: embedded tokens.
        found: their padding.
        sight: what every position may see where there is no padding, None for everything.
    """
    if found.keep is None:
        return stack(x, mask=sight)
    packed = packing(stack, found, sight)
    if packed is not None:
        return packed.unpack(stack(packed.pack(x), mask=packed))
    return stack(x, mask=found.hidden_from(sight)).masked_fill(~found.keep.unsqueeze(-1), 0.0)


def packing(stack: Any, found: Padding, sight: Mask | None) -> Packed | None:
    """How a batch runs packed through a stack, which may be another than the model was built with; None: it does not.

    It does where padding is known to stand behind the tokens, nobody could tell, and ``sight`` is the same in each row.
    """
    alike = sight is None or (sight.key_lengths is None and sight.keep_matrix is None)
    ours = isinstance(stack, (fused.TransformerEncoder, fused.TransformerDecoder))
    if found.keep is None or not (found.is_behind and alike and ours and stack.takes_packed()):
        return None
    return Packed.of(found.keep, sight=sight)


def decoded(stack: fused.TransformerDecoder, x: Tensor, found: Padding, memory: Tensor, source: Padding) -> Tensor:
    """What a decoder makes of ``x`` (B, Tt, E), and 0 at padding; where all is known to stand behind, at no cost.

    Args:
        stack: the decoder.
        x: embedded tokens.
        found: their padding.
        memory: (B, Ts, E), of the encoder.
        source: its padding.
    """
    packed = packing(stack, found, Mask.causal()) if source.mask is None or source.is_behind else None
    if packed is not None:
        keys = Packed.of(packed.index.new_ones(memory.shape[:2]).bool() if source.keep is None else source.keep)
        across = replace(packed, sight=None, keys=keys)
        return packed.unpack(stack(packed.pack(x), keys.pack(memory), tgt_mask=packed, memory_mask=across))
    y = stack(x, memory, tgt_mask=found.hidden_from(Mask.causal()), memory_mask=source.mask)
    return y if found.keep is None else y.masked_fill(~found.keep.unsqueeze(-1), 0.0)


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
