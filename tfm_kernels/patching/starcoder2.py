"""StarCoder 2, Nemotron and the layers of Phi-3.5-MoE: Llama's form, with LayerNorm."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from .decoder import PROJECTIONS, layer_code, plain, register_attention, register_layer, windowed_alike
from .huggingface_norm import NEMOTRON_NORM
from .known import Known
from .llama import LAYER, MIXTRAL_LAYER

# fingerprints of transformers 5.23, and of 5.24, where past_key_values became cache (source.py)
_STARCODER2 = Known({"forward": ("75e19722bb2f", "f19092b61eb0")}, {}, calls=PROJECTIONS)
_NEMOTRON = Known({"forward": ("699ed1dea197", "7e33b6bae9ee")}, {}, calls=PROJECTIONS)
_NORM = "post_attention_layernorm"


def _dropped(self: Any, y: Tensor) -> Tensor:
    return F.dropout(self.o_proj(y), self.residual_dropout, self.training)


register_attention("starcoder2", _STARCODER2, plain, windowed_alike, finish=_dropped)
register_attention("nemotron", _NEMOTRON)
register_layer("starcoder2", layer_code(LAYER, _NORM, nn.LayerNorm))
register_layer("nemotron", layer_code(("da827873bf09", "616d514c6e0d"), _NORM, NEMOTRON_NORM))
register_layer("phimoe", layer_code(MIXTRAL_LAYER, _NORM, nn.LayerNorm))
