"""Whether a class computes the attention that its declaration says, tried on a few rows.

What cannot be tried is believed: other layers than nn.Linear, hooked ones, and forwards that refuse such rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from . import guard
from .declaration import number
from .declared_attention import AXES, MASKS, DeclaredAttention
from .declared_numbers import attempt, differ, in_training, require_dropouts

_OP = "declare_attention"
_ROWS = 2
_LENGTH = 5


def require_attention(cls: type[nn.Module], module: nn.Module, declared: DeclaredAttention) -> None:
    """Raises where the forward of ``cls`` is not what is declared: without a mask, with one, and in training."""
    layers = [guard.child(module, name) for name in declared.projections]
    if not all(isinstance(layer, nn.Linear) and type(layer.weight) is nn.Parameter for layer in layers):
        return
    around = (declared.norm, declared.out)
    called = [*layers, *(guard.child(module, name) for name in around if name is not None)]
    if any(map(guard.hooked, called)) or any(p.is_meta for p in module.parameters()):
        return
    if not all(layer.weight.is_floating_point() for layer in layers):
        return
    if declared.kv_heads is None and len({layer.out_features for layer in layers[:2]}) > 1:
        raise ValueError(
            f"{_OP}: kv_heads must say how many heads the keys have where {declared.projections[0]} gives "
            f"{layers[0].out_features} features and {declared.projections[1]} {layers[1].out_features}, got None"
        )
    trial = _Trial(cls, module, layers, declared)
    with in_training(module, []):
        trial.require(declared, [None], "without a mask")
        if declared.arguments[3] is not None:
            trial.require(declared, trial.masks(declared), "with a mask")
    inside = [inner for layer in called for inner in layer.modules()]
    drops = (declared.dropout, declared.out_dropout)
    forward, written = lambda: trial.forward(None)[0], lambda: trial.written(declared, None)[0]
    require_dropouts(_OP, cls, module, drops, inside, forward, written)


class _Trial:
    """Calls of one module's forward on the same few rows, and what declarations say of them."""

    def __init__(self, cls: type[nn.Module], module: Any, layers: list[nn.Linear], declared: DeclaredAttention) -> None:
        self.cls, self.module = cls, module
        self.heads = number(module, declared.heads)
        *names, self.last = declared.arguments
        generator, weight = torch.Generator().manual_seed(0), layers[0].weight
        self.named: dict[str, Any] = {}
        for name, layer in zip(names, layers if len(layers) == 3 else layers * 3, strict=True):
            rows = torch.randn(_ROWS, _LENGTH, layer.in_features, generator=generator)
            self.named[name] = (3 * rows).to(weight.device, weight.dtype)
        self.inputs = [self.named[name] for name in names]

    def forward(self, mask: Tensor | None) -> tuple[Any, ...]:
        """What the forward gives, a tuple also where that is one tensor."""
        given = self.named if self.last is None else {**self.named, self.last: mask}
        return _parts(self.cls.forward(self.module, **given))

    def written(self, declared: DeclaredAttention, mask: Any) -> tuple[Any, ...]:
        """What it is to give."""
        return declared.run(self.module, self.inputs, mask, "reference")

    def require(self, declared: DeclaredAttention, masks: list[Any], when: str) -> None:
        """Raises where the forward gives other numbers, under all ``masks`` that it takes."""
        reason = None
        for mask, got in self._taken(masks):
            self._require_parts(declared, got)
            reason = self._why_not(declared, mask, got)
            if reason is None:
                return
        if reason is not None:
            raise ValueError(
                f"{_OP}: {self.cls.__name__}.forward must give {declared.formula()}, got {reason} {when}: "
                f"{self._hint(declared, when)}"
            )

    def _taken(self, masks: list[Any]) -> Iterator[tuple[Any, tuple[Any, ...]]]:
        """The masks that the forward takes, each with what it gives."""
        for mask in masks:
            got, refused = attempt(self.module, lambda mask=mask: self.forward(mask))  # type: ignore[misc]
            if refused is None and isinstance(got[0], Tensor) and bool(got[0].isfinite().all()):
                yield mask, got

    def _require_parts(self, declared: DeclaredAttention, got: tuple[Any, ...]) -> None:
        if len(got) == 1 + declared.weights and isinstance(got[-1], Tensor):
            return
        wanted = "(result, weights)" if declared.weights else "the result alone"
        held = "the result alone" if len(got) == 1 else f"{len(got)} values"
        raise ValueError(
            f"{_OP}: {self.cls.__name__}.forward must give {wanted} where weights={declared.weights}, got {held}"
        )

    def _why_not(self, declared: DeclaredAttention, mask: Any, got: tuple[Any, ...]) -> str | None:
        """None where the forward gave what is declared, else part of a sentence."""
        wanted, wrong = attempt(self.module, lambda: self.written(declared, mask))
        if wrong is not None:
            return f"shapes that give none ({wrong})"
        return "other numbers" if any(differ(*pair) for pair in zip(got, wanted, strict=False)) else None

    def masks(self, declared: DeclaredAttention) -> list[Any]:
        """Masks as the declaration describes them, of all axes and dtypes; a query always sees its own key."""
        device, size = self.inputs[0].device, (self.heads if declared.mask_axis == "heads" else _ROWS)
        place = torch.arange(_LENGTH, device=device)
        every = torch.arange(size, device=device)[:, None, None]
        keep = ((2 * place[:, None] + place + every) % 3 != 0) | (place[:, None] == place)
        if declared.mask_axis == "keys":
            found = [place != 3 - torch.arange(_ROWS, device=device)[:, None]]
        elif declared.mask_axis is None:
            found = [keep[:, None], keep[0]]
        else:
            found = [keep]
        return [mask for each in found for mask in self._as_taken(each, declared.mask)]

    def _as_taken(self, keep: Tensor, meaning: str) -> tuple[Tensor, ...]:
        if meaning == "add":
            return (torch.zeros(keep.shape, device=keep.device).masked_fill(~keep, -1e4).to(self.inputs[0].dtype),)
        shown = ~keep if meaning == "hide" else keep
        return (shown,) if meaning == "sdpa" else (shown, shown.long())

    def _hint(self, declared: DeclaredAttention, when: str) -> str:
        """The declaration's argument that is wrong, where it is one of those that can be guessed."""
        if when == "without a mask":
            guesses: list[dict[str, Any]] = [{"causal": not declared.causal}]
        else:
            axes = dict.fromkeys((declared.mask_axis, None, *AXES))
            guesses = [{"mask_axis": axis, "mask": mask} for axis in axes for mask in MASKS]
        for guess in guesses:
            other = dataclasses.replace(declared, **guess)
            masks = [None] if when == "without a mask" else self.masks(other)
            if any(self._why_not(other, mask, got) is None for mask, got in self._taken(masks)):
                new = {name: value for name, value in guess.items() if value != getattr(declared, name)}
                return f"those of {', '.join(f'{name}={value!r}' for name, value in new.items())}"
        return "heads, kv_heads, causal, scale and the order of arguments and projections say which"


def _parts(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)
