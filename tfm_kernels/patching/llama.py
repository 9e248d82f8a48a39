"""Llama's layers and those of its relatives: Mistral, Qwen, SmolLM, Gemma's attention and many more.

Rotary positions in one pass for queries and one for keys, and the residual sum in a layer's middle with the norm that
follows it. All children are called as they are, so that adapters and 8-bit layers in them keep working; attention
reaches ours through transformers' registry.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .. import _backend, ops
from . import huggingface, source
from .huggingface_parts import LLAMA_NORM, why_not_rms_norm
from .known import Known
from .registry import Recipe, backend, register_recipe
from .swap import fell_back

# fingerprints of transformers 5.23, and of 5.24, where past_key_values became cache (source.py)
_ROTARY = {"apply_rotary_pos_emb": "137d53615941", "rotate_half": "d13566b44750"}  # functions of a model's file
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_LLAMA = Known({"forward": ("a8215193b2a3", "c0b55e112c22")}, {}, calls=_PROJECTIONS)
_MISTRAL = Known({"forward": ("f900b344e10b", "d3903f12705d")}, {}, calls=_PROJECTIONS)
_QWEN2 = Known({"forward": ("5990c957b2ac", "8bd8e749ebfa")}, {}, calls=_PROJECTIONS)
_QWEN3 = Known({"forward": ("cf784f9249ee", "a562cbb48527")}, {}, calls=(*_PROJECTIONS, "q_norm", "k_norm"))
_LAYER = Known(
    {"forward": ("56851eb5314f", "3de6c16874d6"), "post_attention_layernorm.forward": LLAMA_NORM},
    {},
    passes=("post_attention_layernorm",),
    calls=("input_layernorm", "self_attn", "mlp"),
)


def _turned(module: nn.Module, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Query and key by their positions; as the model's own function does it where ops.rotary cannot."""
    if not _backend.offers("rotary") or any(cos.dtype not in (t.dtype, torch.float32) for t in (query, key)):
        return huggingface.file_of(module).apply_rotary_pos_emb(query, key, cos, sin)
    named = backend(module)  # meant for those of the fused ops that have it
    named = named if named in _backend.OPS["rotary"].support else None
    return ops.rotary(query, cos, sin, backend=named), ops.rotary(key, cos, sin, backend=named)


def _fuse_attention(known: Known, normed: bool, window: Callable[[Any], dict[str, Any]]) -> Callable[[Any], type]:
    def fuse(original: Any) -> type:
        keyword = huggingface.cache_keyword(original)

        class Fused(original):
            def forward(
                self,
                hidden_states: Tensor,
                position_embeddings: Any = None,
                attention_mask: Any = None,
                cache: Any = None,
                **kwargs: Any,
            ) -> tuple[Tensor, Any]:
                cache = huggingface.cache_of(cache, kwargs)
                if fell_back(self, known.why_not(self)):
                    told = {keyword: cache, **kwargs}
                    return super().forward(hidden_states, position_embeddings, attention_mask, **told)
                leading = hidden_states.shape[:-1]
                q, k, v = (
                    project(hidden_states).view(*leading, -1, self.head_dim)
                    for project in (self.q_proj, self.k_proj, self.v_proj)
                )
                if normed:
                    q, k = self.q_norm(q), self.k_norm(k)
                q, k = _turned(self, q.transpose(1, 2), k.transpose(1, 2), *position_embeddings)
                v = v.transpose(1, 2)
                if cache is not None:
                    more = {"kwargs": kwargs} if keyword == "cache" else {}
                    k, v = cache.update(k, v, self.layer_idx, **more)
                dropout = self.attention_dropout if self.training else 0.0
                attend = huggingface.interface(self)
                told = {"dropout": dropout, "scaling": self.scaling, **window(self), **kwargs}
                attended, weights = attend(self, q, k, v, attention_mask, **told)
                return self.o_proj(attended.reshape(*leading, -1)), weights

        return Fused

    return fuse


def _fuse_layer(original: Any) -> type:
    keyword = huggingface.cache_keyword(original)

    class Fused(original):
        def forward(
            self,
            hidden_states: Tensor,
            attention_mask: Any = None,
            position_ids: Any = None,
            cache: Any = None,
            use_cache: bool | None = False,
            position_embeddings: Any = None,
            **kwargs: Any,
        ) -> Tensor:
            told = {
                "attention_mask": attention_mask,
                "position_ids": position_ids,
                keyword: huggingface.cache_of(cache, kwargs),
                "use_cache": use_cache,
                "position_embeddings": position_embeddings,
                **kwargs,
            }
            norm: Any = self.post_attention_layernorm
            if fell_back(self, _LAYER.why_not(self) or why_not_rms_norm(norm, hidden_states)):
                return super().forward(hidden_states, **told)
            attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **told)
            y, z = ops.add_rms_norm(attended, hidden_states, norm.weight, norm.variance_epsilon, backend=backend(self))
            return z + self.mlp(y)

    return Fused


def _recognise(known: Known) -> Callable[[nn.Module], bool]:
    def recognise(module: nn.Module) -> bool:
        """What is not known still has its attention through the registry, and is no failure."""
        if known.recognise(module) is not True:
            return False
        own = huggingface.file_of(module)
        return all(source.fingerprint(getattr(own, name, len)) == code for name, code in _ROTARY.items())

    return recognise


def _windowed(module: Any) -> dict[str, Any]:
    return {"sliding_window": module.sliding_window}


for _name, _known, _normed, _window in (
    ("llama", _LLAMA, False, lambda module: {}),
    ("mistral", _MISTRAL, False, lambda module: {"sliding_window": getattr(module.config, "sliding_window", None)}),
    ("qwen2", _QWEN2, False, _windowed),
    ("qwen3", _QWEN3, True, _windowed),
):
    _fuse = _fuse_attention(_known, _normed, _window)
    _what = "rotary positions in one pass; attention through transformers' AttentionInterface"
    register_recipe(Recipe(f"{_name}.attention", _recognise(_known), _fuse, _what), first=False)
register_recipe(
    Recipe("llama.layer", _LAYER.recognise, _fuse_layer, "sum and RMSNorm in one pass", _LAYER.covers), first=False
)
