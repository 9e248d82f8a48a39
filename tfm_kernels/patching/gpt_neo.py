"""GPT-Neo, whose attention is its own and knows no registry: every second layer sees a window of the last keys."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .._autocast import as_autocast
from .._check import dtype_name
from ..mask import Mask
from . import block, huggingface
from .huggingface_mask import as_data
from .known import Known
from .registry import Recipe, backend, register_recipe
from .swap import fell_back

# fingerprints of transformers 5.23 and 5.24 (source.py)
_ATTENTION = Known(
    {
        "forward": "871e3647f6b7",
        "_attn": "1ee757ebf21a",
        "_split_heads": "9192f3d08039",
        "_merge_heads": "4d3951332219",
    },
    {"attn_dropout": nn.Dropout},
    calls=("q_proj", "k_proj", "v_proj", "out_proj", "resid_dropout"),
)


def _masked(attention: Any, given: Any) -> tuple[Mask, Tensor | None]:
    """Its own mask with the model's, and what of that is no mask but a summand of the scores."""
    local = attention.attention_type == "local"
    own = Mask.window(attention.config.window_size - 1 if local else None, 0, align="bottom_right")
    given = as_data(given)
    return (own, given) if isinstance(given, Tensor) else (own if given is None else own & given, None)


def _why_not(attention: nn.Module, x: Tensor, mask: Any, asked: bool) -> str | None:
    if isinstance(mask, Tensor) and not mask.is_floating_point():
        return f"its own code adds a mask of {dtype_name(mask)} to the scores as numbers"
    return huggingface.why_not_own_attention(asked, x) or _ATTENTION.why_not(attention)


def _fuse(original: Any) -> type:
    class Fused(original):
        def forward(
            self,
            hidden_states: Tensor,
            attention_mask: Any = None,
            layer_past: Any = None,
            use_cache: bool = False,
            output_attentions: bool = False,
            **kwargs: Any,
        ) -> tuple[Tensor, Any]:
            reason = _why_not(self, hidden_states, attention_mask, output_attentions)
            if fell_back(self, reason):
                told = (attention_mask, layer_past, use_cache, output_attentions)
                return super().forward(hidden_states, *told, **kwargs)
            layers = (self.q_proj, self.k_proj, self.v_proj)
            q, k, v = (block.split_heads(layer(hidden_states), self.num_heads) for layer in layers)
            if layer_past is not None:
                k, v = layer_past.update(k, v, self.layer_id)
            q, k, v = as_autocast(q, k, v)
            mask, bias = _masked(self, attention_mask)
            p = block.dropout_p(self.attn_dropout)
            y = block.attend(q, k, v, mask, bias=bias, scale=1.0, dropout_p=p, backend=backend(self))
            return self.resid_dropout(self.out_proj(block.merge_heads(y))), None

    return Fused


register_recipe(
    Recipe(
        "gpt_neo.attention", _ATTENTION.recognise, _fuse, "attention", _ATTENTION.covers,
        unasked=("output.1",),  # its weights
    ),
    first=False,
)  # fmt: skip
