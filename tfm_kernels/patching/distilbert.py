"""DistilBERT: its block, and the stack of blocks, which runs padded batches packed."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..nn.packed import Packed
from . import block, guard, huggingface
from .known import Known
from .linear import linear
from .registry import Recipe, register_recipe
from .source import says
from .swap import fell_back, options

# fingerprints of transformers 5.23 (source.py)
SELF_ATTENTION = "573163dc6254"
FFN = "635d21d5fa88"
FFN_CHUNK = "3f3380531fd2"
BLOCK = "91edca288f4c"
STACK = "f0b8307e43a5"

_BLOCK = Known(
    {"forward": BLOCK, "attention.forward": SELF_ATTENTION, "ffn.forward": FFN, "ffn.ff_chunk": FFN_CHUNK},
    {
        "attention.q_lin": nn.Linear,
        "attention.k_lin": nn.Linear,
        "attention.v_lin": nn.Linear,
        "attention.out_lin": nn.Linear,
        "attention.dropout": nn.Dropout,
        "sa_layer_norm": nn.LayerNorm,
        "ffn.lin1": nn.Linear,
        "ffn.lin2": nn.Linear,
        "ffn.dropout": nn.Dropout,
        "output_layer_norm": nn.LayerNorm,
    },
    ("attention", "ffn"),
    "ffn.activation",
)


def _why_not(layer: Any, kwargs: dict[str, Any]) -> str | None:
    reason = _BLOCK.why_not(layer)
    if reason is not None:
        return reason
    if layer.ffn.chunk_size_feed_forward:
        return "config.chunk_size_feed_forward is set"
    if not huggingface.attends(layer.attention):
        return "its model's attention implementation was set to another one"
    if huggingface.wants_weights(kwargs):
        return "output_attentions was asked for"
    return huggingface.unknown_keywords(kwargs)


def _fuse(original: Any) -> type:
    class Fused(original):
        def forward(self, hidden_states: Tensor, attention_mask: Any = None, **kwargs: Any) -> Tensor:
            if not isinstance(attention_mask, Packed):  # the stack that packed has asked already
                if fell_back(self, _why_not(self, kwargs)):
                    return super().forward(hidden_states, attention_mask, **kwargs)
            return _block(self, hidden_states, attention_mask, kwargs)

    return Fused


def _block(self: Any, x: Tensor, mask: Any, kwargs: dict[str, Any]) -> Tensor:
    """x = LN(x + out(attention(x))); x = LN(x + dropout(ffn(x)))."""
    attention, ffn, backend = self.attention, self.ffn, options(self).backend
    context = block.self_attention(
        x,
        (attention.q_lin, attention.k_lin, attention.v_lin),
        attention.n_heads,
        huggingface.causal_if_unmasked(attention, mask, x.shape[-2], kwargs),
        scale=attention.scaling,
        dropout_p=attention.dropout.p if attention.training else 0.0,
        backend=backend,
    )
    x = block.norm_of_sum(linear(context, attention.out_lin), x, self.sa_layer_norm, backend=backend)
    name: Any = block.activation(ffn.activation)
    y = block.feed_forward(x, ffn.lin1, ffn.lin2, name, backend=backend)
    p, rows = block.dropout_p(ffn.dropout), mask.index if isinstance(mask, Packed) else None
    return block.norm_of_sum(y, x, self.output_layer_norm, dropout_p=p, dropout_rows=rows, backend=backend)


def _recognise_stack(module: nn.Module) -> bool | str:
    if not isinstance(module._modules.get("layer"), nn.ModuleList) or len(module._modules) != 1:
        return False
    if not all(_BLOCK.recognise(layer) for layer in module.layer):  # type: ignore[union-attr]
        return False
    return says(module, "forward", STACK) or guard.UNKNOWN_FORWARD


def _fuse_stack(original: Any) -> type:
    class Fused(original):
        def forward(self, hidden_states: Tensor, attention_mask: Any = None, **kwargs: Any) -> Any:
            def why_not(layer: nn.Module) -> str | None:
                return _why_not(layer, kwargs)

            packed = huggingface.packing(self, attention_mask, hidden_states, self.layer, why_not)
            if packed is None:
                return super().forward(hidden_states, attention_mask, **kwargs)
            outputs = super().forward(packed.pack(hidden_states), packed, **kwargs)
            outputs.last_hidden_state = packed.unpack(outputs.last_hidden_state)
            return outputs

    return Fused


def _projections(layer: Any) -> list[nn.Module]:
    attention = layer.attention
    return [attention.q_lin, attention.k_lin, attention.v_lin, attention.out_lin]


register_recipe(
    Recipe(
        "distilbert.stack", _recognise_stack, _fuse_stack, "padded batches run packed; padded positions give 0",
        packs=True,
    ),
    first=False,
)  # fmt: skip
register_recipe(
    Recipe(
        "distilbert.block", _BLOCK.recognise, _fuse,
        "projections, attention, sum and LayerNorm, feed-forward, sum and LayerNorm", _BLOCK.covers,
        projects=_projections,
    ),
    first=False,
)  # fmt: skip
