"""Copies of a model that share nothing with it, what its functions hold included."""

from __future__ import annotations

import copy
import dis
import functools
import types
from collections import deque
from contextlib import suppress
from typing import Any

from torch import Tensor, nn

_CONTAINERS = (list, dict, set, deque, bytearray)
_DEEP = 8  # containers in one another that are looked into


def copied(model: nn.Module, made: dict[int, Any] | None = None) -> nn.Module:
    """``copy.deepcopy``, in which functions that modules keep as attributes hold parts of the copy, not of the model.

    deepcopy gives the same function again: minGPT's ``self.mlpf = lambda x: m.c_proj(...)`` of a copy would go on
    running the layers of the original. ``made`` holds what stands for objects, by their id, that are not to be copied.
    """
    made = {} if made is None else made
    new = copy.deepcopy(model, made)
    originals = (*model.modules(), *model.parameters(), *model.buffers())
    parts = {id(each): made[id(each)] for each in originals if id(each) in made}
    for module in new.modules():
        for name, value in module.__dict__.items():
            if isinstance(value, types.FunctionType) and value.__closure__:
                module.__dict__[name] = _rebound(value, parts)
    return new


def copied_apart(model: nn.Module, made: dict[int, Any]) -> nn.Module:
    """``copied``, whose callables hold copies of what the model's may write into, such as a list that one appends to.

    Callables that hold no such thing stay the same, and so do tensors and modules outside of the model.
    """
    new = copy.deepcopy(model, made)
    apart = _Apart(made)
    for module in new.modules():
        for name, value in module.__dict__.items():
            module.__dict__[name] = apart.of(value)
    return new


class _Apart:
    """What stands, in a copy, for callables and the containers that hold them, which deepcopy leaves as they are."""

    def __init__(self, made: dict[int, Any]) -> None:
        self.made = made  # deepcopy's: id of an original -> its copy
        self.found: dict[int, tuple[Any, Any]] = {}  # id -> what was asked for, kept alive, and what stands for it

    def of(self, value: Any) -> Any:
        """For something that deepcopy gave."""
        if id(value) in self.found:
            return self.found[id(value)][1]
        self.found[id(value)] = value, value  # it may hold itself
        new = self._of(value)
        self.found[id(value)] = value, new
        return new

    def _of(self, value: Any) -> Any:
        if isinstance(value, dict):
            for key, new in [(key, new) for key, each in value.items() if (new := self.of(each)) is not each]:
                value[key] = new
        elif isinstance(value, list):
            for place, each in enumerate(value):
                if (new := self.of(each)) is not each:
                    value[place] = new
        elif type(value) is tuple:
            return _unless_alike(tuple(map(self.of, value)), value)
        elif isinstance(value, functools.partial):
            parts = value.func, value.args, value.keywords
            function, args, keywords = new = _unless_alike(tuple(map(self._held, parts)), parts)
            return value if new is parts else functools.partial(function, *args, **keywords)
        elif isinstance(value, types.BuiltinMethodType):
            owner = self._held(value.__self__)
            return value if owner is value.__self__ else getattr(owner, value.__name__)
        elif isinstance(value, types.FunctionType):
            return self._function(value)
        return value

    def _function(self, function: types.FunctionType) -> types.FunctionType:
        cells = function.__closure__ or ()
        if not (cells or function.__defaults__ or function.__kwdefaults__):
            return function
        copies = tuple(types.CellType() for _ in cells)
        new = types.FunctionType(function.__code__, function.__globals__, function.__name__, None, copies)
        functools.update_wrapper(new, function)
        self.found[id(function)] = function, new  # one of its cells may hold itself
        changed = any(each.opname == "STORE_DEREF" for each in dis.get_instructions(function)) and bool(cells)
        for cell, held in zip(cells, copies, strict=True):
            with suppress(ValueError):  # an empty one
                value = cell.cell_contents
                held.cell_contents = self._held(value)
                changed |= held.cell_contents is not value and held.cell_contents is not new
        new.__defaults__, new.__kwdefaults__ = self._held(function.__defaults__), self._held(function.__kwdefaults__)
        changed |= new.__defaults__ is not function.__defaults__ or new.__kwdefaults__ is not function.__kwdefaults__
        return new if changed else function

    def _held(self, value: Any) -> Any:
        """For what a callable holds: parts of the model, other callables, what may be written into; else itself."""
        if id(value) in self.made:
            return self.made[id(value)]
        if isinstance(value, (types.FunctionType, types.BuiltinMethodType, functools.partial)):
            return self.of(value)
        if isinstance(value, types.MethodType):
            owner = self._held(value.__self__)
            return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
        if type(value) is tuple:
            return _unless_alike(tuple(map(self._held, value)), value)
        if not _may_be_written(value):
            return value
        self._share(value, _DEEP)
        try:
            return self.of(copy.deepcopy(value, self.made))
        except Exception:  # it holds a lock, a file
            return value

    def _share(self, value: Any, depth: int) -> None:
        """Leaves modules, tensors and arrays in it, which may be large, to the original and the copy alike."""
        if isinstance(value, nn.Module) or hasattr(value, "nbytes"):
            self.made.setdefault(id(value), value)
        elif depth > 0:
            held = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple, set)) else ()
            for each in (*held, *getattr(value, "__dict__", {}).values()):
                self._share(each, depth - 1)


def _unless_alike(new: tuple, old: tuple) -> tuple:
    """``old`` where ``new`` holds the same objects."""
    return new if any(a is not b for a, b in zip(new, old, strict=True)) else old


def _may_be_written(value: Any) -> bool:
    """Whether it is a container, a generator of numbers, or an object whose attributes are no tensors and modules."""
    kind, own = type(value), getattr(value, "__dict__", None) or {}
    if isinstance(value, (types.ModuleType, type, Tensor, nn.Module)):
        return False
    if isinstance(value, _CONTAINERS) or kind.__module__.partition(".")[0] in ("itertools", "random", "numpy"):
        return True
    large = any(isinstance(each, (Tensor, nn.Module)) for each in own.values())
    return not large and bool(own or getattr(kind, "__slots__", None))


def _rebound(function: types.FunctionType, parts: dict[int, Any]) -> types.FunctionType:
    """The function with the ``parts`` (by the id of the original) in the cells of its closure."""
    cells = tuple(_cell(cell, parts) for cell in function.__closure__ or ())
    if cells == function.__closure__:
        return function
    held = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    held.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(held, function)
    return held


def in_closure(function: types.FunctionType) -> list[Any]:
    """What a function has in the cells of its closure, but for empty ones."""
    found = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):
            found.append(cell.cell_contents)
    return found


def _cell(cell: types.CellType, parts: dict[int, Any]) -> types.CellType:
    try:
        part = parts.get(id(cell.cell_contents))
    except ValueError:  # an empty one
        return cell
    return cell if part is None else types.CellType(part)
