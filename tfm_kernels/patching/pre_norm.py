"""Pre-norm blocks of GPT-2, GPT-BigCode, GPT-Neo, ViT and CLIP: the sum in their middle with the norm behind it.

The sum at their end belongs to the next block's norm; it stays where it is, because hidden states are read there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from . import block, huggingface
from .known import Known
from .registry import Recipe, register_recipe
from .swap import fell_back, options

# fingerprints of transformers 5.23, and of 5.24, where past_key_values became cache (source.py)
_GPT2 = Known(
    {"forward": ("4a238b12667c", "65a867de73a2", "5d48d20393ed")},  # the last is GPT-BigCode's
    {"ln_2": nn.LayerNorm}, calls=("ln_1", "attn", "mlp"), shares=True,
)  # fmt: skip
_GPT_NEO = Known({"forward": "65114c999412"}, {"ln_2": nn.LayerNorm}, calls=("ln_1", "attn", "mlp"))
_VIT = Known(
    {"forward": "a65e5f6b9314"},  # also DeiT
    {"layernorm_after": nn.LayerNorm, "dropout": nn.Dropout},
    calls=("layernorm_before", "attention", "mlp"),
)
_CLIP = Known(
    {"forward": "aba5819709e3"},  # also SigLIP
    {"layer_norm2": nn.LayerNorm},
    calls=("layer_norm1", "self_attn", "mlp"),
)


def _fuse_gpt2(known: Known, with_weights: bool = False) -> Callable[[Any], type]:
    def fuse(original: Any) -> type:
        named = huggingface.named_arguments(original)

        class Fused(original):
            def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
                told = named(args, kwargs)
                crossed = told.get("encoder_hidden_states") is not None
                if fell_back(self, "it attends to encoder_hidden_states" if crossed else known.why_not(self)):
                    return super().forward(hidden_states, **told)
                told = {name: given for name, given in told.items() if not name.startswith("encoder_")}
                attended, weights = self.attn(self.ln_1(hidden_states), **told)
                y, z = block.add_norm(attended, hidden_states, self.ln_2, backend=options(self).backend)
                z = z + self.mlp(y)
                return (z, weights) if with_weights else z

        return Fused

    return fuse


def _fuse_vit(original: Any) -> type:
    class Fused(original):
        def forward(self, hidden_states: Tensor, attention_mask: Any = None, **kwargs: Any) -> Tensor:
            if fell_back(self, _VIT.why_not(self)):
                return super().forward(hidden_states, attention_mask, **kwargs)
            attended, _ = self.attention(self.layernorm_before(hidden_states), attention_mask, **kwargs)
            told: Any = {"dropout_p": block.dropout_p(self.dropout), "backend": options(self).backend}
            y, z = block.add_norm(attended, hidden_states, self.layernorm_after, **told)
            return self.dropout(self.mlp(y)) + z

    return Fused


def _fuse_clip(original: Any) -> type:
    class Fused(original):
        def forward(self, hidden_states: Tensor, attention_mask: Any, **kwargs: Any) -> Tensor:
            if fell_back(self, _CLIP.why_not(self)):
                return super().forward(hidden_states, attention_mask, **kwargs)
            normed = self.layer_norm1(hidden_states)
            attended, _ = self.self_attn(hidden_states=normed, attention_mask=attention_mask, **kwargs)
            y, z = block.add_norm(attended, hidden_states, self.layer_norm2, backend=options(self).backend)
            return z + self.mlp(y)

    return Fused


_WHAT = "sum and LayerNorm in one pass"
for _recipe in (
    Recipe("gpt2.block", _GPT2.recognise, _fuse_gpt2(_GPT2), _WHAT, _GPT2.covers),
    Recipe(
        "gpt_neo.block", _GPT_NEO.recognise, _fuse_gpt2(_GPT_NEO, with_weights=True), _WHAT, _GPT_NEO.covers,
        unasked=("output.1",),  # weights of its attention
    ),
    Recipe("vit.block", _VIT.recognise, _fuse_vit, _WHAT, _VIT.covers),
    Recipe("clip.block", _CLIP.recognise, _fuse_clip, _WHAT, _CLIP.covers),
):  # fmt: skip
    register_recipe(_recipe, first=False)
