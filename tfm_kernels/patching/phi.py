"""Phi 1 and 2, StableLM and Persimmon: a part of each head is turned, and its queries and keys may be normalised."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .decoder import (
    PROJECTIONS,
    Heads,
    layer_code,
    plain,
    register_attention,
    register_layer,
    register_side_by_side,
)
from .known import Known

# fingerprints of transformers 5.23, and of 5.24, where past_key_values became cache (source.py)
_PHI = Known({"forward": ("820580721812", "e4796a0f5683")}, {}, calls=("q_proj", "k_proj", "v_proj", "dense"))
_STABLELM = Known({"forward": ("5eef29be778d", "d1d03cac4808")}, {}, calls=PROJECTIONS)
_PERSIMMON = Known(
    {"forward": ("b483c56d02e2", "3f3641e4bd27"), "_split_heads": "1febc8158358"},
    {}, calls=("query_key_value", "dense"), shares=True,
)  # fmt: skip
_PHI_LAYER = Known(
    {"forward": ("0399fdc3b791", "dae5360dacc3")},
    {}, calls=("input_layernorm", "self_attn", "mlp", "resid_dropout"), shares=True,
)  # fmt: skip
_STABLELM_LAYER = ("71231f0f39e4", "9cc886863ea8")
_STABLELM_SIDE_BY_SIDE = Known(
    {"forward": _STABLELM_LAYER}, {}, calls=("input_layernorm", "self_attn", "mlp", "dropout"), shares=True
)
_PERSIMMON_LAYER = ("bc680d7f07f3", "5cef94b43acf")
_NORM = "post_attention_layernorm"


def _normed(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Heads:
    return (self.q_layernorm(q), self.k_layernorm(k), v) if self.qk_layernorm else (q, k, v)


def _split_heads(self: Any, x: Tensor) -> Any:
    """Normalised before they are transposed."""
    return tuple(t.transpose(1, 2) for t in _normed(self, *self._split_heads(self.query_key_value(x))))


def _normed_heads(self: Any, x: Tensor) -> Heads:
    return _normed(self, *plain(self, x))


def _dense(self: Any, y: Tensor) -> Tensor:
    return self.dense(y)


register_attention("phi", _PHI, _normed_heads, finish=_dense)
register_attention("stablelm", _STABLELM, _normed_heads)
register_attention(
    "persimmon", _PERSIMMON, _split_heads, lambda module: {"dropout": module.config.attention_dropout}, finish=_dense
)
register_side_by_side("phi", _PHI_LAYER)
register_side_by_side("stablelm.parallel", _STABLELM_SIDE_BY_SIDE)
register_layer("stablelm", layer_code(_STABLELM_LAYER, _NORM, nn.LayerNorm, "dropout"), after_mlp="dropout")
register_layer("persimmon", layer_code(_PERSIMMON_LAYER, _NORM, nn.LayerNorm, "dropout"), after_mlp="dropout")
