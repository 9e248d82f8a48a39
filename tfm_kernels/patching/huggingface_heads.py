"""Heads of transformers that read padded positions: their models run padded, always or call by call.

A head for questions takes a softmax over all positions. Others are told labels, and where these count padding, as they
do where padding was not told from them by -100, the loss is that of what the original computes there.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import Tensor, nn

from .._transformers import is_model
from . import guard, huggingface, packed, swap
from .registry import Recipe, register_recipe, registered

WHAT = "runs padded where its labels count padding"
_LABELS = ("labels", "shift_labels")  # (B, T), of this position or of the next
_IGNORED = -100  # of transformers' losses


def below_span_heads(model: nn.Module) -> dict[int, str]:
    """id of a module -> why it runs padded, for all below a head that takes a softmax over all positions.

    Such heads, and those that people write after them, call their last layer ``qa_outputs``, or are called by what
    they do.
    """
    heads = (
        module
        for module in model.modules()
        if "qa_outputs" in module._modules or type(module).__name__.endswith("ForQuestionAnswering")
    )
    return {id(inner): "its model's head reads all positions, padding too" for m in heads for inner in m.modules()}


def _recognise(module: Any) -> bool:
    if not is_model(module) or getattr(module.config, "is_encoder_decoder", False):
        return False  # whose labels are the decoder's
    parameters = inspect.signature(swap.found_class(module).forward).parameters  # type: ignore[attr-defined]
    if "labels" not in parameters or "attention_mask" not in parameters:
        return False
    recipes = [recipe for recipe in registered() if recipe.packs and recipe.name != NAME]
    return any(recipe.recognise(inner) is True for inner in module.modules() for recipe in recipes)


def _fuse(original: Any) -> type:
    names = list(inspect.signature(original.forward).parameters)[1:]

    class Fused(original):
        @functools.wraps(original.forward)
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if any(kwargs.get(name) is not None for name in _LABELS) or len(args) > names.index("labels"):
                if _count_padding({**dict(zip(names, args, strict=False)), **kwargs}):
                    with packed.padded("its labels count padding, which -100 would leave out"):
                        return super().forward(*args, **kwargs)
            return super().forward(*args, **kwargs)

    return Fused


def _count_padding(told: dict[str, Any]) -> bool:
    """Whether labels, one a token, ask for what is computed at a position of padding."""
    mask = told.get("attention_mask")
    given = [told[name] for name in _LABELS if isinstance(told.get(name), Tensor)]
    if not isinstance(mask, Tensor) or guard.tracing(mask, *given):
        return False
    padding = mask == 0
    for labels in given:
        if labels.shape == mask.shape:
            counted = labels != _IGNORED
            if bool((counted & padding).any()) or bool((counted[:, 1:] & padding[:, :-1]).any()):
                return True
    return False


NAME = "huggingface.labels"
register_recipe(Recipe(NAME, _recognise, _fuse, WHAT, packs=True, whole=True), first=False)
swap.on_load[NAME] = huggingface.register
