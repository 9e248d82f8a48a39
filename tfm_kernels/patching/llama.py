"""Llama's layers and those of its relatives: Mistral, Mixtral, Qwen, SmolLM, Ernie 4.5, Granite and many more.

Helium, GLM and Gemma share its attention, and turn other pairs or have other norms.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .decoder import (
    NORMED,
    PROJECTIONS,
    Heads,
    heads,
    layer_code,
    plain,
    register_attention,
    register_layer,
    windowed,
    windowed_alike,
)
from .huggingface_norm import HELIUM_NORM, LLAMA_NORM
from .known import Known

# fingerprints of transformers 5.23, and of 5.24, where past_key_values became cache (source.py)
LAYER = ("56851eb5314f", "3de6c16874d6")
MIXTRAL_LAYER = ("9d615a1d8ee4", "a16bdb563fb0")
_LLAMA = Known({"forward": ("a8215193b2a3", "c0b55e112c22")}, {}, calls=PROJECTIONS)
_MISTRAL = Known({"forward": ("f900b344e10b", "d3903f12705d")}, {}, calls=PROJECTIONS)
_QWEN2 = Known({"forward": ("5990c957b2ac", "8bd8e749ebfa")}, {}, calls=PROJECTIONS)
_QWEN3 = Known({"forward": ("cf784f9249ee", "a562cbb48527")}, {}, calls=NORMED)
_NORM, _AFTER = "post_attention_layernorm", ("post_self_attn_layernorm", "post_mlp_layernorm")


def _normed_heads(self: Any, x: Tensor) -> Heads:
    """Normalised before they are transposed."""
    q, k = (project(x).view(*x.shape[:-1], -1, self.head_dim) for project in (self.q_proj, self.k_proj))
    return self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2), *heads(self, self.v_proj(x))


register_attention("llama", _LLAMA)
register_attention("mistral", _MISTRAL, plain, windowed_alike)
register_attention("qwen2", _QWEN2, plain, windowed)
register_attention("qwen3", _QWEN3, _normed_heads, windowed)
register_layer("llama", layer_code(LAYER, _NORM, LLAMA_NORM, shares=False))
register_layer("helium", layer_code(LAYER, _NORM, HELIUM_NORM))
register_layer("mixtral", layer_code(MIXTRAL_LAYER, _NORM, LLAMA_NORM))
register_layer("granite", layer_code(("c8eb9762287b", "d21a8544c26a"), _NORM, LLAMA_NORM), scale="residual_multiplier")
register_layer(
    "granitemoe", layer_code(("a047cc231bc1", "349e1e0cb09e"), _NORM, LLAMA_NORM, mlp="block_sparse_moe"),
    mlp="block_sparse_moe", scale="residual_multiplier",
)  # fmt: skip
register_layer(
    "glm4", layer_code(("659ab0beaa77", "277fc44164bf"), _NORM, LLAMA_NORM, *_AFTER),
    after_attention=_AFTER[0], after_mlp=_AFTER[1],
)  # fmt: skip
