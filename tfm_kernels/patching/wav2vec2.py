"""Wav2Vec2, those that share its code (HuBERT, UniSpeech, SEW, Data2Vec's audio), WavLM: their layers' sums and norms.

Attention and the feed-forward block are called as they are and have recipes of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from . import block, huggingface
from .known import Known
from .registry import Recipe, register_recipe
from .swap import fell_back, options

# fingerprints of transformers 5.24 (source.py): of the family, of WavLM, which hands its position bias on
POST_NORM = ("098928359ff3", "0f654c42a6d1")
PRE_NORM = ("3c49f8e4faa3", "b4cfab8b3a5d")  # "stable" layers

_READS = {"dropout": nn.Dropout, "final_layer_norm": nn.LayerNorm}
_CALLS = ("attention", "feed_forward")
_POST_NORM, _WAVLM_POST_NORM = (
    Known({"forward": code}, {**_READS, "layer_norm": nn.LayerNorm}, calls=_CALLS, shares=True) for code in POST_NORM
)
_PRE_NORM, _WAVLM_PRE_NORM = (
    Known({"forward": code}, _READS, calls=(*_CALLS, "layer_norm"), shares=True) for code in PRE_NORM
)


def _post_norm(layer: Any, x: Tensor, told: dict[str, Any]) -> tuple[Tensor, Any]:
    """x = LN(x + dropout(attention(x))); x = LN(x + ffn(x)); and what attention gives last."""
    backend = options(layer).backend
    attended, *_, given = layer.attention(x, **told)
    p = block.dropout_p(layer.dropout)
    x = block.norm_of_sum(attended, x, layer.layer_norm, dropout_p=p, backend=backend)
    return block.norm_of_sum(layer.feed_forward(x), x, layer.final_layer_norm, backend=backend), given


def _pre_norm(layer: Any, x: Tensor, told: dict[str, Any]) -> tuple[Tensor, Any]:
    """x = x + dropout(attention(LN(x))); x = x + ffn(LN(x)); and what attention gives last."""
    attended, *_, given = layer.attention(layer.layer_norm(x), **told)
    p, backend = block.dropout_p(layer.dropout), options(layer).backend
    y, z = block.add_norm(attended, x, layer.final_layer_norm, dropout_p=p, backend=backend)
    z = z + layer.feed_forward(y)
    adapter = getattr(layer, "adapter_layer", None)
    return z if adapter is None else z + adapter(z), given


def _fuse(known: Known, run: Callable[..., tuple[Tensor, Any]], with_bias: bool) -> Callable[[Any], type]:
    def fuse(original: Any) -> type:
        named = huggingface.named_arguments(original)

        class Fused(original):
            def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
                told = named(args, kwargs)
                if fell_back(self, known.why_not(self)):
                    return super().forward(hidden_states, **told)
                x, given = run(self, hidden_states, told)
                return (x, given) if with_bias else x

        return Fused

    return fuse


for _name, _known, _run, _with_bias in (
    ("wav2vec2.layer", _POST_NORM, _post_norm, False),
    ("wav2vec2.stable_layer", _PRE_NORM, _pre_norm, False),
    ("wavlm.layer", _WAVLM_POST_NORM, _post_norm, True),
    ("wavlm.stable_layer", _WAVLM_PRE_NORM, _pre_norm, True),
):
    _what = "sums with LayerNorm" if _run is _post_norm else "sum and LayerNorm in one pass"
    register_recipe(Recipe(_name, _known.recognise, _fuse(_known, _run, _with_bias), _what, _known.covers), first=False)
