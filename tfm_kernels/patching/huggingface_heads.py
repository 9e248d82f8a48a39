"""Heads of transformers that read padded positions: their models run padded, always or call by call.

A head for questions takes a softmax over all positions. Others are told labels, and where these count padding, as they
do where padding was not told from them by -100, the loss is that of what the original computes there. A decoder's head
for sequences takes the last token that is not ``pad_token_id``, whatever the mask says of it.
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

import torch
from torch import Tensor, nn

from .._transformers import is_model
from . import guard, huggingface, packed, swap
from .registry import Recipe, register_recipe, registered
from .source import fingerprint

WHAT = "runs padded where its labels count padding, or padding is taken for a row's last token"
_LABELS = ("labels", "shift_labels")  # (B, T), of this position or of the next
_IGNORED = -100  # of transformers' losses
_AT_THEIR_PLACES = ("ForTokenClassification", "ForMaskedLM")  # heads whose labels are of the tokens themselves
_LAST = ("7ebdeff0ec90", "7e38a4cb37da")  # heads that take the last token, and Gemma 3's; of transformers 5.24


def below_reading_heads(model: nn.Module) -> dict[int, str]:
    """id of a module -> why it always runs padded, for all below a head that may read padding unseen.

    That is one that takes a softmax over all positions: such heads, and those that people write after them, call their
    last layer ``qa_outputs``, or are called by what they do. And one whose labels nobody can look at, as its instance
    has a forward of its own.
    """
    found = {}
    for module in model.modules():
        reason = None
        if "qa_outputs" in module._modules or type(module).__name__.endswith("ForQuestionAnswering"):
            reason = "its model's head reads all positions, padding too"
        elif "forward" in module.__dict__ and _recognise(module):
            reason = "its model's head has a forward of its own, whose labels may count padding"
        if reason is not None:
            found.update({id(inner): reason for inner in module.modules()})
    return found


def _recognise(module: Any) -> bool:
    if not is_model(module) or getattr(module.config, "is_encoder_decoder", False):
        return False  # whose labels are the decoder's
    if not {"labels", "attention_mask"} <= _parameters(swap.found_class(module))[1]:
        return False
    recipes = [recipe for recipe in registered() if recipe.packs and recipe.name != NAME]
    return any(recipe.recognise(inner) is True for inner in module.modules() for recipe in recipes)


def _parameters(original: type) -> tuple[list[str], set[str]]:
    """The order of its forward's parameters, and all that it knows by name, of those that it hands on, too."""
    order: list[str] = []
    known: set[str] = set()
    for cls in _written(original):
        found = inspect.signature(cls.__dict__["forward"]).parameters.values()
        named = [each.name for each in found if each.kind is each.POSITIONAL_OR_KEYWORD][1:]
        order, known = order or named, known | set(named)
        if not any(each.kind is each.VAR_KEYWORD for each in found):
            break
    return order, known


def _fuse(original: Any) -> type:
    names, _ = _parameters(original)
    last = _takes_last(original)
    shifts = not any(cls.__name__.endswith(_AT_THEIR_PLACES) for cls in original.__mro__)

    class Fused(original):
        @functools.wraps(original.forward)
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            told = {**dict(zip(names, args, strict=False)), **kwargs}
            reason = None
            if count_padding(told, shifts):
                reason = "its labels count padding, which -100 would leave out"
            elif _keeps_padding(told):
                reason = "logits of padding are asked for, as of the last token"
            elif last and _takes_padding(self.config, told):
                reason = "its head takes padding for the last token: pad_token_id does not say what its mask says"
            if reason is None:
                return super().forward(*args, **kwargs)
            with packed.padded(reason):
                return super().forward(*args, **kwargs)

    return Fused


def count_padding(told: dict[str, Any], shifts: bool) -> bool:
    """Whether labels, one a token, ask for what is computed at a position of padding; ``shifts``: at the one before."""
    mask = told.get("attention_mask")
    given = {name: told[name] for name in _LABELS if isinstance(told.get(name), Tensor)}
    if not isinstance(mask, Tensor) or guard.tracing(mask, *given.values()):
        return False
    padding = mask == 0
    for name, labels in given.items():
        if labels.shape == mask.shape:
            counted = labels.to(mask.device) != _IGNORED
            foretold = name == "labels" and shifts and bool((counted[:, 1:] & padding[:, :-1]).any())
            if foretold or bool((counted & padding).any()):
                return True
    return False


def _takes_last(original: type) -> bool:
    """Whether a head for sequences, or what it was made from, takes one token of a decoder."""
    layers = sys.modules.get("transformers.modeling_layers")
    generic = getattr(layers, "GenericForSequenceClassification", ())
    return issubclass(original, generic) or any(fingerprint(c.__dict__["forward"]) in _LAST for c in _written(original))


def _written(original: type) -> list[type]:
    return [cls for cls in original.__mro__ if "forward" in cls.__dict__]


def _mask_of_all(told: dict[str, Any]) -> Tensor | None:
    """The mask (B, T) of a call that may run packed: of all its tokens, and none that a cache holds."""
    mask, tokens = told.get("attention_mask"), told.get("input_ids")
    tokens = told.get("inputs_embeds") if tokens is None else tokens
    if not isinstance(mask, Tensor) or not isinstance(tokens, Tensor) or guard.tracing(mask) or mask.numel() == 0:
        return None
    return mask if mask.shape == tokens.shape[:2] else None


def _keeps_padding(told: dict[str, Any]) -> bool:
    """Whether the logits that alone are asked for, by their number, are of padding behind tokens."""
    mask, count = _mask_of_all(told), told.get("logits_to_keep")
    if mask is None or type(count) is not int or count <= 0:
        return False
    behind = (mask == 0) & ((mask != 0).cumsum(1) > 0)
    return bool(behind[:, -count:].any())


def _takes_padding(config: Any, told: dict[str, Any]) -> bool:
    """Whether the token that a head takes of some row is one that the mask hides."""
    mask, ids = _mask_of_all(told), told.get("input_ids")
    if mask is None:
        return False
    pad = config.get_text_config().pad_token_id
    if pad is None or ids is None:
        return not bool(mask[:, -1].all())
    places = torch.arange(ids.shape[1], device=ids.device)
    taken = (places * (ids != pad)).argmax(1, keepdim=True)
    return not bool(mask.gather(1, taken.to(mask.device)).all())


NAME = "huggingface.labels"
register_recipe(Recipe(NAME, _recognise, _fuse, WHAT, packs=True, whole=True), first=False)
swap.on_load[NAME] = huggingface.register
