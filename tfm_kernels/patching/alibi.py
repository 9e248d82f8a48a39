"""BLOOM and MPT: positions as a bias of the scores (ALiBi), which their own attention adds to scores in memory.

Their attention knows no registry; the block runs it, with the sum behind it and its norm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .._autocast import as_autocast
from . import block, guard, huggingface, source
from .huggingface_mask import as_data
from .known import Known
from .registry import Recipe, backend, register_recipe
from .swap import fell_back

# fingerprints of transformers 5.23, and of 5.24, where past_key_values became cache (source.py)
_BLOOM = Known(
    {
        "forward": "f92fd65ef63a",
        "self_attention.forward": "4405f2b30dc3",
        "self_attention._reshape": "feb65591d8b6",
        "self_attention._merge_heads": "305731f99749",
    },
    {"post_attention_layernorm": nn.LayerNorm, "self_attention.attention_dropout": nn.Dropout},
    passes=("self_attention",),
    calls=("input_layernorm", "self_attention.query_key_value", "self_attention.dense", "mlp"),
)
_MPT = Known(
    {"forward": ("b8cfd9aecdb2", "23e7bfeee78a"), "attn.forward": ("68383b8ba4a5", "77bf4554b7c8")},
    {"norm_2": nn.LayerNorm, "resid_attn_dropout": nn.Dropout},
    passes=("attn",),
    calls=("norm_1", "attn.Wqkv", "attn.out_proj", "ffn"),
)
_BLOOM_MLP = Known(
    {"forward": "93a21eb7872c", "gelu_impl.forward": "6e59019cddcd"},
    {"dense_h_to_4h": nn.Linear, "dense_4h_to_h": nn.Linear},
    passes=("gelu_impl",),
)
_MPT_MLP = Known({"forward": "1cd79017b893"}, {"up_proj": nn.Linear, "down_proj": nn.Linear}, (), "act", shares=True)
_BLOOM_GELU = ("a6245e0c840b", "e10fc3c3bb98")  # its functions, forward and backward


def _attend(self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, alibi: Tensor, p: float, scale: float) -> Tensor:
    """(B, T, H D): attention of (B, H, T, D) under a mask of the model's and a bias (B or 1, H, 1, Tk)."""
    q, k, v = as_autocast(q, k, v)
    bias = alibi if alibi.dtype.itemsize == 4 else alibi.to(q.dtype)
    p = p if self.training else 0.0
    hidden = mask if isinstance(mask, Tensor) and mask.dtype == torch.bool else None  # as MPT's are
    keep = mask if hidden is None else ~hidden
    y = block.attend(q, k, v, keep, bias=bias, scale=scale, dropout_p=p, backend=backend(self))
    if hidden is not None:  # one number for all scores of a row, which its softmax weighs alike
        y = torch.where(hidden.all(-1, keepdim=True), v.mean(-2, keepdim=True), y)
    return block.merge_heads(y)


def _why_not_bloom(attention_or_mlp: Any) -> str | None:
    sliced = attention_or_mlp.pretraining_tp > 1 and attention_or_mlp.slow_but_exact
    return "slow_but_exact is set" if sliced else None


def _fuse_bloom(original: Any) -> type:
    class Fused(original):
        def forward(
            self,
            hidden_states: Tensor,
            alibi: Tensor,
            attention_mask: Any,
            layer_past: Any = None,
            use_cache: bool = False,
            output_attentions: bool = False,
            **kwargs: Any,
        ) -> tuple[Tensor, Any]:
            attention = guard.child(self, "self_attention")
            reason = huggingface.why_not_own_attention(output_attentions, hidden_states) or _BLOOM.why_not(self)
            if fell_back(self, reason or _why_not_bloom(attention)):
                told = (layer_past, use_cache, output_attentions)
                return super().forward(hidden_states, alibi, attention_mask, *told, **kwargs)
            x = self.input_layernorm(hidden_states)
            residual = x if self.apply_residual_connection_post_layernorm else hidden_states
            q, k, v = attention._reshape(attention.query_key_value(x))
            if layer_past is not None:
                k, v = layer_past.update(k, v, attention.layer_idx)
            bias = alibi.view(x.shape[0], -1, 1, alibi.shape[-1])
            p, scale = attention.attention_dropout.p, attention.inv_norm_factor
            y = attention.dense(_attend(self, q, k, v, as_data(attention_mask), bias, p, scale))
            p = attention.hidden_dropout if self.training else 0.0
            y, z = block.add_norm(y, residual, self.post_attention_layernorm, dropout_p=p, backend=backend(self))
            return self.mlp(y, y if self.apply_residual_connection_post_layernorm else z), None

    return Fused


