"""The stacks inside the models, built from their configurations."""

from __future__ import annotations

from typing import Any

from torch import nn

from .. import nn as fused
from .config import StackConfig


def encoder(config: StackConfig, num_layers: int, **factory: Any) -> fused.TransformerEncoder:
    """A stack of encoder layers, its matrices drawn by Xavier's rule, as torch.nn.Transformer draws them."""
    stack = _stack(fused.TransformerEncoder, fused.TransformerEncoderLayer, config, num_layers, factory)
    for parameter in stack.parameters():
        if parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter)
    return stack


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
