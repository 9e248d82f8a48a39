"""ALBERT: its layer, and the stack that runs a few groups of layers many times, which runs padded batches packed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..nn.packed import Packed
from . import block, guard, huggingface
from .known import Known
from .linear import linear
from .registry import Recipe, register_recipe
from .source import says
from .swap import fell_back, options

# fingerprints of transformers 5.24 (source.py); another version's code is known only where it says the same
LAYER = "f3bfccfcfbe2"
FF_CHUNK = "de5bdb6d9e94"
ATTENTION = "40a63b6c678d"
GROUP = "fa7bcb3e56de"
STACK = "dafc0e37fb78"

_FFN = {"ffn": nn.Linear, "ffn_output": nn.Linear}
_FEED_FORWARD = Known({"ff_chunk": FF_CHUNK}, _FFN, (), "activation")
_LAYER = Known(
    {"forward": LAYER, "ff_chunk": FF_CHUNK, "attention.forward": ATTENTION},
    {
        "attention.query": nn.Linear,
        "attention.key": nn.Linear,
        "attention.value": nn.Linear,
        "attention.attention_dropout": nn.Dropout,
        "attention.dense": nn.Linear,
        "attention.output_dropout": nn.Dropout,
        "attention.LayerNorm": nn.LayerNorm,
        **_FFN,
        "full_layer_layer_norm": nn.LayerNorm,
    },
    ("attention",),
    "activation",
)


def _why_not(layer: Any, kwargs: dict[str, Any]) -> str | None:
    reason = _LAYER.why_not(layer)
    if reason is not None:
        return reason
    if layer.chunk_size_feed_forward:
        return "config.chunk_size_feed_forward is set"
    if not huggingface.attends(layer.attention):
        return "its model's attention implementation was set to another one"
    if huggingface.wants_weights(kwargs):
        return "output_attentions was asked for"
    return huggingface.unknown_keywords(kwargs)


def _fuse_layer(original: Any) -> type:
    class Fused(original):
        def forward(self, hidden_states: Tensor, attention_mask: Any = None, **kwargs: Any) -> Tensor:
            if not isinstance(attention_mask, Packed):  # the stack that packed has asked already
                if fell_back(self, _why_not(self, kwargs)):
                    return super().forward(hidden_states, attention_mask, **kwargs)
            return _layer(self, hidden_states, attention_mask, kwargs)

        def ff_chunk(self, attention_output: Tensor) -> Tensor:
            return _ff_chunk(self, attention_output, super().ff_chunk)

    return Fused


def _fuse_feed_forward(original: Any) -> type:
    class Fused(original):
        def ff_chunk(self, attention_output: Tensor) -> Tensor:
            return _ff_chunk(self, attention_output, super().ff_chunk)

    return Fused


def _ff_chunk(self: Any, x: Tensor, original: Callable[[Tensor], Tensor]) -> Tensor:
    """For the calls in which a layer falls back, and the layers whose attention holds adapters."""
    return original(x) if fell_back(self, _FEED_FORWARD.why_not(self)) else _feed_forward(self, x)


def _feed_forward(self: Any, x: Tensor) -> Tensor:
    name: Any = block.activation(self.activation)
    return block.feed_forward(x, self.ffn, self.ffn_output, name, backend=options(self).backend)


def _layer(self: Any, x: Tensor, mask: Any, kwargs: dict[str, Any]) -> Tensor:
    """x = LN(x + dropout(out(attention(x)))); x = LN(x + ffn(x))."""
    attention, backend = self.attention, options(self).backend
    context = block.self_attention(
        x,
        (attention.query, attention.key, attention.value),
        attention.num_attention_heads,
        huggingface.causal_if_unmasked(attention, mask, x.shape[-2], kwargs),
        scale=attention.scaling,
        dropout_p=block.dropout_p(attention.attention_dropout),
        backend=backend,
    )
    x = block.norm_of_sum(
        linear(context, attention.dense),
        x,
        attention.LayerNorm,
        dropout_p=block.dropout_p(attention.output_dropout),
        dropout_rows=mask.index if isinstance(mask, Packed) else None,
        backend=backend,
    )
    return block.norm_of_sum(_feed_forward(self, x), x, self.full_layer_layer_norm, backend=backend)


# --- the stack --------------------------------------------------------------------------------------------------------


def _layers(stack: Any) -> list[nn.Module]:
    return [layer for group in stack.albert_layer_groups for layer in group.albert_layers]


def _recognise_stack(module: nn.Module) -> bool | str:
    groups = module._modules.get("albert_layer_groups")
    if not isinstance(groups, nn.ModuleList) or "embedding_hidden_mapping_in" not in module._modules:
        return False
    if not all(isinstance(group._modules.get("albert_layers"), nn.ModuleList) for group in groups):
        return False
    if not all(_LAYER.recognise(layer) for layer in _layers(module)):
        return False
    if not says(module, "forward", STACK):
        return guard.UNKNOWN_FORWARD
    return _why_not_stack(module) or True


def _why_not_stack(stack: Any) -> str | None:
    """None where all that the stack calls beside its layers takes packed tokens for a batch, unwatched."""
    reason = guard.why_not_plain(stack, "embedding_hidden_mapping_in", nn.Linear)
    for number, group in enumerate(stack.albert_layer_groups if reason is None else ()):
        path = f"albert_layer_groups.{number}"
        reason = guard.why_not_left_alone(stack, path)
        if reason is None and not says(group, "forward", GROUP):
            reason = f"{path} is {type(group).__name__}, whose forward is not the known one"
        if reason is not None:
            break
    return reason


def _fuse_stack(original: Any) -> type:
    class Fused(original):
        def forward(self, hidden_states: Tensor, attention_mask: Any = None, **kwargs: Any) -> Any:
            def why_not(layer: nn.Module) -> str | None:
                return _why_not(layer, kwargs)

            packed = huggingface.packing(self, attention_mask, hidden_states, _layers(self), why_not, _why_not_stack)
            if packed is None:
                return super().forward(hidden_states, attention_mask, **kwargs)
            kwargs.pop("position_ids", None)
            outputs = super().forward(packed.pack(hidden_states), packed, **kwargs)
            outputs.last_hidden_state = packed.unpack(outputs.last_hidden_state)
            return outputs

    return Fused


def _layer_children(layer: Any) -> list[nn.Module]:
    """What a fused layer runs; the two norms get a recipe of their own, for the calls that fall back."""
    return [inner for inner in _LAYER.covers(layer) if not isinstance(inner, nn.LayerNorm)]


def _projections(layer: Any) -> list[nn.Module]:
    attention = layer.attention
    return [attention.query, attention.key, attention.value, attention.dense]


register_recipe(
    Recipe(
        "albert.stack", _recognise_stack, _fuse_stack, "padded batches run packed; padded positions give 0", packs=True
    ),
    first=False,
)
register_recipe(
    Recipe(
        "albert.layer", _LAYER.recognise, _fuse_layer,
        "projections, attention, sum and LayerNorm, feed-forward, sum and LayerNorm", _layer_children,
        projects=_projections,
    ),
    first=False,
)  # fmt: skip
register_recipe(
    Recipe("albert.feed_forward", _FEED_FORWARD.recognise, _fuse_feed_forward, "feed-forward", _FEED_FORWARD.covers),
    first=False,
)
