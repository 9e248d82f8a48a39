"""Feed-forward blocks of transformers that whole families share, recognised by what their code says."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from .._autocast import autocast_dtype
from . import block
from .guard import CONV1D
from .known import Known
from .registry import Recipe, register_recipe
from .swap import fell_back, first_parameter, options

# the code of Llama's block, and of Phi 3's, whose first layer is its gate, too
GATED = ("c667e32817f7", "89b34cccf0d0")


def register_unary(name: str, what: str, known: Known, run: Any) -> None:
    """A recipe for modules whose forward takes one tensor; ``run`` may give part of a sentence where it will not."""

    def fuse(original: Any) -> type:
        first = first_parameter(original)

        class Fused(original):
            @functools.wraps(original.forward)
            def forward(self, *args: Any, **kwargs: Any) -> Tensor:
                x = args[0] if args else kwargs.get(first)
                if x is None or len(args) + len(kwargs) > 1:
                    return super().forward(*args, **kwargs)  # which says what is wrong
                result = known.why_not(self) or run(self, x)
                if not isinstance(result, str):
                    return result
                fell_back(self, result)
                return super().forward(x)

        return Fused

    register_recipe(Recipe(name, known.recognise, fuse, what, known.covers), first=False)


def _feed_forward(
    known: Known,
    first: str,
    second: str,
    gate: str | None = None,
    after: str | None = None,
    inner: str | None = None,
) -> Any:
    """second(activation(first(x))), with a gate times gate(x), and a dropout after it that stays as it is.

    A gate that is the first is the second half of what that gives. ``after`` is a module, or a probability; ``inner``
    is the dropout in front of the second.
    """

    def run(self: Any, x: Tensor) -> Tensor | str:
        w1, w2, w3 = getattr(self, first), getattr(self, second), None if gate is None else getattr(self, gate)
        if len({x.dtype, *block.dtypes(w1, w2)}) > 1 and autocast_dtype(x.device) is None:
            return "its weights have several dtypes"  # as T5 in float16, whose second matrix stays float32
        name: Any = block.activation(known.function(self))
        p = 0.0 if inner is None else block.dropout_p(getattr(self, inner))
        y = block.feed_forward(x, w1, w2, name, w3, dropout_p=p, backend=options(self).backend)
        if after is None:
            return y
        drop = getattr(self, after)
        return drop(y) if isinstance(drop, nn.Module) else F.dropout(y, drop, self.training)

    return run


def register_feed_forward(name: str, known: Known, *args: Any, **kwargs: Any) -> None:
    """A recipe for a feed-forward block: the names of its children are those of ``_feed_forward``."""
    register_unary(name, "feed-forward", known, _feed_forward(known, *args, **kwargs))


# fingerprints of transformers 5.23 (source.py)
register_feed_forward(
    "gpt2.mlp",  # also GPT-Neo and GPT-BigCode
    Known({"forward": "e0cb41d12c40"}, dict.fromkeys(("c_fc", "c_proj"), (CONV1D, nn.Linear)), (), "act", ("dropout",)),
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
    "wi", "wo", inner="dropout",
)  # fmt: skip
register_feed_forward(
    "t5.gated_dense",
    Known(
        {"forward": "cf9a3d16beb9"},
        {"wi_0": nn.Linear, "wi_1": nn.Linear, "wo": nn.Linear, "dropout": nn.Dropout}, (), "act",
    ),
    "wi_0", "wo", gate="wi_1", inner="dropout",
)  # fmt: skip
register_feed_forward(
    "llama.mlp",  # also Mistral, Qwen ...
    Known(
        {"forward": GATED[0]},
        {"gate_proj": nn.Linear, "up_proj": nn.Linear, "down_proj": nn.Linear}, (), "act_fn",
    ),
    "gate_proj", "down_proj", gate="up_proj",
)  # fmt: skip
register_feed_forward(
    "phi3.mlp",  # also GLM
    Known({"forward": GATED[1]}, {"gate_up_proj": nn.Linear, "down_proj": nn.Linear}, (), "activation_fn"),
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
register_feed_forward(
    "gptj.mlp",  # also CodeGen
    Known({"forward": "8e1af19ce781"}, {"fc_in": nn.Linear, "fc_out": nn.Linear}, (), "act", ("dropout",)),
    "fc_in", "fc_out", after="dropout",
)  # fmt: skip
register_feed_forward(
    "starcoder2.mlp",
    Known({"forward": "48bdf6cd43a6"}, {"c_fc": nn.Linear, "c_proj": nn.Linear}, (), "act", shares=True),
    "c_fc", "c_proj", after="residual_dropout",
)  # fmt: skip
register_feed_forward(
    "wav2vec2.feed_forward",  # also HuBERT, UniSpeech, WavLM, SpeechT5 ...; transformers 5.24
    Known(
        {"forward": "16430e12a9aa"},
        {"intermediate_dense": nn.Linear, "output_dense": nn.Linear, "intermediate_dropout": nn.Dropout},
        (), "intermediate_act_fn", ("output_dropout",),
    ),
    "intermediate_dense", "output_dense", after="output_dropout", inner="intermediate_dropout",
)  # fmt: skip
