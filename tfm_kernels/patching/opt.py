"""OPT and XGLM: layers that hold their feed-forward block themselves, and XGLM's attention, which knows no registry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from .. import _check
from .._autocast import as_autocast
from . import block, huggingface
from .bart import feed_forward
from .huggingface_mask import as_data, hides_a_row
from .known import Known
from .registry import Recipe, backend, register_recipe
from .swap import fell_back

# fingerprints of transformers 5.23, and of 5.24, where past_key_values became cache (source.py)
_READS = {"fc1": nn.Linear, "fc2": nn.Linear, "self_attn_layer_norm": nn.LayerNorm, "final_layer_norm": nn.LayerNorm}
_OPT, _XGLM = (
    Known({"forward": forward}, _READS, activation="activation_fn", calls=("self_attn",), shares=True)
    for forward in (("c1d4c827fd11", "85125201b9ce"), ("01b41a1da37a", "7a14249408fd"))
)
_XGLM_ATTENTION = Known(
    {"forward": ("c793d5d440f0", "a1bfefb4d639")}, {}, calls=("q_proj", "k_proj", "v_proj", "out_proj"), shares=True
)
_NOT_ATTENDED = ("use_cache", "encoder_hidden_states", "encoder_attention_mask")  # what a layer keeps from attention


def _normed_before(layer: Any) -> bool:
    return getattr(layer, "do_layer_norm_before", True)


def _covers(known: Known) -> Callable[[Any], list[nn.Module]]:
    """The first norm, where nothing is added before it, is called."""
    called = lambda layer: layer.self_attn_layer_norm if _normed_before(layer) else None  # noqa: E731
    return lambda layer: [module for module in known.covers(layer) if module is not called(layer)]


def _fuse_layer(known: Known, by_name: bool) -> Any:
    """``by_name``: how its own code gives attention its hidden states, and hooks then see them."""

    def fuse(original: Any) -> type:
        named = huggingface.named_arguments(original)

        class Fused(original):
            def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
                told = named(args, kwargs)
                crossed = told.get("encoder_hidden_states") is not None
                if fell_back(self, "it attends to encoder_hidden_states" if crossed else known.why_not(self)):
                    return super().forward(hidden_states, **told)
                told = {name: given for name, given in told.items() if name not in _NOT_ATTENDED}
                before = _normed_before(self)
                x = self.self_attn_layer_norm(hidden_states) if before else hidden_states
                x, _ = self.self_attn(hidden_states=x, **told) if by_name else self.self_attn(x, **told)
                p: Any = {"dropout_p": self.dropout if self.training else 0.0, "backend": backend(self)}
                if before:
                    y, z = block.add_norm(x, hidden_states, self.final_layer_norm, **p)
                    return z + F.dropout(feed_forward(self, known, y), self.dropout, self.training)
                z = block.norm_of_sum(x, hidden_states, self.self_attn_layer_norm, **p)
                return block.norm_of_sum(feed_forward(self, known, z), z, self.final_layer_norm, **p)

        return Fused

    return fuse


def _why_not_attention(attention: nn.Module, told: dict[str, Any], mask: Any, x: Tensor) -> str | None:
    if told.get("key_value_states") is not None:
        return "it attends to key_value_states"
    if huggingface.wants_weights(told):
        return "output_attentions was asked for"
    if hides_a_row(mask) and _check.records_graph(x, *attention.parameters()):
        return "its mask hides all keys of a row, whose gradients it halves"
    return _XGLM_ATTENTION.why_not(attention)


def _fuse_attention(original: Any) -> type:
    named = huggingface.named_arguments(original)
    keyword = huggingface.cache_keyword(original)

    class Fused(original):
        def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
            told = named(args, kwargs)
            mask = as_data(told["attention_mask"])
            if fell_back(self, _why_not_attention(self, told, mask, hidden_states)):
                return super().forward(hidden_states, **told)
            layers, cache = (self.q_proj, self.k_proj, self.v_proj), told[keyword]
            q, k, v = (block.split_heads(layer(hidden_states), self.num_heads) for layer in layers)
            if cache is not None:
                cache = getattr(cache, "self_attention_cache", cache)
                k, v = cache.update(k, v, self.layer_idx)
            q, k, v = as_autocast(q, k, v)
            p: Any = {"dropout_p": self.dropout if self.training else 0.0, "backend": backend(self)}
            y = block.attend(q, k, v, mask, scale=self.scaling, **p)
            return self.out_proj(block.merge_heads(y)), None

    return Fused


_WHAT = "sums with LayerNorm, and feed-forward"
for _recipe in (
    Recipe("opt.layer", _OPT.recognise, _fuse_layer(_OPT, True), _WHAT, _covers(_OPT)),
    Recipe("xglm.layer", _XGLM.recognise, _fuse_layer(_XGLM, False), _WHAT, _covers(_XGLM)),
    Recipe("xglm.attention", _XGLM_ATTENTION.recognise, _fuse_attention, "attention", unasked=("output.1",)),
):
    register_recipe(_recipe)  # first: other layers have the same children
