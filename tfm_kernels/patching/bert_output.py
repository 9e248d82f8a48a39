"""Parts of BERT-like layers that many families share: sum and LayerNorm, and the feed-forward block with it.

They serve layers whose other parts must keep their own code, because nobody knows it or because it holds adapters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from . import block
from .known import Known
from .registry import Recipe
from .swap import fell_back, options

# fingerprints of transformers 5.23 and 5.24 (source.py); another version's code is known only where it says the same
OUTPUT = "bd131388eee1"
INTERMEDIATE = "8e7087e943e0"
FEED_FORWARD_CHUNK = "7d18a4174290"


_OUTPUT = Known({"forward": OUTPUT}, {"LayerNorm": nn.LayerNorm, "dropout": nn.Dropout}, calls=("dense",))
_FEED_FORWARD = Known(
    {"feed_forward_chunk": FEED_FORWARD_CHUNK, "intermediate.forward": INTERMEDIATE, "output.forward": OUTPUT},
    {
        "intermediate.dense": nn.Linear,
        "output.dense": nn.Linear,
        "output.LayerNorm": nn.LayerNorm,
        "output.dropout": nn.Dropout,
    },
    ("intermediate", "output"),
    "intermediate.intermediate_act_fn",
)


def inside(known: Known) -> Callable[[Any], list[nn.Module]]:
    """What a fused layer runs; its two outputs get a recipe of their own, for the calls that fall back."""

    def children(layer: Any) -> list[nn.Module]:
        outputs = (layer.attention.output, layer.output)
        return [inner for inner in known.covers(layer) if not any(inner is output for output in outputs)]

    return children


def _fuse_output(original: Any) -> type:
    class Fused(original):
        def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
            if fell_back(self, _OUTPUT.why_not(self)):
                return super().forward(hidden_states, input_tensor)
            return add_norm(self, self.dense(hidden_states), input_tensor, None, options(self).backend)

    return Fused


def _fuse_feed_forward(original: Any) -> type:
    class Fused(original):
        def feed_forward_chunk(self, attention_output: Tensor) -> Tensor:
            return feed_forward_chunk(self, attention_output, super().feed_forward_chunk)

    return Fused


def feed_forward_chunk(self: Any, x: Tensor, original: Callable[[Tensor], Tensor]) -> Tensor:
    """A layer's feed_forward_chunk, fused where its children allow it, else ``original``."""
    if fell_back(self, _FEED_FORWARD.why_not(self)):
        return original(x)
    return feed_forward(self, x, None, options(self).backend)


def feed_forward(self: Any, x: Tensor, rows: Tensor | None, backend: str | None) -> Tensor:
    """LN(x + dropout(ffn(x))) of a layer with ``intermediate`` and ``output``."""
    name: Any = block.activation(self.intermediate.intermediate_act_fn)
    y = block.feed_forward(x, self.intermediate.dense, self.output.dense, name, backend=backend)
    return add_norm(self.output, y, x, rows, backend)


def add_norm(output: Any, x: Tensor, residual: Tensor, rows: Tensor | None, backend: str | None) -> Tensor:
    """LN(residual + dropout(x)) of an output with ``dropout`` and ``LayerNorm``."""
    p = block.dropout_p(output.dropout)
    return block.norm_of_sum(x, residual, output.LayerNorm, dropout_p=p, dropout_rows=rows, backend=backend)


RECIPES = (  # registered by bert.py, behind the recipes that take more
    Recipe(
        "bert.feed_forward", _FEED_FORWARD.recognise, _fuse_feed_forward, "feed-forward, sum and LayerNorm",
        lambda layer: [layer.intermediate, layer.intermediate.dense, layer.output.dense],  # type: ignore
    ),
    Recipe("bert.output", _OUTPUT.recognise, _fuse_output, "dropout, sum and LayerNorm in one pass", _OUTPUT.covers),
)  # fmt: skip
