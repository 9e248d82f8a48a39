"""Models of transformers whose forward runs its layers itself: packed as a whole, tokens, positions and all.

The model's own forward then runs on one row, the tokens of all rows behind one another, with their positions written
out and a Packed where it would make a mask; what it gives is spread out again.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..mask import Mask
from ..nn.packed import Packed
from . import guard, huggingface, swap
from .registry import Recipe, register_recipe
from .source import says

WHAT = "padded batches run packed; padded positions give 0"
_BY_TOKEN = ("input_ids", "token_type_ids", "position_ids")  # (B, T), or (1, T) for all rows
_COLLECTS = ("output_attentions", "output_hidden_states")
_KNOWN = {*_BY_TOKEN, *_COLLECTS, "inputs_embeds", "attention_mask", "return_dict"}


def register_model(
    name: str,
    forward: str,
    why_not: Callable[[Any], str | None],
    masks: Callable[[Any, Packed], Any],
    calls: tuple[str, ...],
    drops: tuple[str, ...],
    layers: str = "layers",
) -> None:
    """A recipe for a model, beside the switch of its attention.

    Args:
        name: of the recipe.
        forward: its forward's fingerprint (source.py).
        why_not: why_not(layer) tells what keeps a fused layer from running packed, or None.
        masks: masks(model, packed) is what the model's forward takes as its ``attention_mask`` and gives its layers.
        calls: its children that it calls itself, which nobody may watch; one that is not there is passed by.
        drops: dropouts among these, dotted, whose elements would be others.
        layers: its ModuleList of layers.
    """

    def recognise(module: nn.Module) -> bool:
        held = module._modules.get(layers)
        return isinstance(held, nn.ModuleList) and len(held) > 0 and says(module, "forward", forward)

    def fuse(original: Any) -> type:
        names = list(inspect.signature(original.forward).parameters)[1:]

        class Fused(original):
            @functools.wraps(original.forward)
            def forward(self, *args: Any, **kwargs: Any) -> Any:
                told = {**dict(zip(names, args, strict=False)), **kwargs}
                packed = _packing(self, told, layers, why_not, calls, drops)
                if packed is None:
                    return super().forward(*args, **kwargs)
                outputs = super().forward(**_packed(told, packed), attention_mask=masks(self, packed))
                outputs.last_hidden_state = packed.unpack(outputs.last_hidden_state)
                if outputs.get("pooler_output") is not None:  # of the first row's first token
                    outputs.pooler_output = self.pooler(outputs.last_hidden_state)
                return outputs

        return Fused

    register_recipe(Recipe(name, recognise, fuse, WHAT, packs=True), first=False)
    swap.on_load[name] = huggingface.register


def _packing(
    model: Any,
    told: dict[str, Any],
    layers: str,
    why_not: Callable[[Any], str | None],
    calls: tuple[str, ...],
    drops: tuple[str, ...],
) -> Packed | None:
    """How a call of a model runs packed, or None where it does not."""
    mask, tokens = told.get("attention_mask"), told.get("input_ids")
    tokens = told.get("inputs_embeds") if tokens is None else tokens
    if not (isinstance(mask, Tensor) and mask.dim() == 2 and isinstance(tokens, Tensor) and swap.is_fused(model)):
        return None
    if guard.tracing(tokens, mask) or mask.shape != tokens.shape[:2] or bool(mask.all()):
        return None
    keep = Mask.keep((mask != 0)[:, None, None, :])

    def why_not_model(model: Any) -> str | None:
        return _why_not(model, told, calls, drops)

    return huggingface.packing(model, keep, tokens, model._modules[layers], why_not, why_not_model, behind=True)


def _why_not(model: Any, told: dict[str, Any], calls: tuple[str, ...], drops: tuple[str, ...]) -> str | None:
    if any(given is not None and name not in _KNOWN for name, given in told.items()):
        return "it was called with more than tokens and their padding"
    if told.get("return_dict") is False or not getattr(model.config, "return_dict", True):
        return "its outputs were asked for as a tuple"
    if any(told.get(name) or getattr(model.config, name, False) for name in _COLLECTS):
        return "output_hidden_states or output_attentions was asked for"
    if any(name in model._modules and guard.hooked(model._modules[name]) for name in calls):
        return "a part of it has hooks"
    drawn = any(_drops(model, path) for path in drops)
    return "its embeddings' dropout would count other rows" if drawn else None


def _drops(model: nn.Module, path: str) -> bool:
    drop = guard.child(model, path)
    return drop.p > 0.0 and drop.training


def _packed(told: dict[str, Any], packed: Packed) -> dict[str, Any]:
    """The arguments of a call, all rows in one, and each token's position."""
    shape = (packed.batch, packed.length)
    given = {name: told[name] for name in (*_BY_TOKEN, "inputs_embeds") if told.get(name) is not None}
    own = {name: _one_row(x, shape, packed.index) for name, x in given.items()}
    return {"position_ids": (packed.index % packed.length).unsqueeze(0), **own}


def _one_row(x: Tensor, shape: tuple[int, int], index: Tensor) -> Tensor:
    return x.expand(*shape, *x.shape[2:]).flatten(0, 1).index_select(0, index).unsqueeze(0)
