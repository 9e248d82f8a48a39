"""Falcon, whose attention is its own and knows no registry: it calls SDPA, with the mask that its model wrote out."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .._autocast import as_autocast
from . import block, huggingface
from .huggingface_parts import register_feed_forward
from .known import Known
from .registry import Recipe, backend, register_recipe
from .rotary import turned, turns
from .swap import fell_back

# fingerprints of transformers 5.23 and 5.24 (source.py)
_LINEAR = "transformers.models.falcon.modeling_falcon.FalconLinear"
_ATTENTION = Known(
    {"forward": "1a99b18c9116", "_split_heads": "07ff61340b10"},
    {"attention_dropout": nn.Dropout},
    calls=("query_key_value", "dense"),
)


def _why_not(attention: Any, output_attentions: bool) -> str | None:
    if output_attentions:
        return "output_attentions was asked for"
    name = attention.config._attn_implementation
    return _ATTENTION.why_not(attention) if name == "sdpa" else f"its attention implementation is {name!r}, not 'sdpa'"


def _fuse(original: Any) -> type:
    class Fused(original):
        def forward(
            self,
            hidden_states: Tensor,
            alibi: Tensor | None,
            attention_mask: Any,
            position_ids: Tensor | None = None,
            layer_past: Any = None,
            use_cache: bool = False,
            output_attentions: bool = False,
            position_embeddings: Any = None,
            **kwargs: Any,
        ) -> tuple[Tensor, Any]:
            if fell_back(self, _why_not(self, output_attentions)):
                told = (position_ids, layer_past, use_cache, output_attentions, position_embeddings)
                return super().forward(hidden_states, alibi, attention_mask, *told, **kwargs)
            q, k, v = (t.transpose(1, 2) for t in self._split_heads(self.query_key_value(hidden_states)))
            if alibi is None:
                q, k = turned(self, q, k, *position_embeddings)
            if layer_past is not None:
                k, v = layer_past.update(k, v, self.layer_idx)
            mask = huggingface.causal_if_unmasked(self, attention_mask, q.shape[-2], {})
            p = 0.0 if alibi is None else block.dropout_p(self.attention_dropout)
            q, k, v = as_autocast(q, k, v)
            y = block.attend(q, k, v, mask, dropout_p=p, backend=backend(self))
            return self.dense(block.merge_heads(y)), None

    return Fused


_WHAT = "rotary positions in one pass, and attention"
register_recipe(Recipe("falcon.attention", turns(_ATTENTION), _fuse, _WHAT, _ATTENTION.covers), first=False)
register_feed_forward(
    "falcon.mlp",
    Known({"forward": "935b9f767ae1"}, {"dense_h_to_4h": _LINEAR, "dense_4h_to_h": _LINEAR}, (), "act", shares=True),
    "dense_h_to_4h", "dense_4h_to_h",
)  # fmt: skip