def _fuse_mpt(original: Any) -> type:
    class Fused(original):
        def forward(
            self,
            hidden_states: Tensor,
            position_bias: Tensor,
            attention_mask: Any,
            layer_past: Any = None,
            use_cache: bool = False,
            output_attentions: bool = False,
            **kwargs: Any,
        ) -> tuple[Tensor, Any]:
            reason = huggingface.why_not_own_attention(output_attentions, hidden_states) or _MPT.why_not(self)
            if fell_back(self, reason):
                told = (layer_past, use_cache, output_attentions)
                return super().forward(hidden_states, position_bias, attention_mask, *told, **kwargs)
            attention = guard.child(self, "attn")
            projected, limit = attention.Wqkv(self.norm_1(hidden_states)), attention.clip_qkv
            projected = projected.clamp(min=-limit, max=limit) if limit else projected
            q, k, v = (block.split_heads(t, attention.n_heads) for t in projected.chunk(3, dim=-1))
            if layer_past is not None:
                k, v = layer_past.update(k, v, attention.layer_idx)
            bias = position_bias[None, :, :, max(0, position_bias.shape[-1] - k.shape[-2]) :]
            y = _attend(self, q, k, v, as_data(attention_mask), bias, attention.attn_dropout_p, attention.softmax_scale)
            told_sum: Any = {"dropout_p": block.dropout_p(self.resid_attn_dropout), "backend": backend(self)}
            y, z = block.add_norm(attention.out_proj(y), hidden_states, self.norm_2, **told_sum)
            return self.ffn(y, z), None

    return Fused


def _fuse_mlp(
    known: Known, first: str, second: str, why_not: Callable[[Any], str | None] = lambda mlp: None
) -> Callable[[Any], type]:
    """residual + dropout(second(activation(first(x)))), BLOOM's activation by its own form of GELU."""

    def fuse(original: Any) -> type:
        class Fused(original):
            def forward(self, hidden_states: Tensor, residual: Tensor) -> Tensor:
                if fell_back(self, known.why_not(self) or why_not(self)):
                    return super().forward(hidden_states, residual)
                name: Any = "gelu_tanh" if known.activation is None else block.activation(known.function(self))
                layers = guard.child(self, first), guard.child(self, second)
                y = block.feed_forward(hidden_states, *layers, name, backend=backend(self))
                return residual + F.dropout(y, self.hidden_dropout, self.training)

        return Fused

    return fuse


def _is_bloom_mlp(mlp: nn.Module) -> bool | str:
    answer, own = _BLOOM_MLP.recognise(mlp), huggingface.file_of(mlp)
    functions = (getattr(own, f"bloom_gelu_{name}", len) for name in ("forward", "back"))
    if answer is True and tuple(map(source.fingerprint, functions)) != _BLOOM_GELU:
        return "its activation is not the known one"
    return _why_not_bloom(mlp) or True if answer is True else answer


_WHAT = "attention, and sum and LayerNorm in one pass"
_UNASKED = ("output.1",)  # attention weights
for _recipe in (
    Recipe("bloom.block", _BLOOM.recognise, _fuse_bloom, _WHAT, _BLOOM.covers, unasked=_UNASKED),
    Recipe("mpt.block", _MPT.recognise, _fuse_mpt, _WHAT, _MPT.covers, unasked=_UNASKED),
    Recipe(
        "bloom.mlp", _is_bloom_mlp, _fuse_mlp(_BLOOM_MLP, "dense_h_to_4h", "dense_4h_to_h", _why_not_bloom),
        "feed-forward", _BLOOM_MLP.covers,
    ),
    Recipe(
        "mpt.mlp", _MPT_MLP.recognise, _fuse_mlp(_MPT_MLP, "up_proj", "down_proj"), "feed-forward", _MPT_MLP.covers
    ),
):  # fmt: skip
    register_recipe(_recipe, first=False)
