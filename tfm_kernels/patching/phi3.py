"""Phi-3 and 4: one projection for queries, keys and values, one for the gate and what it multiplies, and dropout."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .decoder import Heads, heads, layer_code, register_attention, register_layer, windowed_alike
from .huggingface_norm import LLAMA_NORM
from .known import Known

# fingerprints of transformers 5.23, and of 5.24, where past_key_values became cache (source.py)
_ATTENTION = Known({"forward": ("561335697dd8", "ccd422bdcc9a")}, {}, calls=("qkv_proj", "o_proj"))
_LAYER = layer_code(
    ("e2393a56cb8c", "be6904ba46b9"), "post_attention_layernorm", LLAMA_NORM, "resid_mlp_dropout",
    dropout="resid_attn_dropout",
)  # fmt: skip


def _split_heads(self: Any, x: Tensor) -> Heads:
    queries, keys = (n * self.head_dim for n in (self.config.num_attention_heads, self.num_key_value_heads))
    return heads(self, *self.qkv_proj(x).split((queries, keys, keys), dim=-1))


register_attention("phi3", _ATTENTION, _split_heads, windowed_alike)
register_layer("phi3", _LAYER, after_mlp="resid_mlp_dropout", dropout="resid_attn_dropout")
