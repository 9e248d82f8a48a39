"""Feed-forward blocks inside nn.Sequential: Linear, activation, Dropout, Linear, or the same with 1x1 convolutions."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import block, guard
from .registry import Recipe, register_recipe
from .swap import fell_back, options, original_class


class Run(NamedTuple):
    """Consecutive children that make up one feed-forward block."""

    length: int
    first: nn.Module
    activation: str
    dropout: nn.Module | None
    second: nn.Module


def _run(children: list[nn.Module], start: int) -> Run | None:
    """The block that begins at ``start``, if one does."""
    parts = children[start : start + 4]
    if len(parts) < 3:
        return None
    first, function, *rest = parts
    dropout = rest[0] if type(rest[0]) is nn.Dropout else None
    if dropout is not None:
        if len(rest) < 2 or guard.hooked(dropout):
            return None
        rest = rest[1:]
    second = rest[0]
    if not (_linear(first) and _linear(second) and original_class(first) is original_class(second)):
        return None
    if _sizes(second)[0] != _sizes(first)[1]:
        return None
    if not isinstance(function, nn.Module) or block.why_not_activation(function) is not None:
        return None
    name: Any = block.activation(function)
    return Run(3 if dropout is None else 4, first, name, dropout, second)


def _linear(module: nn.Module) -> bool:
    if type(module) is nn.Conv1d:
        pointwise = (
            module.kernel_size == module.stride == (1,) and module.groups == 1 and module.padding in ((0,), "same")
        )
        return pointwise and guard.is_plain(module)
    return original_class(module) is nn.Linear and guard.is_plain(module)


def _sizes(module: Any) -> tuple[int, int]:
    """Features in and out."""
    weight: Tensor = module.weight
    return weight.shape[1], weight.shape[0]


def _recognise(module: nn.Module) -> bool:
    """A Sequential, or a subclass that runs its children as that does, with such a block in it."""
    if not isinstance(module, nn.Sequential) or type(module).forward is not nn.Sequential.forward:
        return False
    if type(module).__iter__ is not nn.Sequential.__iter__ or type(module).__call__ is not nn.Module.__call__:
        return False
    children = list(module)
    return any(_run(children, start) is not None for start in range(len(children)))


def _covers(module: nn.Module) -> list[nn.Module]:
    children: list[Any] = list(module._modules.values())  # one that comes again, as an activation may, too
    inside: list[nn.Module] = []
    position = 0
    while position < len(children):
        run = _run(children, position)
        inside += children[position : position + run.length] if run is not None else []
        position += 1 if run is None else run.length
    return inside


def _fuse(original: Any) -> type:
    class Fused(original):
        def __new__(cls, *args: Any, **told: Any) -> Any:
            if cls is Fused and (args or told):  # a slice is a new module, which nobody patched
                return original(*args, **told)
            return super().__new__(cls)

        def forward(self, input: Any) -> Any:
            children, position, fused = list(self._modules.values()), 0, False
            while position < len(children):
                dense = isinstance(input, Tensor) and input.layout is torch.strided and not input.is_nested
                run = _run(children, position) if dense else None
                if run is None:
                    input = children[position](input)
                    position += 1
                    continue
                input = _feed_forward(input, run, options(self).backend)
                position, fused = position + run.length, True
            if not fused:
                fell_back(self, "its linear layers were replaced or have hooks, or its input is no dense tensor")
            return input

    return Fused


def _feed_forward(x: Tensor, run: Run, backend: str | None) -> Tensor:
    p = 0.0 if run.dropout is None else block.dropout_p(run.dropout)
    if not isinstance(run.first, nn.Conv1d):
        return block.feed_forward(x, run.first, run.second, run.activation, dropout_p=p, backend=backend)
    y = block.feed_forward(x.transpose(-1, -2), run.first, run.second, run.activation, dropout_p=p, backend=backend)
    return y.transpose(-1, -2).contiguous()


register_recipe(Recipe("torch.nn.Sequential", _recognise, _fuse, "feed-forward", _covers), first=False)
