"""What every declaration of a class needs: its names looked up, and the arguments of a call found by theirs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from .._autocast import autocast_dtype
from . import block, guard
from .swap import original_class

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_ANY_NUMBER = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_REQUIRED = inspect.Parameter.empty


def module_class(op: str, cls: object) -> None:
    """Refuses what is no class of modules."""
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise TypeError(f"{op}: cls must be a subclass of torch.nn.Module, got {cls!r}")


def names(op: str, children: dict[str, Any], attributes: dict[str, Any] | None = None) -> Callable[[nn.Module], None]:
    """What asks of a module whether it has what was declared, each by the name of the declaration's argument."""

    def check(module: nn.Module) -> None:
        for argument, path in children.items():
            if path is not None:
                guard.require_child(op, argument, module, path)
        for argument, name in (attributes or {}).items():
            if isinstance(name, str):
                guard.require_attribute(op, argument, module, name)

    return check


def parameters(cls: type[nn.Module]) -> tuple[str, ...]:
    """The names of the forward's arguments, without those of any number."""
    return tuple(each.name for each in _taken(cls) if each.kind not in _ANY_NUMBER)


def calling(cls: type[nn.Module], *names: str) -> Callable[..., Any]:
    """The forward of ``cls`` as a function of a module and of the arguments of these names, in that order."""
    kinds = {each.name: each.kind for each in _taken(cls)}

    def call(module: nn.Module, *given: Any) -> Any:
        told = dict(zip(names, given, strict=True))
        by_place = [told.pop(name) for name in names if kinds[name] is inspect.Parameter.POSITIONAL_ONLY]
        return cls.forward(module, *by_place, **told)

    return call if names else cls.forward


def is_switch(cls: type[nn.Module], name: str) -> bool:
    """Whether a forward's argument has a default that is neither a tensor nor None, as ``use_cache=False``."""
    default = inspect.signature(cls.forward).parameters[name].default
    return default is not _REQUIRED and default is not None and not isinstance(default, Tensor)


def _taken(cls: type[nn.Module]) -> list[inspect.Parameter]:
    return list(inspect.signature(cls.forward).parameters.values())[1:]


def bind(names: tuple[str, ...], args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, tuple, dict[str, Any]] | None:
    """A call's first arguments, ``names``, however given, and the others as they were; None where one is missing."""
    count, named = len(names), names[len(args) :]
    if not all(name in kwargs for name in named):
        return None
    others = {name: given for name, given in kwargs.items() if name not in named}
    return (*args[:count], *(kwargs[name] for name in named)), args[count:], others


class Arguments:
    """The arguments of a forward of which a declaration knows ``known``, by name."""

    def __init__(self, cls: type[nn.Module], known: tuple[str, ...]) -> None:
        taken = [each for each in _taken(cls) if each.kind not in _ANY_NUMBER]
        self.positional = tuple(each.name for each in taken if each.kind in _POSITIONAL)
        self.known = known
        self.others = {each.name: each.default for each in taken if each.name not in known}

    def required(self) -> str | None:
        """The first argument that every call must give and nobody knows, if there is one."""
        return next((name for name, default in self.others.items() if default is _REQUIRED), None)

    def of(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """What a call gives, by name; None where it gives others than the known ones anything but their default."""
        given = dict(zip(self.positional, args, strict=False))
        if len(args) > len(self.positional) or any(name in given for name in kwargs):
            return None
        given.update(kwargs)
        for name, value in given.items():
            if name not in self.known and (name not in self.others or not _same(value, self.others[name])):
                return None
        return given


def _same(value: Any, default: Any) -> bool:
    return value is default or (isinstance(value, (bool, int, float, str)) and value == default)


def of_one_dtype(inputs: Sequence[Tensor], layers: Iterable[Any]) -> bool:
    """Whether linear layers have the dtype of all inputs, or autocast or 8 bits give them one: else a forward casts."""
    x = inputs[0]
    if autocast_dtype(x.device) is not None:
        return True
    if any(other.dtype != x.dtype for other in inputs[1:]):
        return False
    return all(w.dtype == x.dtype for w in map(_weight, layers) if isinstance(w, Tensor) and w.is_floating_point())


def _weight(layer: Any) -> Any:
    """A layer's weight, or of a parametrized one what it is computed from."""
    parametrized: Any = guard.direct(layer, "parametrizations") if isinstance(layer, nn.Module) else None
    if parametrized is not None and "weight" in parametrized:
        return next(parametrized["weight"].parameters(), None)
    return getattr(layer, "weight", None)


def is_dropout(held: Any) -> bool:
    """Whether it is what ``probability`` reads: an nn.Dropout, an nn.Identity or None in its place, or a number."""
    return held is None or isinstance(held, (int, float)) or original_class(held) in (nn.Dropout, nn.Identity)


def has_dropout(owner: nn.Module, name: str | None) -> bool:
    """Whether the attribute of this name is one that ``probability`` reads."""
    return name is None or is_dropout(guard.attribute(owner, name))


def why_not_dropped(owner: nn.Module, *names: str | None) -> str | None:
    """None where the attributes of these names are what ``probability`` reads, else part of a sentence."""
    for name in names:
        if not has_dropout(owner, name):
            return f"its {name} is {type(guard.attribute(owner, name)).__name__}, not Dropout"  # type: ignore[arg-type]
    return None


def probability(owner: nn.Module, name: str | None) -> float:
    """The probability with which the dropout of this name now drops."""
    held = None if name is None else guard.attribute(owner, name)
    if isinstance(held, nn.Module):
        return 0.0 if isinstance(held, nn.Identity) else block.dropout_p(held)
    return held if held is not None and owner.training else 0.0


def dropped(owner: nn.Module, name: str | None, x: Tensor) -> Tensor:
    """``x`` through the dropout of this name: called where it is a module."""
    held = None if name is None else guard.attribute(owner, name)
    if isinstance(held, nn.Module):
        return held(x)
    p = probability(owner, name)
    return F.dropout(x, p) if p else x


def number(owner: nn.Module, held: Any) -> Any:
    """A number, or a tensor, that is declared as such or by the name of the attribute that holds it."""
    return guard.attribute(owner, held) if isinstance(held, str) else held
