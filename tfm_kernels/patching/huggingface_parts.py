"""Feed-forward blocks and RMS norms of transformers that whole families share, recognised by what their code says."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from .._autocast import autocast_dtype
from . import block
from .guard import CONV1D
from .known import Known
from .registry import Recipe, register_recipe
from .swap import fell_back, options

_IN_FLOAT64 = "in float64 its own code takes the variance in float32"


def _register(name: str, what: str, known: Known, run: Any) -> None:
    """A recipe for modules whose forward takes one tensor; ``run`` may give part of a sentence where it will not."""

    def fuse(original: Any) -> type:
        class Fused(original):
            def forward(self, hidden_states: Tensor) -> Tensor:
                result = known.why_not(self) or run(self, hidden_states)
                if not isinstance(result, str):
                    return result
                fell_back(self, result)
                return super().forward(hidden_states)

        return Fused

    register_recipe(Recipe(name, known.recognise, fuse, what, known.covers), first=False)


def _feed_forward(known: Known, first: str, second: str, gate: str | None = None, after: str | None = None) -> Any:
    """second(activation(first(x))), with a gate times gate(x), and a dropout after it that stays as it is.

    A gate that is the first is the second half of what that gives.
    """

    def run(self: Any, x: Tensor) -> Tensor | str:
        w1, w2, w3 = getattr(self, first), getattr(self, second), None if gate is None else getattr(self, gate)
        if len({x.dtype, *block.dtypes(w1, w2)}) > 1 and autocast_dtype(x.device) is None:
            return "its weights have several dtypes"  # as T5 in float16, whose second matrix stays float32
        if w3 is not None and w3.bias is not None:
            return f"{gate} has a bias"
        name: Any = block.activation(known.function(self))
        inner = block.dropout_p(self.dropout) if after is None and "dropout" in known.reads else 0.0
        y = block.feed_forward(x, w1, w2, name, w3, dropout_p=inner, backend=options(self).backend)
        return y if after is None else getattr(self, after)(y)

    return run


def register_feed_forward(name: str, known: Known, *args: Any, **kwargs: Any) -> None:
    """A recipe for a feed-forward block: the names of its children are those of ``_feed_forward``."""
    _register(name, "feed-forward", known, _feed_forward(known, *args, **kwargs))


def _scale(norm: Any) -> tuple[Tensor, float]:
    """Weight and eps of an RMS norm; Gemma's, which alone calls it ``eps``, keeps its weight as the distance from 1."""
    if hasattr(norm, "variance_epsilon"):
        return norm.weight, norm.variance_epsilon
    return 1.0 + norm.weight.float(), norm.eps


def _why_not_rms_norm(norm: Any, x: Tensor) -> str | None:
    """None where T5's, Llama's or Gemma's norm of ``x`` is that of ops, else why not."""
    if hasattr(norm, "variance_epsilon") and norm.weight.dtype != x.dtype:
        return "its weight has another dtype than its input"
    return _IN_FLOAT64 if norm.weight.dtype.itemsize == 8 or x.dtype.itemsize == 8 else None


def _rms_norm(self: Any, x: Tensor) -> Tensor | str:
    return _why_not_rms_norm(self, x) or ops.rms_norm(x, *_scale(self), backend=options(self).backend)


def _olmo_norm(self: Any, x: Tensor) -> Tensor | str:
    """Rounded once, to the dtype of its input: that may be 16 bits beside a weight in float32, as under autocast."""
    if self.weight.dtype != torch.float32 or x.dtype.itemsize == 8:
        return _rms_norm(self, x)
    return ops.rms_norm(x, self.weight, self.variance_epsilon, backend=options(self).backend)


def why_not_sum_and_norm(norm: Any, residual: Tensor) -> str | None:
    """None where ``sum_and_norm`` may run, else why not; the class of ``norm`` is the caller's matter."""
    return None if isinstance(norm, nn.LayerNorm) else _why_not_rms_norm(norm, residual)


def sum_and_norm(x: Tensor, residual: Tensor, norm: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """(y, z): z = residual + dropout(x), y = norm(z) for an nn.LayerNorm or an RMS norm of T5, Llama or Gemma."""
    if isinstance(norm, nn.LayerNorm):
        return block.add_norm(x, residual, norm, **options)
    return ops.add_rms_norm(x, residual, *_scale(norm), **options)


# fingerprints of transformers 5.23 (source.py)
LLAMA_NORM = "f5c95295c0f8"
GEMMA_NORM = {"forward": "6178835fbd02", "_norm": "020b369189b2"}
register_feed_forward(
    "gpt2.mlp",
    Known({"forward": "e0cb41d12c40"}, {"c_fc": CONV1D, "c_proj": CONV1D}, (), "act", ("dropout",)),
    "c_fc", "c_proj", after="dropout",
)  # fmt: skip
register_feed_forward(
    "vit.mlp",  # also CLIP, SigLIP, DeiT, DINOv2 ...
    Known({"forward": "a8035f85cdc2"}, {"fc1": nn.Linear, "fc2": nn.Linear}, (), "activation_fn"),
    "fc1", "fc2",
)  # fmt: skip
register_feed_forward(
    "t5.dense",
    Known({"forward": "18d4ed839daf"}, {"wi": nn.Linear, "wo": nn.Linear, "dropout": nn.Dropout}, (), "act"),
    "wi", "wo",
)  # fmt: skip
register_feed_forward(
    "t5.gated_dense",
    Known(
        {"forward": "cf9a3d16beb9"},
        {"wi_0": nn.Linear, "wi_1": nn.Linear, "wo": nn.Linear, "dropout": nn.Dropout}, (), "act",
    ),
    "wi_0", "wo", gate="wi_1",
)  # fmt: skip
register_feed_forward(
    "llama.mlp",  # also Mistral, Qwen ...
    Known(
        {"forward": "c667e32817f7"},
        {"gate_proj": nn.Linear, "up_proj": nn.Linear, "down_proj": nn.Linear}, (), "act_fn",
    ),
    "gate_proj", "down_proj", gate="up_proj",
)  # fmt: skip
register_feed_forward(
    "phi3.mlp",  # also GLM
    Known({"forward": "89b34cccf0d0"}, {"gate_up_proj": nn.Linear, "down_proj": nn.Linear}, (), "activation_fn"),
    "gate_up_proj", "down_proj", gate="gate_up_proj",
)  # fmt: skip
register_feed_forward(
    "gpt_neox.mlp",
    Known(
        {"forward": "abce40abef66"},
        {"dense_h_to_4h": nn.Linear, "dense_4h_to_h": nn.Linear}, (), "act", shares=True,
    ),
    "dense_h_to_4h", "dense_4h_to_h",
)  # fmt: skip
_register("t5.norm", "rms_norm", Known({"forward": "b5a15c016629"}, {}), _rms_norm)
_register("llama.norm", "rms_norm", Known({"forward": LLAMA_NORM}, {}), _rms_norm)
_register("olmo2.norm", "rms_norm", Known({"forward": "9bb6bb8e55cf"}, {}), _olmo_norm)
_register("gemma.norm", "rms_norm", Known(GEMMA_NORM, {}), _rms_norm)
