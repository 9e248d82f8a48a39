"""BART, Marian and their relatives: post-norm layers; and the pre-norm encoder layer of MBART and Whisper.

The attention modules are called as they are (they know their caches) and reach the fused attention through
transformers' registry; the layers around them are fused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from . import block, huggingface
from .known import Known
from .registry import Recipe, register_recipe
from .swap import fell_back, options

# fingerprints of transformers 5.23, and of 5.24, where past_key_values became cache (source.py)
ENCODER_LAYER = "959b36eaa674"
DECODER_LAYER = ("af6bb23d8caf", "95c9ce9cc15d")
PRE_NORM_ENCODER_LAYER = "04ddee22248b"

_FFN = {"fc1": nn.Linear, "fc2": nn.Linear, "final_layer_norm": nn.LayerNorm}
_ENCODER = Known(
    {"forward": ENCODER_LAYER},
    {**_FFN, "self_attn_layer_norm": nn.LayerNorm},
    activation="activation_fn",
    calls=("self_attn",),
)
_DECODER = Known(
    {"forward": DECODER_LAYER},
    {**_FFN, "self_attn_layer_norm": nn.LayerNorm, "encoder_attn_layer_norm": nn.LayerNorm},
    activation="activation_fn",
    calls=("self_attn", "encoder_attn"),
)
_PRE_NORM_ENCODER = Known(
    {"forward": PRE_NORM_ENCODER_LAYER}, _FFN, activation="activation_fn", calls=("self_attn", "self_attn_layer_norm")
)


def _p(layer: Any, name: str) -> float:
    return getattr(layer, name) if layer.training else 0.0


def _told(layer: Any) -> dict[str, Any]:
    return {"dropout_p": _p(layer, "dropout"), "backend": options(layer).backend}


def _norm_of_sum(layer: Any, x: Tensor, residual: Tensor, norm: nn.Module) -> Tensor:
    return block.norm_of_sum(x, residual, norm, **_told(layer))


def feed_forward(layer: Any, known: Known, x: Tensor) -> Tensor:
    """fc2(dropout(activation(fc1(x)))) of a layer that has them as children."""
    name: Any = block.activation(known.function(layer))
    p = _p(layer, "activation_dropout") if hasattr(layer, "activation_dropout") else 0.0
    return block.feed_forward(x, layer.fc1, layer.fc2, name, dropout_p=p, backend=options(layer).backend)


def _clamped(x: Tensor) -> Tensor:
    """What the originals do against overflow in float16."""
    limit = torch.finfo(x.dtype).max - 1000
    return torch.clamp(x, min=-limit, max=limit)


def _fuse_encoder(original: Any) -> type:
    class Fused(original):
        def forward(self, hidden_states: Tensor, attention_mask: Any, **kwargs: Any) -> Tensor:
            if fell_back(self, _ENCODER.why_not(self)):
                return super().forward(hidden_states, attention_mask, **kwargs)
            attended, _ = self.self_attn(hidden_states, attention_mask=attention_mask, **kwargs)
            x = _norm_of_sum(self, attended, hidden_states, self.self_attn_layer_norm)
            x = _norm_of_sum(self, feed_forward(self, _ENCODER, x), x, self.final_layer_norm)
            if x.dtype == torch.float16 and not torch.isfinite(x).all():
                x = _clamped(x)
            return x

    return Fused


def _fuse_decoder(original: Any) -> type:
    keyword = huggingface.cache_keyword(original)

    class Fused(original):
        def forward(
            self,
            hidden_states: Tensor,
            attention_mask: Any = None,
            encoder_hidden_states: Tensor | None = None,
            encoder_attention_mask: Any = None,
            cache: Any = None,
            use_cache: bool | None = True,
            **kwargs: Any,
        ) -> Tensor:
            cached = {keyword: huggingface.cache_of(cache, kwargs)}
            if fell_back(self, _DECODER.why_not(self)):
                return super().forward(
                    hidden_states,
                    attention_mask,
                    encoder_hidden_states,
                    encoder_attention_mask,
                    use_cache=use_cache,
                    **cached,
                    **kwargs,
                )
            attended, _ = self.self_attn(hidden_states, attention_mask=attention_mask, **cached, **kwargs)
            x = _norm_of_sum(self, attended, hidden_states, self.self_attn_layer_norm)
            if encoder_hidden_states is not None:
                attended, _ = self.encoder_attn(
                    x,
                    key_value_states=encoder_hidden_states,
                    attention_mask=encoder_attention_mask,
                    **cached,
                    **kwargs,
                )
                x = _norm_of_sum(self, attended, x, self.encoder_attn_layer_norm)
            return _norm_of_sum(self, feed_forward(self, _DECODER, x), x, self.final_layer_norm)

    return Fused


def _fuse_pre_norm_encoder(original: Any) -> type:
    class Fused(original):
        def forward(self, hidden_states: Tensor, attention_mask: Any, **kwargs: Any) -> Tensor:
            if fell_back(self, _PRE_NORM_ENCODER.why_not(self)):
                return super().forward(hidden_states, attention_mask, **kwargs)
            attended, _ = self.self_attn(
                hidden_states=self.self_attn_layer_norm(hidden_states), attention_mask=attention_mask, **kwargs
            )
            x, z = block.add_norm(attended, hidden_states, self.final_layer_norm, **_told(self))
            y = feed_forward(self, _PRE_NORM_ENCODER, x)
            z = z + nn.functional.dropout(y, p=self.dropout, training=self.training)
            return _clamped(z) if z.dtype == torch.float16 else z

    return Fused


_WHAT = "sums with LayerNorm, and feed-forward"
for _name, _known, _fuse in (
    ("bart.encoder_layer", _ENCODER, _fuse_encoder),
    ("bart.decoder_layer", _DECODER, _fuse_decoder),
    ("mbart.encoder_layer", _PRE_NORM_ENCODER, _fuse_pre_norm_encoder),
):
    register_recipe(Recipe(_name, _known.recognise, _fuse, _WHAT, _known.covers), first=False)
