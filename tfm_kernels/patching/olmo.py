"""OLMo 1 to 3, OLMoE, Apertus, SmolLM 3 and Exaone 4: attention with norms, a clip, or layers that turn nothing.

The layers of OLMo 2 and 3 and of Exaone normalise behind their sublayers alone: no norm follows a sum in them.
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
    normed_heads,
    plain,
    register_attention,
    register_layer,
    windowed,
    windowed_alike,
)
from .huggingface_norm import OLMO_NORM
from .known import Known
from .llama import LAYER

# fingerprints of transformers 5.23, and of 5.24, where past_key_values became cache (source.py)
_OLMO = Known({"forward": ("f9ea6139b43a", "29dcf62b3023")}, {}, calls=PROJECTIONS)
_OLMOE = Known({"forward": ("6b409d49c6cd", "df3fe7d14d5c")}, {}, calls=NORMED)
_OLMO2 = Known({"forward": ("d70e92643985", "34cef647e5c7")}, {}, calls=NORMED)
_OLMO3 = Known({"forward": ("1ecc66d8e3e1", "f6e1df7cedbd")}, {}, calls=NORMED)
_APERTUS = Known({"forward": ("59526e022625", "2b0fafe3bd86")}, {}, calls=NORMED)
_SMOLLM3 = Known({"forward": ("0a01fc97686b", "fcc1623dbcbc")}, {}, calls=PROJECTIONS)
_EXAONE4 = Known({"forward": ("56431fd33395", "34af0f7284cc")}, {}, calls=NORMED)


def _clipped(self: Any, *projected: Tensor) -> Heads:
    limit = self.config.clip_qkv
    return heads(self, *(projected if limit is None else (t.clamp(min=-limit, max=limit) for t in projected)))


def _clipped_heads(self: Any, x: Tensor) -> Heads:
    return _clipped(self, self.q_proj(x), self.k_proj(x), self.v_proj(x))


def _clipped_rows(self: Any, x: Tensor) -> Heads:
    """Queries and keys normalised over all their heads before."""
    return _clipped(self, self.q_norm(self.q_proj(x)), self.k_norm(self.k_proj(x)), self.v_proj(x))


def _normed_rows(self: Any, x: Tensor) -> Heads:
    """Queries and keys normalised over all their heads."""
    return heads(self, self.q_norm(self.q_proj(x)), self.k_norm(self.k_proj(x)), self.v_proj(x))


def _windowed_where_it_slides(module: Any) -> dict[str, Any]:
    return {"sliding_window": module.sliding_window if module.is_sliding else None}


register_attention("olmo", _OLMO, _clipped_heads)
register_attention("olmoe", _OLMOE, _clipped_rows, windowed_alike)
register_attention("olmo2", _OLMO2, _normed_rows)
register_attention("olmo3", _OLMO3, _normed_rows, windowed)
register_attention("apertus", _APERTUS, normed_heads)
register_attention(
    "smollm3", _SMOLLM3, plain, windowed, angles=lambda module, given: given if module.use_rope else None
)
register_attention(
    "exaone4", _EXAONE4, normed_heads, _windowed_where_it_slides,
    angles=lambda module, given: given if module.sliding_window is None or module.is_sliding else None,
)  # fmt: skip
register_layer("olmo", layer_code(LAYER, "post_attention_layernorm", OLMO_NORM))
