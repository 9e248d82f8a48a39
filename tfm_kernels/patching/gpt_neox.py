"""GPT-NeoX and Pythia: one projection for all heads, a part of each turned, branches side by side or in turn."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .decoder import ATTENTION, SIDE_BY_SIDE, attended, register_layer
from .known import Known
from .registry import Recipe, register_recipe
from .rotary import turns
from .swap import fell_back

# fingerprints of transformers 5.23 and 5.24 (source.py)
_ATTENTION = Known({"forward": "5c07cd8ed8a9"}, {}, calls=("query_key_value", "dense"))
_LAYER = Known(
    {"forward": "e16b4ce891ab"},
    {"post_attention_layernorm": nn.LayerNorm, "post_attention_dropout": nn.Dropout},
    calls=("input_layernorm", "attention", "mlp", "post_mlp_dropout"),
)


def _fuse_attention(original: Any) -> type:
    class Fused(original):
        def forward(
            self,
            hidden_states: Tensor,
            attention_mask: Any,
            layer_past: Any = None,
            position_embeddings: Any = None,
            **kwargs: Any,
        ) -> tuple[Tensor, Any]:
            if fell_back(self, _ATTENTION.why_not(self)):
                return super().forward(hidden_states, attention_mask, layer_past, position_embeddings, **kwargs)

            def update(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
                return layer_past.update(k, v, self.layer_idx)

            projected = self.query_key_value(hidden_states)
            q, k, v = projected.unflatten(-1, (-1, 3 * self.head_size)).transpose(1, 2).chunk(3, dim=-1)
            updated = None if layer_past is None else update
            y, weights = attended(self, q, k, v, attention_mask, position_embeddings, updated, **kwargs)
            return self.dense(y), weights

    return Fused


def _side_by_side(layer: Any) -> str | None:
    return SIDE_BY_SIDE if layer.use_parallel_residual else None


register_recipe(Recipe("gpt_neox.attention", turns(_ATTENTION), _fuse_attention, ATTENTION), first=False)
register_layer(
    "gpt_neox", _LAYER, why_not=_side_by_side, attention="attention", after_mlp="post_mlp_dropout",
    dropout="post_attention_dropout", by_name=False,
)  # fmt: skip
