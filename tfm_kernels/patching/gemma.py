"""Gemma 1, 2 and 3 (its text): norms whose weight is kept as the distance from 1, and norms after the sublayers too.

Gemma's attention is Llama's. That of Gemma 2 stays its own, since it caps its logits, which the ops do not; its rotary
positions are turned in one pass all the same.
"""

from __future__ import annotations

from typing import Any

from .decoder import NORMED, PROJECTIONS, layer_code, normed_heads, plain, register_attention, register_layer, windowed
from .huggingface_norm import GEMMA_NORM
from .known import Known
from .llama import LAYER

# fingerprints of transformers 5.23, and of 5.24, where past_key_values became cache (source.py)
_GEMMA2 = Known({"forward": ("3f83b9137ef0", "aa4f5024112b")}, {}, calls=PROJECTIONS)
_GEMMA3 = Known({"forward": ("65c852a8e162", "240674d7615c")}, {}, calls=NORMED)


def _capped(module: Any) -> dict[str, Any]:
    return {"sliding_window": module.sliding_window, "softcap": module.attn_logit_softcapping}


_MIDDLE, _AFTER = "pre_feedforward_layernorm", ("post_attention_layernorm", "post_feedforward_layernorm")
register_attention(
    "gemma2", _GEMMA2, plain, _capped, "rotary positions in one pass; not more, because it caps its logits"
)
register_attention("gemma3", _GEMMA3, normed_heads, windowed)
register_layer("gemma", layer_code(LAYER, "post_attention_layernorm", GEMMA_NORM))
register_layer(
    "gemma2",  # and 3
    layer_code(("616c4cee5761", "937c8486053f"), _MIDDLE, GEMMA_NORM, *_AFTER), _MIDDLE,
    after_attention=_AFTER[0], after_mlp=_AFTER[1],
)  # fmt: skip
