"""BERT and the families whose code is the same to the letter: RoBERTa, XLM-R, CamemBERT, Electra, MiniLM ...

Two recipes: the whole layer, and the stack of layers, which runs padded batches packed. Those of bert_output.py serve
the calls in which a layer falls back.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..nn.packed import Packed
from . import block, guard, huggingface
from .bert_output import (
    FEED_FORWARD_CHUNK,
    INTERMEDIATE,
    OUTPUT,
    RECIPES,
    add_norm,
    feed_forward,
    feed_forward_chunk,
    inside,
)
from .known import Known
from .linear import linear
from .registry import Recipe, register_recipe
from .source import says
from .swap import fell_back, options

# fingerprints of transformers 5.23, and of 5.24, where past_key_values became cache (source.py); another version's code
# is known only where it says the same
LAYER = ("ac84bc5ca61e", "3da62b003544")
ATTENTION = ("574dc55f2d17", "905233ba672e")
SELF_ATTENTION = ("65540536d70a", "ca77032cb4b2")
ENCODER = ("b5fa78c781c0", "9622372856dc")

_LAYER = Known(
    {
        "forward": LAYER,
        "feed_forward_chunk": FEED_FORWARD_CHUNK,
        "attention.forward": ATTENTION,
        "attention.self.forward": SELF_ATTENTION,
        "attention.output.forward": OUTPUT,
        "intermediate.forward": INTERMEDIATE,
        "output.forward": OUTPUT,
    },
    {
        "attention.self.query": nn.Linear,
        "attention.self.key": nn.Linear,
        "attention.self.value": nn.Linear,
        "attention.self.dropout": nn.Dropout,
        "attention.output.dense": nn.Linear,
        "attention.output.LayerNorm": nn.LayerNorm,
        "attention.output.dropout": nn.Dropout,
        "intermediate.dense": nn.Linear,
        "output.dense": nn.Linear,
        "output.LayerNorm": nn.LayerNorm,
        "output.dropout": nn.Dropout,
    },
    ("attention", "attention.self", "attention.output", "intermediate", "output"),
    "intermediate.intermediate_act_fn",
)


def _why_not_layer(layer: Any, encoder_hidden_states: Any, cache: Any, kwargs: dict[str, Any]) -> str | None:
    if encoder_hidden_states is not None or cache is not None:
        return "it was called with encoder_hidden_states or a cache"
    reason = _LAYER.why_not(layer)
    if reason is not None:
        return reason
    if layer.chunk_size_feed_forward:
        return "config.chunk_size_feed_forward is set"
    if not huggingface.attends(layer.attention.self):
        return "its model's attention implementation was set to another one"
    if huggingface.wants_weights(kwargs):
        return "output_attentions was asked for"
    return huggingface.unknown_keywords(kwargs)


def _fuse_layer(original: Any) -> type:
    keyword = huggingface.cache_keyword(original)

    class Fused(original):
        def forward(
            self,
            hidden_states: Tensor,
            attention_mask: Any = None,
            encoder_hidden_states: Tensor | None = None,
            encoder_attention_mask: Any = None,
            cache: Any = None,
            **kwargs: Any,
        ) -> Tensor:
            cache = huggingface.cache_of(cache, kwargs)
            if not isinstance(attention_mask, Packed):  # the encoder that packed has asked already
                if fell_back(self, _why_not_layer(self, encoder_hidden_states, cache, kwargs)):
                    return super().forward(
                        hidden_states,
                        attention_mask,
                        encoder_hidden_states,
                        encoder_attention_mask=encoder_attention_mask,
                        **{keyword: cache},
                        **kwargs,
                    )
            return _layer(self, hidden_states, attention_mask, kwargs)

        def feed_forward_chunk(self, attention_output: Tensor) -> Tensor:
            return feed_forward_chunk(self, attention_output, super().feed_forward_chunk)

    return Fused


def _layer(self: Any, x: Tensor, mask: Any, kwargs: dict[str, Any]) -> Tensor:
    """x = LN(x + dropout(out(attention(x)))); x = LN(x + dropout(ffn(x)))."""
    attention, output, backend = self.attention.self, self.attention.output, options(self).backend
    rows = mask.index if isinstance(mask, Packed) else None
    context = block.self_attention(
        x,
        (attention.query, attention.key, attention.value),
        attention.num_attention_heads,
        huggingface.causal_if_unmasked(attention, mask, x.shape[-2], kwargs),
        scale=attention.scaling,
        dropout_p=attention.dropout.p if attention.training else 0.0,
        backend=backend,
    )
    x = add_norm(output, linear(context, output.dense), x, rows, backend)
    return feed_forward(self, x, rows, backend)


# --- the stack --------------------------------------------------------------------------------------------------------


def _recognise_encoder(module: nn.Module) -> bool | str:
    if not isinstance(module._modules.get("layer"), nn.ModuleList) or len(module._modules) != 1:
        return False
    if not all(_LAYER.recognise(layer) for layer in module.layer):  # type: ignore[union-attr]
        return False
    return says(module, "forward", *ENCODER) or guard.UNKNOWN_FORWARD


def _fuse_encoder(original: Any) -> type:
    keyword = huggingface.cache_keyword(original)

    class Fused(original):
        def forward(
            self,
            hidden_states: Tensor,
            attention_mask: Any = None,
            encoder_hidden_states: Tensor | None = None,
            encoder_attention_mask: Any = None,
            cache: Any = None,
            use_cache: bool | None = None,
            **kwargs: Any,
        ) -> Any:
            cache = huggingface.cache_of(cache, kwargs)

            def why_not(layer: nn.Module) -> str | None:
                return _why_not_layer(layer, encoder_hidden_states, cache, kwargs)

            packed = huggingface.packing(self, attention_mask, hidden_states, self.layer, why_not)
            if packed is None:
                return super().forward(
                    hidden_states,
                    attention_mask,
                    encoder_hidden_states,
                    encoder_attention_mask=encoder_attention_mask,
                    use_cache=use_cache,
                    **{keyword: cache},
                    **kwargs,
                )
            kwargs.pop("position_ids", None)
            outputs = super().forward(packed.pack(hidden_states), packed, **kwargs)
            outputs.last_hidden_state = packed.unpack(outputs.last_hidden_state)
            return outputs

    return Fused


def _projections(layer: Any) -> list[nn.Module]:
    attention = layer.attention.self
    return [attention.query, attention.key, attention.value, layer.attention.output.dense]


register_recipe(
    Recipe(
        "bert.encoder", _recognise_encoder, _fuse_encoder, "padded batches run packed; padded positions give 0",
        packs=True,
    ),
    first=False,
)  # fmt: skip
register_recipe(
    Recipe(
        "bert.layer", _LAYER.recognise, _fuse_layer,
        "projections, attention, sum and LayerNorm, feed-forward, sum and LayerNorm", inside(_LAYER),
        projects=_projections,
    ),
    first=False,
)  # fmt: skip
for _recipe in RECIPES:
    register_recipe(_recipe, first=False)
