"""BERT and the families whose code is the same to the letter: RoBERTa, XLM-R, CamemBERT, Electra, MiniLM ...

Two recipes: the whole layer, and the stack of layers, which runs padded batches packed. Those of bert_output.py serve
the calls in which a layer falls back.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from . import block, guard, huggingface
from .bert_output import FEED_FORWARD_CHUNK, INTERMEDIATE, OUTPUT, RECIPES, add_norm, feed_forward, feed_forward_chunk
from .linear import linear
from .packed import Packed
from .registry import Recipe, register_recipe
from .source import has_children, says
from .swap import fell_back, options

# fingerprints of transformers 5.23 (source.py); another version's code is known only where it says the same
LAYER = "ac84bc5ca61e"
ATTENTION = "574dc55f2d17"
SELF_ATTENTION = "65540536d70a"
ENCODER = "b5fa78c781c0"

_LINEARS = (
    *("attention.self.query", "attention.self.key", "attention.self.value"),
    *("attention.output.dense", "intermediate.dense", "output.dense"),
)
_NORMS = ("attention.output.LayerNorm", "output.LayerNorm")
_DROPOUTS = ("attention.self.dropout", "attention.output.dropout", "output.dropout")
_HOLDERS = ("attention", "attention.self", "attention.output", "intermediate", "output")


# --- the layer --------------------------------------------------------------------------------------------------------


def _recognise_layer(module: nn.Module) -> bool | str:
    if not has_children(module, "attention.self", "attention.output", "intermediate", "output"):
        return False
    known = (
        says(module, "forward", LAYER)
        and says(module, "feed_forward_chunk", FEED_FORWARD_CHUNK)
        and says(module.attention, "forward", ATTENTION)
        and says(module.attention.self, "forward", SELF_ATTENTION)  # type: ignore[union-attr]
        and says(module.attention.output, "forward", OUTPUT)  # type: ignore[union-attr]
        and says(module.intermediate, "forward", INTERMEDIATE)
        and says(module.output, "forward", OUTPUT)
    )
    if not known:
        return guard.UNKNOWN_FORWARD
    return why_not_children(module) or True


def why_not_children(layer: Any) -> str | None:
    """None where a fused layer may read all its children's weights, else why not."""
    if guard.hooked_everywhere():
        return guard.GLOBAL_HOOKS
    for paths, cls in ((_LINEARS, nn.Linear), (_NORMS, nn.LayerNorm), (_DROPOUTS, nn.Dropout)):
        for path in paths:
            reason = guard.why_not_plain(layer, path, cls)
            if reason is not None:
                return reason
    for path in _HOLDERS:
        if guard.hooked(guard.child(layer, path)):
            return f"{path} has hooks"
    return block.why_not_activation(layer.intermediate.intermediate_act_fn)


def _why_not_layer(layer: Any, encoder_hidden_states: Any, past_key_values: Any, kwargs: dict[str, Any]) -> str | None:
    if encoder_hidden_states is not None or past_key_values is not None:
        return "it was called with encoder_hidden_states or past_key_values"
    if layer.chunk_size_feed_forward:
        return "config.chunk_size_feed_forward is set"
    if not huggingface.is_ours(layer.attention.self.config):
        return "its model's attention implementation was set to another one"
    if huggingface.wants_weights(kwargs):
        return "output_attentions was asked for"
    return huggingface.unknown_keywords(kwargs) or why_not_children(layer)


def _fuse_layer(original: Any) -> type:
    class Fused(original):
        def forward(
            self,
            hidden_states: Tensor,
            attention_mask: Any = None,
            encoder_hidden_states: Tensor | None = None,
            encoder_attention_mask: Any = None,
            past_key_values: Any = None,
            **kwargs: Any,
        ) -> Tensor:
            if not isinstance(attention_mask, Packed):  # the encoder that packed has asked already
                reason = _why_not_layer(self, encoder_hidden_states, past_key_values, kwargs)
                if reason is not None:
                    fell_back(self, reason)
                    return super().forward(
                        hidden_states,
                        attention_mask,
                        encoder_hidden_states,
                        encoder_attention_mask=encoder_attention_mask,
                        past_key_values=past_key_values,
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
    if not all(_recognise_layer(layer) for layer in module.layer):  # type: ignore[union-attr]
        return False
    return says(module, "forward", ENCODER) or guard.UNKNOWN_FORWARD


def _fuse_encoder(original: Any) -> type:
    class Fused(original):
        def forward(
            self,
            hidden_states: Tensor,
            attention_mask: Any = None,
            encoder_hidden_states: Tensor | None = None,
            encoder_attention_mask: Any = None,
            past_key_values: Any = None,
            use_cache: bool | None = None,
            **kwargs: Any,
        ) -> Any:
            def why_not(layer: nn.Module) -> str | None:
                return _why_not_layer(layer, encoder_hidden_states, past_key_values, kwargs)

            packed = huggingface.packing(self, attention_mask, hidden_states, self.layer, why_not)
            if packed is None:
                return super().forward(
                    hidden_states,
                    attention_mask,
                    encoder_hidden_states,
                    encoder_attention_mask=encoder_attention_mask,
                    past_key_values=past_key_values,
                    use_cache=use_cache,
                    **kwargs,
                )
            kwargs.pop("position_ids", None)
            outputs = super().forward(packed.pack(hidden_states), packed, **kwargs)
            outputs.last_hidden_state = packed.unpack(outputs.last_hidden_state)
            return outputs

    return Fused


def _layer_children(layer: Any) -> list[nn.Module]:
    """What a fused layer runs itself; the two outputs get a recipe of their own, for the calls that fall back."""
    held = [guard.child(layer, path) for path in (*_LINEARS, *_NORMS, *_DROPOUTS, *_HOLDERS[:2])]
    return [*held, layer.intermediate, *layer.intermediate.children()]


register_recipe(
    Recipe(
        "bert.encoder", _recognise_encoder, _fuse_encoder, "padded batches run packed; padded positions give 0",
        packs=True,
    ),
    first=False,
)  # fmt: skip
register_recipe(
    Recipe(
        "bert.layer", _recognise_layer, _fuse_layer,
        "projections, attention, sum and LayerNorm, feed-forward, sum and LayerNorm", _layer_children,
    ),
    first=False,
)  # fmt: skip
for _recipe in RECIPES:
    register_recipe(_recipe, first=False)
