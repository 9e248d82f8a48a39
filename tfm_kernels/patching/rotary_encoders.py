"""Encoders with rotary positions: NomicBERT, Jina embeddings v3 and GTE, post-norm; EuroBERT, which has Llama's layers.

The models pack as a whole (huggingface_packed.py): positions then are told token by token.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..nn.packed import Packed
from . import block
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


_ROTARY = "fdf4680dfba6"
_EUROBERT = Known(
    {"forward": "c83b6a00613a", "rotary_emb.forward": _ROTARY}, {"embed_tokens": nn.Embedding}, ("rotary_emb",),
    calls=("norm",), shares=True,
)  # fmt: skip


def _model(forward: str, embeddings: str) -> Known:
    return Known(
        {"forward": forward, "embeddings.forward": embeddings, "rotary_emb.forward": _ROTARY},
        {
            "embeddings.word_embeddings": nn.Embedding,
            "embeddings.LayerNorm": nn.LayerNorm,
            "embeddings.dropout": nn.Dropout,
        },
        ("embeddings", "rotary_emb"),
        shares=True,
    )


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


def _masks(model: Any, packed: Packed) -> Packed:
    return as_prepared(packed)


register_attention("nomic_bert", _ATTENTION)
register_recipe(
    Recipe("nomic_bert.layer", _LAYER.recognise, _fuse, "both sums with dropout and LayerNorm", _LAYER.covers),
    first=False,
)
register_feed_forward("gte.mlp", _GTE_MLP, "gate_proj", "down_proj", gate="up_proj", inner="dropout")
for _name, _known in (
    ("nomic_bert.model", _model("aa32461b351b", "c1a6b97ee8f2")),
    ("jina_v3.model", _model("282bdeba2eac", "c1a6b97ee8f2")),
    ("gte.model", _model("282bdeba2eac", "ec9b3544d946")),
):
    register_model(_name, _known, _masks, attention="self_attn", dropout="embeddings.dropout")
register_model("eurobert.model", _EUROBERT, _masks, attention="self_attn", norm="norm")
