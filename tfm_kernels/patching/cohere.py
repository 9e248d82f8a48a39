"""Command R (Cohere and Cohere 2): interleaved rotary positions, queries and keys of their own norms, or of a window.

Attention and mlp take the same norm and their results are added side by side.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .decoder import PROJECTIONS, Heads, plain, register_attention, register_side_by_side, windowed
from .known import Known

# fingerprints of transformers 5.23, and of 5.24, where past_key_values became cache (source.py)
_COHERE = Known({"forward": ("53e371ab67be", "b2014fffab94")}, {}, calls=PROJECTIONS)
_COHERE2 = Known({"forward": ("0b5622f244e6", "228bbb741a18")}, {}, calls=PROJECTIONS)
_LAYER = Known(
    {"forward": ("1bd2a3f635eb", "10e5c7af1d17", "ece9ecec62c4", "bcae035a3966")},
    {}, calls=("input_layernorm", "self_attn", "mlp"), shares=True,
)  # fmt: skip


def _normed_heads(self: Any, x: Tensor) -> Heads:
    """Normalised, where they are, before they are transposed."""
    q, k, v = plain(self, x)
    if self.use_qk_norm:
        q, k = (norm(t.transpose(1, 2)).transpose(1, 2) for norm, t in ((self.q_norm, q), (self.k_norm, k)))
    return q, k, v


register_attention("cohere", _COHERE, _normed_heads)
register_attention(
    "cohere2", _COHERE2, plain, windowed,
    angles=lambda module, given: given if module.sliding_window is not None else None,
)  # fmt: skip
register_side_by_side("cohere", _LAYER)
