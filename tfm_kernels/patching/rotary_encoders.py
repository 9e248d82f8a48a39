"""Encoders with rotary positions: NomicBERT, Jina embeddings v3 and GTE, post-norm; EuroBERT, which has Llama's layers.

The models pack as a whole (huggingface_packed.py): positions then are told token by token.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..nn.packed import Packed
from . import block, huggingface
from .decoder import PROJECTIONS, register_attention
from .huggingface_mask import as_prepared
from .huggingface_packed import register_model
from .huggingface_parts import register_feed_forward
from .known import Known
from .registry import Recipe, register_recipe
from .swap import fell_back, options

# fingerprints of transformers 5.24 (source.py)
_ATTENTION = Known({"forward": "e50d27968547"}, {}, calls=PROJECTIONS)
_NORMS, _DROPS = ("post_attention_layernorm", "post_mlp_layernorm"), ("post_attention_dropout", "post_mlp_dropout")
_LAYER = Known(
    {"forward": "72077b9d48de"},
    {**dict.fromkeys(_NORMS, nn.LayerNorm), **dict.fromkeys(_DROPS, nn.Dropout)},
    calls=("self_attn", "mlp"),
)
_GTE_MLP = Known(
    {"forward": "b242185e6a1f"},
    {**dict.fromkeys(("gate_proj", "up_proj", "down_proj"), nn.Linear), "dropout": nn.Dropout}, (), "act_fn",
    shares=True,
)  # fmt: skip


def _fuse(original: Any) -> type:
    class Fused(original):
        def forward(self, hidden_states: Tensor, attention_mask: Any = None, *args: Any, **kwargs: Any) -> Tensor:
            if fell_back(self, _LAYER.why_not(self)):
                return super().forward(hidden_states, attention_mask, *args, **kwargs)
            named = dict(zip(("position_embeddings",), args, strict=False))
            x, _ = self.self_attn(hidden_states, attention_mask=attention_mask, **named, **kwargs)
            rows = attention_mask.index if isinstance(attention_mask, Packed) else None
            told: Any = {"dropout_rows": rows, "backend": options(self).backend}
            first, second = (block.dropout_p(getattr(self, name)) for name in _DROPS)
            x = block.norm_of_sum(x, hidden_states, self.post_attention_layernorm, dropout_p=first, **told)
            return block.norm_of_sum(self.mlp(x), x, self.post_mlp_layernorm, dropout_p=second, **told)

    return Fused


def _why_not_packed(layer: Any) -> str | None:
    if not huggingface.attends(layer.self_attn):
        return "its model's attention implementation was set to another one"
    inner = layer.mlp._modules.get("dropout")
    drawn = inner is not None and block.dropout_p(inner) > 0.0
    return "its feed-forward block's dropout would count other rows" if drawn else _LAYER.why_not(layer)


def _why_not_eurobert(layer: Any) -> str | None:
    attends = huggingface.attends(layer.self_attn)
    return None if attends else "its model's attention implementation was set to another one"


def _masks(model: Any, packed: Packed) -> Packed:
    return as_prepared(packed)


_PARTS = ("embeddings", "rotary_emb", "pooler")
register_attention("nomic_bert", _ATTENTION)
register_recipe(
    Recipe("nomic_bert.layer", _LAYER.recognise, _fuse, "both sums with dropout and LayerNorm", _LAYER.covers),
    first=False,
)
register_feed_forward("gte.mlp", _GTE_MLP, "gate_proj", "down_proj", gate="up_proj", inner="dropout")
for _name, _forward in (("nomic_bert.model", "aa32461b351b"), ("gte.model", "282bdeba2eac")):  # the latter Jina's, too
    register_model(_name, _forward, _why_not_packed, _masks, _PARTS, ("embeddings.dropout",))
register_model("eurobert.model", "c83b6a00613a", _why_not_eurobert, _masks, ("embed_tokens", "rotary_emb", "norm"), ())
