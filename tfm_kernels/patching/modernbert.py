"""ModernBERT: attention with rotary positions, gated feed-forward, the sum between them, and the whole model packed.

Two layers of three see a window alone, which reaches attention as a band (huggingface_mask.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ..mask import Mask
from ..nn.packed import Packed
from . import block, huggingface
from .decoder import ATTENTION
from .huggingface_packed import register_model
from .huggingface_parts import register_feed_forward
from .known import Known
from .registry import Recipe, register_recipe
from .rotary import turned, turns
from .swap import fell_back, options

# fingerprints of transformers 5.24 (source.py)
_ATTENTION = Known({"forward": "0083112e4da8"}, {}, calls=("Wqkv", "Wo", "out_drop"))
_LAYER = Known({"forward": "edec019ee483"}, {"mlp_norm": nn.LayerNorm}, calls=("attn_norm", "attn", "mlp"))
_MLP = Known({"forward": "cdfc63c5b53c"}, {"Wi": nn.Linear, "Wo": nn.Linear, "drop": nn.Dropout}, (), "act")
_MODEL = Known(
    {"forward": "ad628821311e", "embeddings.forward": "e9ef22bb1fa6", "rotary_emb.forward": "aa5f8d996efa"},
    {"embeddings.tok_embeddings": nn.Embedding, "embeddings.norm": nn.LayerNorm, "embeddings.drop": nn.Dropout},
    ("embeddings", "rotary_emb"), calls=("final_norm",),
)  # fmt: skip


def _fuse_attention(original: Any) -> type:
    class Fused(original):
        def forward(
            self, hidden_states: Tensor, position_embeddings: Any = None, attention_mask: Any = None, **kwargs: Any
        ) -> tuple[Tensor, Any]:
            if fell_back(self, _ATTENTION.why_not(self)):
                return super().forward(hidden_states, position_embeddings, attention_mask, **kwargs)
            heads = self.Wqkv(hidden_states).view(*hidden_states.shape[:-1], 3, -1, self.head_dim)
            q, k, v = (x.transpose(1, 2) for x in heads.unbind(-3))
            q, k = turned(self, q, k, *position_embeddings)
            y, weights = huggingface.interface(self)(
                self, q, k, v, attention_mask,
                dropout=self.attention_dropout if self.training else 0.0,
                scaling=self.head_dim**-0.5,
                sliding_window=self.sliding_window,
                deterministic=self.deterministic_flash_attn,
                **kwargs,
            )  # fmt: skip
            return self.out_drop(self.Wo(y.reshape(*y.shape[:-2], -1))), weights

    return Fused


def _fuse_layer(original: Any) -> type:
    class Fused(original):
        def forward(
            self, hidden_states: Tensor, attention_mask: Any = None, position_embeddings: Any = None, **kwargs: Any
        ) -> Tensor:
            if fell_back(self, _LAYER.why_not(self)):
                return super().forward(hidden_states, attention_mask, position_embeddings, **kwargs)
            normed, told = self.attn_norm(hidden_states), {"attention_mask": attention_mask, **kwargs}
            attended, _ = self.attn(normed, position_embeddings=position_embeddings, **told)
            y, z = block.add_norm(attended, hidden_states, self.mlp_norm, backend=options(self).backend)
            return z + self.mlp(y)

    return Fused


def _masks(model: Any, packed: Packed) -> dict[str, Packed]:
    """What the model makes of a padding mask: one for each kind of its layers."""
    window = getattr(model.config, "sliding_window", None)
    sight = None if window is None else Mask.window(window, window)
    return {"full_attention": packed, "sliding_attention": replace(packed, sight=sight)}


register_recipe(Recipe("modernbert.attention", turns(_ATTENTION), _fuse_attention, ATTENTION), first=False)
register_recipe(
    Recipe("modernbert.layer", _LAYER.recognise, _fuse_layer, "sum and LayerNorm in one pass", _LAYER.covers),
    first=False,
)
register_feed_forward("modernbert.mlp", _MLP, "Wi", "Wo", gate="Wi", inner="drop")
register_model("modernbert.model", _MODEL, _masks, attention="attn", norm="final_norm", dropout="embeddings.drop")
