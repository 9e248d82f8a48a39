"""OLMo 2 and 3, and Apertus and SmolLM 3: attention that differs from Llama's by norms, or by layers that turn nothing.

OLMo's layers normalise behind their sublayers alone, so that no norm follows a sum within a layer.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .decoder import NORMED, PROJECTIONS, Heads, heads, normed_heads, plain, register_attention, windowed
from .known import Known

# fingerprints of transformers 5.23, and of 5.24, where past_key_values became cache (source.py)
_OLMO2 = Known({"forward": ("d70e92643985", "34cef647e5c7")}, {}, calls=NORMED)
_OLMO3 = Known({"forward": ("1ecc66d8e3e1", "f6e1df7cedbd")}, {}, calls=NORMED)
_APERTUS = Known({"forward": ("59526e022625", "2b0fafe3bd86")}, {}, calls=NORMED)
_SMOLLM3 = Known({"forward": ("0a01fc97686b", "fcc1623dbcbc")}, {}, calls=PROJECTIONS)


def _normed_rows(self: Any, x: Tensor) -> Heads:
    """Queries and keys normalised over all their heads."""
    return heads(self, self.q_norm(self.q_proj(x)), self.k_norm(self.k_proj(x)), self.v_proj(x))


register_attention("olmo2", _OLMO2, _normed_rows)
register_attention("olmo3", _OLMO3, _normed_rows, windowed)
register_attention("apertus", _APERTUS, normed_heads)
register_attention("smollm3", _SMOLLM3, plain, windowed, turns=lambda module: module.use_rope)
