"""GPT-J and CodeGen: pairs of a part of each head, turned by a table of sines and cosines; branches side by side.

In transformers 5.23 their attention knows no registry, and is left as it is.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .decoder import Heads, heads, plain, register_attention, register_side_by_side
from .known import Known

# fingerprints of transformers 5.24 (source.py)
_GPTJ = Known({"forward": "069a4536ed14"}, {}, calls=("q_proj", "k_proj", "v_proj", "out_proj", "resid_dropout"))
_CODEGEN = Known({"forward": "15c5fe31d22f"}, {}, calls=("qkv_proj", "out_proj", "resid_dropout"))
_LAYER = Known({"forward": "421cc1bb31a7"}, {}, calls=("ln_1", "attn", "mlp"), shares=True)


def _split_heads(self: Any, x: Tensor) -> Heads:
    """Queries, values and keys lie side by side in each of the shards that it was trained in."""
    q, v, k = self.qkv_proj(x).unflatten(-1, (self.mp_num, 3, -1)).unbind(-2)
    return heads(self, *(t.flatten(-2) for t in (q, k, v)))


def _dropped(self: Any, y: Tensor) -> Tensor:
    return self.resid_dropout(self.out_proj(y))


def _cos_and_sin(module: Any, given: Any) -> Any:
    sin, cos = given
    return cos, sin


register_attention("gptj", _GPTJ, plain, angles=_cos_and_sin, finish=_dropped)
register_attention("codegen", _CODEGEN, _split_heads, angles=_cos_and_sin, finish=_dropped)
register_side_by_side("gptj", _LAYER)
