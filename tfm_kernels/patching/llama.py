"""Llama's layers and those of its relatives: Mistral, Mixtral, Qwen, SmolLM, Gemma's attention and many more."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .decoder import (
    NORMED,
    PROJECTIONS,
    Heads,
    heads,
    plain,
    register_attention,
    register_layer,
    windowed,
    windowed_alike,
)
from .huggingface_parts import LLAMA_NORM
from .known import Known

# fingerprints of transformers 5.23, and of 5.24, where past_key_values became cache (source.py)
LAYER = ("56851eb5314f", "3de6c16874d6")
_LLAMA = Known({"forward": ("a8215193b2a3", "c0b55e112c22")}, {}, calls=PROJECTIONS)
_MISTRAL = Known({"forward": ("f900b344e10b", "d3903f12705d")}, {}, calls=PROJECTIONS)
_QWEN2 = Known({"forward": ("5990c957b2ac", "8bd8e749ebfa")}, {}, calls=PROJECTIONS)
_QWEN3 = Known({"forward": ("cf784f9249ee", "a562cbb48527")}, {}, calls=NORMED)
_LAYER = Known(
    {"forward": LAYER, "post_attention_layernorm.forward": LLAMA_NORM},
    {},
    passes=("post_attention_layernorm",),
    calls=("input_layernorm", "self_attn", "mlp"),
)


def _normed_heads(self: Any, x: Tensor) -> Heads:
    """Normalised before they are transposed."""
    q, k = (project(x).view(*x.shape[:-1], -1, self.head_dim) for project in (self.q_proj, self.k_proj))
    return self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2), *heads(self, self.v_proj(x))


register_attention("llama", _LLAMA)
register_attention("mistral", _MISTRAL, plain, windowed_alike)
register_attention("qwen2", _QWEN2, plain, windowed)
register_attention("qwen3", _QWEN3, _normed_heads, windowed)
register_layer("llama", _LAYER)
