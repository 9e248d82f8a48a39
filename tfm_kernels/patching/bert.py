"""BERT and the families whose code is the same to the letter: RoBERTa, XLM-R, CamemBERT, Electra, MiniLM ...

Three recipes: the whole layer; LayerNorm(dropout(dense(x)) + residual), which serves the layers whose other parts must
keep their own code; and the stack of layers, which runs padded batches packed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from . import block, guard, huggingface
from .packed import Packed
from .recipe import Recipe, register_recipe
from .source import fingerprint
from .swap import fell_back, options, original_class

# fingerprints of transformers 5.23 (source.py); another version's code is known only where it says the same
OUTPUT = "bd131388eee1"
INTERMEDIATE = "8e7087e943e0"
FEED_FORWARD_CHUNK = "7d18a4174290"
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


def says(module: Any, method: str, *known: str) -> bool:
    """Whether a module's own class has exactly the known code for ``method``, and is called in the ordinary way."""
    cls = original_class(module)
    return cls.__call__ is nn.Module.__call__ and fingerprint(getattr(cls, method, len)) in known


def has_children(module: nn.Module, *names: str) -> bool:
    """Whether the module has children at these dotted paths."""
    for name in names:
        inner: Any = module
        for part in name.split("."):
            inner = getattr(inner, "_modules", {}).get(part)
        if inner is None:
            return False
    return True


# --- LayerNorm(dropout(dense(x)) + residual) --------------------------------------------------------------------------


def _recognise_output(module: nn.Module) -> bool | str:
    if not has_children(module, "dense", "LayerNorm", "dropout") or len(module._modules) != 3:
        return False
    if not says(module, "forward", OUTPUT):
        return guard.UNKNOWN_FORWARD
    return _why_not_output(module) or True


def _why_not_output(module: nn.Module) -> str | None:
    if guard.hooked_everywhere():
        return guard.GLOBAL_HOOKS
    return guard.why_not_plain(module, "LayerNorm", nn.LayerNorm) or guard.why_not_plain(module, "dropout", nn.Dropout)


def _fuse_output(original: Any) -> type:
    class Fused(original):
        def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
            reason = _why_not_output(self)
            if reason is not None:
                fell_back(self, reason)
                return super().forward(hidden_states, input_tensor)
            p, backend = block.dropout_p(self.dropout), options(self).backend
            return block.add_norm(self.dense(hidden_states), input_tensor, self.LayerNorm, dropout_p=p, backend=backend)

    return Fused


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
            return _feed_forward_chunk(self, attention_output, super().feed_forward_chunk)

    return Fused


def _recognise_feed_forward(module: nn.Module) -> bool | str:
    if not has_children(module, "intermediate.dense", "output.dense", "output.LayerNorm", "output.dropout"):
        return False
    known = (
        says(module, "feed_forward_chunk", FEED_FORWARD_CHUNK)
        and says(module.intermediate, "forward", INTERMEDIATE)
        and says(module.output, "forward", OUTPUT)
    )
    return (_why_not_feed_forward(module) or True) if known else guard.UNKNOWN_FORWARD


def _why_not_feed_forward(layer: Any) -> str | None:
    if guard.hooked_everywhere():
        return guard.GLOBAL_HOOKS
    if guard.hooked(layer.intermediate) or guard.hooked(layer.output):
        return "intermediate or output has hooks"
    return (
        guard.why_not_plain(layer, "intermediate.dense", nn.Linear)
        or guard.why_not_plain(layer, "output.dense", nn.Linear)
        or guard.why_not_plain(layer, "output.LayerNorm", nn.LayerNorm)
        or guard.why_not_plain(layer, "output.dropout", nn.Dropout)
        or block.why_not_activation(layer.intermediate.intermediate_act_fn)
    )


def _fuse_feed_forward(original: Any) -> type:
    class Fused(original):
        def feed_forward_chunk(self, attention_output: Tensor) -> Tensor:
            return _feed_forward_chunk(self, attention_output, super().feed_forward_chunk)

    return Fused


def _feed_forward_chunk(self: Any, x: Tensor, original: Callable[[Tensor], Tensor]) -> Tensor:
    reason = _why_not_feed_forward(self)
    if reason is not None:
        fell_back(self, reason)
        return original(x)
    return _feed_forward(self, x, None, options(self).backend)


def _feed_forward(self: Any, x: Tensor, rows: Tensor | None, backend: str | None) -> Tensor:
    name: Any = block.activation(self.intermediate.intermediate_act_fn)
    y = block.feed_forward(x, self.intermediate.dense, self.output.dense, name, backend=backend)
    return _add_norm(self.output, y, x, rows, backend)


def _layer(self: Any, x: Tensor, mask: Any, kwargs: dict[str, Any]) -> Tensor:
    """x = LN(x + dropout(out(attention(x)))); x = LN(x + dropout(ffn(x)))."""
    attention, backend = self.attention.self, options(self).backend
    q, k, v = (block.linear(x, layer) for layer in (attention.query, attention.key, attention.value))
    q, k, v = (block.split_heads(t, attention.num_attention_heads) for t in (q, k, v))
    p = attention.dropout.p if attention.training else 0.0
    mask = huggingface.causal_if_unmasked(attention, mask, q, kwargs)
    context = block.attend(q, k, v, mask, scale=attention.scaling, dropout_p=p, backend=backend)
    out, rows = self.attention.output, mask.index if isinstance(mask, Packed) else None
    x = _add_norm(out, block.linear(block.merge_heads(context), out.dense), x, rows, backend)
    return _feed_forward(self, x, rows, backend)


def _add_norm(output: Any, x: Tensor, residual: Tensor, rows: Tensor | None, backend: str | None) -> Tensor:
    p = block.dropout_p(output.dropout)
    return block.add_norm(x, residual, output.LayerNorm, dropout_p=p, dropout_rows=rows, backend=backend)


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


def _layer_children(layer: nn.Module) -> list[nn.Module]:
    return [guard.child(layer, path) for path in (*_LINEARS, *_NORMS, *_DROPOUTS, *_HOLDERS)] + [
        inner
        for inner in layer.intermediate.children()  # type: ignore[union-attr]
    ]


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
register_recipe(
    Recipe(
        "bert.feed_forward", _recognise_feed_forward, _fuse_feed_forward, "feed-forward, sum and LayerNorm",
        lambda layer: [guard.child(layer, path) for path in ("intermediate", *_LINEARS[4:])],
    ),
    first=False,
)  # fmt: skip
register_recipe(
    Recipe(
        "bert.output", _recognise_output, _fuse_output, "dropout, sum and LayerNorm in one pass",
        lambda module: [module.LayerNorm, module.dropout],  # type: ignore[list-item]
    ),
    first=False,
)  # fmt: skip
