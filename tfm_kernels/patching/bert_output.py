"""Parts of BERT-like layers that many families share: sum and LayerNorm, and the feed-forward block with it.

They serve layers whose other parts must keep their own code, because nobody knows it or because it holds adapters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from . import block, guard
from .registry import Recipe
from .source import has_children, says
from .swap import fell_back, options

# fingerprints of transformers 5.23 (source.py); another version's code is known only where it says the same
OUTPUT = "bd131388eee1"
INTERMEDIATE = "8e7087e943e0"
FEED_FORWARD_CHUNK = "7d18a4174290"


def _recognise_output(module: nn.Module) -> bool | str:
    if not has_children(module, "dense", "LayerNorm", "dropout") or len(module._modules) != 3:
        return False
    if not says(module, "forward", OUTPUT):
        return guard.UNKNOWN_FORWARD
    return _why_not_output(module) or True


def _why_not_output(module: nn.Module) -> str | None:
    if guard.hooked_everywhere():
        return guard.GLOBAL_HOOKS
    return guard.why_not_plain(module, "LayerNorm", nn.LayerNorm) or guard.why_not_plain(module, "dropout", nn.Dropout)


def _fuse_output(original: Any) -> type:
    class Fused(original):
        def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
            reason = _why_not_output(self)
            if reason is not None:
                fell_back(self, reason)
                return super().forward(hidden_states, input_tensor)
            return add_norm(self, self.dense(hidden_states), input_tensor, None, options(self).backend)

    return Fused


def _recognise_feed_forward(module: nn.Module) -> bool | str:
    if not has_children(module, "intermediate.dense", "output.dense", "output.LayerNorm", "output.dropout"):
        return False
    known = (
        says(module, "feed_forward_chunk", FEED_FORWARD_CHUNK)
        and says(module.intermediate, "forward", INTERMEDIATE)
        and says(module.output, "forward", OUTPUT)
    )
    return (_why_not_feed_forward(module) or True) if known else guard.UNKNOWN_FORWARD


def _why_not_feed_forward(layer: Any) -> str | None:
    if guard.hooked_everywhere():
        return guard.GLOBAL_HOOKS
    if guard.hooked(layer.intermediate) or guard.hooked(layer.output):
        return "intermediate or output has hooks"
    return (
        guard.why_not_plain(layer, "intermediate.dense", nn.Linear)
        or guard.why_not_plain(layer, "output.dense", nn.Linear)
        or guard.why_not_plain(layer, "output.LayerNorm", nn.LayerNorm)
        or guard.why_not_plain(layer, "output.dropout", nn.Dropout)
        or block.why_not_activation(layer.intermediate.intermediate_act_fn)
    )


def _fuse_feed_forward(original: Any) -> type:
    class Fused(original):
        def feed_forward_chunk(self, attention_output: Tensor) -> Tensor:
            return feed_forward_chunk(self, attention_output, super().feed_forward_chunk)

    return Fused


def feed_forward_chunk(self: Any, x: Tensor, original: Callable[[Tensor], Tensor]) -> Tensor:
    """A layer's feed_forward_chunk, fused where its children allow it, else ``original``."""
    reason = _why_not_feed_forward(self)
    if reason is not None:
        fell_back(self, reason)
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
    return block.add_norm(x, residual, output.LayerNorm, dropout_p=p, dropout_rows=rows, backend=backend)


RECIPES = (  # registered by bert.py, behind the recipes that take more
    Recipe(
        "bert.feed_forward", _recognise_feed_forward, _fuse_feed_forward, "feed-forward, sum and LayerNorm",
        lambda layer: [guard.child(layer, path) for path in ("intermediate", "intermediate.dense", "output.dense")],
    ),
    Recipe(
        "bert.output", _recognise_output, _fuse_output, "dropout, sum and LayerNorm in one pass",
        lambda module: [module.LayerNorm, module.dropout],  # type: ignore[list-item]
    ),
)  # fmt: skip
