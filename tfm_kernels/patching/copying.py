"""Copies of a model whose functions hold parts of the copy."""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable
from typing import Any

from torch import nn

_CONTAINERS = (list, tuple, dict, set, frozenset, deque, OrderedDict, defaultdict)
_MANY = 20_000  # things in a container from which on none is a part of a model
OF_AN_OBJECT = (types.BuiltinMethodType, types.MethodWrapperType)  # [].append, {}.__setitem__
_ATOMS = frozenset({str, int, float, bool, bytes, type(None)})


def copied(model: nn.Module, made: dict[int, Any] | None = None) -> nn.Module:
    """``copy.deepcopy``, in which callables and weak references of modules hold parts of the copy, not of the model.

    deepcopy gives the same function again: minGPT's ``self.mlpf = lambda x: m.c_proj(...)`` of a copy would go on
    running the layers of the original. What holds no part stays the object that it is. Not followed: objects that
    functions hold, and what ``functools.lru_cache`` wraps. ``made`` holds what stands for objects, by their id, that
    are not to be copied.
    """
    made = {} if made is None else made
    new = copy.deepcopy(model, made)
    originals = (*model.modules(), *model.parameters(), *model.buffers())
    parts = {id(each): made[id(each)] for each in originals if made.get(id(each), each) is not each}
    rebound = _Rebound(parts, (value for module in new.modules() for value in module.__dict__.values()))
    for module in new.modules():
        for name, value in module.__dict__.items():
            module.__dict__[name] = rebound.of(value)
    return new


def copied_apart(model: nn.Module) -> nn.Module:
    """``copied``, of which changing the copy's dtype or classes cannot change the model.

    Raises:
        ValueError: they would share a parameter, or what a module holds, which a ``__deepcopy__`` has handed on.
    """
    copy = copied(model)
    theirs = [*copy.parameters(), *(table for module in copy.modules() for table in _tables(module))]
    parts = {id(each) for each in theirs}  # which stay alive, and their ids their own
    held = [(name or "all of it", table) for name, module in model.named_modules() for table in _tables(module)]
    shared = next((name for name, each in (*held, *model.named_parameters()) if id(each) in parts), None)
    if shared is not None:
        raise ValueError(
            f"{type(model).__name__} cannot be copied: {shared} would be shared by the copy, as a __deepcopy__ "
            "in it hands on what it should copy"
        )
    return copy


def _tables(module: nn.Module) -> list[dict]:
    """Where a module keeps its parameters, buffers and children, of each what there is."""
    return [table for name in ("_parameters", "_buffers", "_modules") if (table := module.__dict__.get(name))]


class _Rebound:
    """What stands, in a copy, for callables that hold parts of the model, and for containers of such.

    Args:
        parts: id of a part of the model -> that of the copy.
        values: everything that will be asked for.
    """

    def __init__(self, parts: dict[int, Any], values: Iterable[Any]) -> None:
        self.parts = parts
        self.alive: dict[int, Any] = {}  # whatever has been seen, by its id
        holders: dict[int, list[int]] = defaultdict(list)
        left = [value for value in values if type(value) not in _ATOMS]
        while left:
            value = left.pop()
            if id(value) in self.alive:
                continue
            self.alive[id(value)] = value
            for each in held(value):
                holders[id(each)].append(id(value))
                left.append(each)
        self.holding: set[int] = set()  # ids of what holds a part, however deep
        reached = [*parts]
        while reached:
            further = [holder for holder in holders[reached.pop()] if holder not in self.holding]
            self.holding.update(further)
            reached += further
        self.made: dict[int, Any] = {}
        self.empty: list[tuple[types.CellType, types.CellType]] = []  # of functions that may hold themselves

    def of(self, value: Any) -> Any:
        """The value itself where it holds no part."""
        new = self._of(value)
        while self.empty:
            cell, other = self.empty.pop()
            other.cell_contents = self._of(cell.cell_contents)
        return new

    def _of(self, value: Any) -> Any:
        key = id(value)
        if key in self.parts or key not in self.holding or key in self.made:
            return self.parts.get(key, self.made.get(key, value))
        if isinstance(value, types.CellType):
            self.made[key] = types.CellType()
            self.empty.append((value, self.made[key]))
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.MethodType):
            self.made[key] = types.MethodType(self._of(value.__func__), self._of(value.__self__))
        elif type(value) is weakref.ref:
            self.made[key] = weakref.ref(self._of(value()))
        elif isinstance(value, OF_AN_OBJECT):
            self.made[key] = getattr(self._of(value.__self__), value.__name__)
        elif isinstance(value, functools.partial):
            keywords = {name: self._of(each) for name, each in value.keywords.items()}
            new = functools.partial.__new__(type(value), self._of(value.func), *map(self._of, value.args), **keywords)
            new.__dict__.update(value.__dict__)
            self.made[key] = new
        else:
            self._container(value)
        return self.made[key]

    def _function(self, function: types.FunctionType) -> None:
        cells = tuple(self._of(cell) for cell in function.__closure__ or ())
        new = types.FunctionType(function.__code__, function.__globals__, function.__name__, None, cells)
        self.made[id(function)] = new  # which its attributes may hold
        functools.update_wrapper(new, function)
        del new.__dict__["__wrapped__"]
        new.__dict__.update({name: self._of(each) for name, each in function.__dict__.items()})
        new.__defaults__, new.__kwdefaults__ = self._of(function.__defaults__), self._of(function.__kwdefaults__)

    def _container(self, value: Any) -> None:
        if isinstance(value, (tuple, frozenset)):
            make = getattr(type(value), "_make", type(value))  # of a namedtuple
            self.made[id(value)] = make(map(self._of, value))
            return
        self.made[id(value)] = new = copy.copy(value)  # which may hold itself
        if isinstance(value, dict):
            items = [(self._of(name), self._of(each)) for name, each in value.items()]
            new.clear()
            new.update(items)
            return
        each_of = list(map(self._of, value))
        new.clear()
        new.update(each_of) if isinstance(value, set) else new.extend(each_of)


def held(value: Any) -> list[Any]:
    """What deepcopy does not see in a callable or weak reference, and what a container holds; no numbers and text."""
    found: list[Any] = []
    if type(value) in _CONTAINERS or (isinstance(value, tuple) and hasattr(value, "_make")):
        whole = value if len(value) <= _MANY else ()
        found = [*whole, *whole.values()] if isinstance(whole, dict) else [*whole]
    elif isinstance(value, types.CellType):
        found = in_cell(value)
    elif isinstance(value, types.FunctionType):
        found = [*(value.__closure__ or ()), value.__defaults__, value.__kwdefaults__, *value.__dict__.values()]
    elif isinstance(value, functools.partial):
        found = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, types.MethodType):
        found = [value.__func__, value.__self__]
    elif type(value) is weakref.ref:
        found = [value()]
    elif isinstance(value, OF_AN_OBJECT):
        found = [value.__self__]
    return [each for each in found if type(each) not in _ATOMS]


def in_closure(function: types.FunctionType) -> list[Any]:
    """What a function has in the cells of its closure, but for empty ones."""
    return [each for cell in function.__closure__ or () for each in in_cell(cell)]


def in_cell(cell: types.CellType) -> list[Any]:
    """What it holds, or nothing."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []
