"""Known code: what a module of somebody else's library must look like for a recipe that was written against it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..nn._bypass import ordinary
from . import block, guard
from .source import says


@dataclass(frozen=True)
class Known:
    """Code and children of one kind of module; paths are dotted and begin at the module.

    Attributes:
        code: "attention.forward" -> the fingerprint (source.py) that the method must have, or several of which it must
            have one, for every method replaced or passed by.
        reads: path -> the exact class, or those of which it must have one, for the children whose weights the fused
            code reads without calling them.
        passes: paths of children that the fused code passes by, reading their weights; their methods are in ``code``.
        activation: path of the activation, or None.
        calls: paths of children that must exist because the fused code calls them.
        shares: whether other kinds have children of the same names, so that other code is no sign of a changed one.
    """

    code: Mapping[str, str | tuple[str, ...]]
    reads: Mapping[str, type | str | tuple[type | str, ...]]
    passes: tuple[str, ...] = ()
    activation: str | None = None
    calls: tuple[str, ...] = field(default=())
    shares: bool = False
    # of each of ``passes``, its keys in ``code``
    _passed: dict[str, tuple[str, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        own = {path: tuple(place for place in self.code if place.rpartition(".")[0] == path) for path in self.passes}
        object.__setattr__(self, "_passed", own)

    def recognise(self, module: nn.Module) -> bool | str:
        """True for a module of this kind, False for another, part of a sentence for one that only looks like it."""
        if not all(_at(module, path) is not None for path in (*self.reads, *self.passes, *self.calls)):
            return False
        if not all(self._says(module, place) for place in self.code):
            told = (self.reads or self.calls) and not self.shares  # else nothing else says what it is
            return guard.UNKNOWN_FORWARD if told else False
        return self.why_not(module) or True

    def why_not(self, module: nn.Module) -> str | None:
        """None where the fused code may run now, else why not."""
        if guard.hooked_everywhere():
            return guard.GLOBAL_HOOKS
        if not ordinary(*module._parameters.values()):
            return "its weights are no ordinary tensors"
        for path, own in self._passed.items():  # before what is read below them, which may not be there any more
            reason = guard.why_not_left_alone(module, path)
            if reason is None and not all(self._says(module, place) for place in own):  # another may be in its place
                reason = f"{path} is {type(guard.child(module, path)).__name__}, whose forward is not the known one"
            if reason is not None:
                return reason
        for path, cls in self.reads.items():
            reason = guard.why_not_plain(module, path, *(cls if isinstance(cls, tuple) else (cls,)))
            if reason is not None:
                return reason
        return None if self.activation is None else block.why_not_activation(self.function(module))

    def _says(self, module: nn.Module, place: str) -> bool:
        path, _, method = place.rpartition(".")
        wanted = self.code[place]
        return says(_at(module, path), method, *((wanted,) if isinstance(wanted, str) else wanted))

    def function(self, module: nn.Module) -> Any:
        """The activation, a module or a plain function."""
        owner, _, name = (self.activation or "").rpartition(".")
        return getattr(guard.child(module, owner) if owner else module, name)

    def covers(self, module: nn.Module) -> list[nn.Module]:
        """The descendants whose work the fused code does."""
        inside = [guard.child(module, path) for path in (*self.reads, *self.passes)]
        function = None if self.activation is None else self.function(module)
        return [*inside, function] if isinstance(function, nn.Module) else inside


def _at(module: Any, path: str) -> Any:
    for name in path.split(".") if path else ():
        module = guard.direct(module, name) if isinstance(module, nn.Module) else None
    return module
