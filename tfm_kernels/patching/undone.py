"""What a trial of a copy writes into things that the copy shares with the module is put back."""

from __future__ import annotations

import functools
import random
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from .copying import OF_AN_OBJECT, held, in_cell

_MANY = 20_000  # things that are looked at
_DICTS = (dict, OrderedDict, defaultdict, Counter)
_LEFT = (types.ModuleType, type, nn.Module, Tensor)
_PACKAGES = frozenset({"torch", "builtins"})


@contextmanager
def undone(module: nn.Module) -> Iterator[None]:
    """After the block, what its callables hold, and the classes of its modules, are as they were before.

    That is what deepcopy leaves to a copy and the original alike. Put back are lists, dicts, sets, variables of
    closures, attributes of objects and of functions, and the state of random generators; not tensors and arrays, other
    modules, an ``itertools.count``, and what functions find in their file.
    """
    back = [restore for value in _shared(module) if (restore := _restore(value)) is not None]
    try:
        yield
    finally:
        for restore in back:
            with suppress(Exception):  # an object may refuse
                restore()


def _shared(module: nn.Module) -> list[Any]:
    """Everything that a copy shares with the module."""
    classes = {base for inner in module.modules() for base in type(inner).__mro__}
    classes = {each for each in classes if each.__module__.partition(".")[0] not in _PACKAGES}
    left = deque((each, True) for each in classes)
    left += [(value, False) for inner in module.modules() for value in inner.__dict__.values()]
    found: dict[tuple[int, bool], Any] = {}
    while left and len(found) < _MANY:
        value, shared = left.popleft()
        if (id(value), shared) in found:
            continue
        found[id(value), shared] = value
        shared = shared or isinstance(value, (types.FunctionType, *OF_AN_OBJECT))
        inside = [*held(value), *_attributes(value).values()]
        left += [(each, shared) for each in inside if not isinstance(each, _LEFT)]
    return [value for (_, shared), value in found.items() if shared or isinstance(value, types.FunctionType)]


def _attributes(value: Any) -> dict[str, Any]:
    """Those of an object, in whatever form, or of a class, but for what the language keeps there."""
    if isinstance(value, (types.BuiltinMethodType, types.MethodType, *_DICTS, list, tuple)):
        return {}
    if type(value).__module__.partition(".")[0] == "torch":
        return {}
    found = {name: each for name, each in getattr(value, "__dict__", {}).items() if not name.startswith("__")}
    if isinstance(value, type):
        return {name: each for name, each in found.items() if not hasattr(type(each), "__get__")}
    slots = (getattr(base, "__slots__", ()) for base in type(value).__mro__)
    for name in (name for names in slots for name in ((names,) if isinstance(names, str) else names)):
        with suppress(Exception):  # one that is not set, or private
            found[name] = getattr(value, name)
    return found


def _restore(value: Any) -> Callable[[], object] | None:
    """What puts a thing back as it is now; None where nothing can."""
    if isinstance(value, types.CellType):
        return functools.partial(_refill_cell, value, in_cell(value))
    if type(value) in _DICTS:
        return functools.partial(_refill_dict, value, list(value.items()))
    if type(value) in (list, deque, set, bytearray):
        return functools.partial(_refill, value, list(value))
    put, state = _state(value)
    if put is not None:
        return functools.partial(put, state)
    return functools.partial(_reset, value, _attributes(value)) if hasattr(value, "__dict__") else None


def _refill_cell(cell: types.CellType, content: list[Any]) -> None:
    if content:
        cell.cell_contents = content[0]
    elif in_cell(cell):
        del cell.cell_contents


def _refill_dict(value: dict, items: list[tuple[Any, Any]]) -> None:
    if not _alike([part for pair in value.items() for part in pair], [part for pair in items for part in pair]):
        value.clear()
        value.update(items)


def _refill(value: Any, items: list[Any]) -> None:
    if not _alike(list(value), items):
        value.clear()
        value.update(items) if isinstance(value, set) else value.extend(items)


def _alike(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))


def _state(value: Any) -> tuple[Callable[[Any], object] | None, Any]:
    """Of a generator of random numbers: what sets its state, and its state."""
    if isinstance(value, random.Random):
        return value.setstate, value.getstate()
    if isinstance(value, torch.Generator):
        return value.set_state, value.get_state()
    if "numpy" in sys.modules:
        drawn = sys.modules["numpy"].random
        if isinstance(value, drawn.RandomState):
            return value.set_state, value.get_state(legacy=False)
        if isinstance(value, drawn.Generator):
            return functools.partial(setattr, value.bit_generator, "state"), value.bit_generator.state
    return None, None


def _reset(value: Any, before: dict[str, Any]) -> None:
    kind: Any = type if isinstance(value, type) else object  # past a __setattr__ that refuses, as of a frozen dataclass
    now = _attributes(value)
    for name in now.keys() - before.keys():
        kind.__delattr__(value, name)
    for name, each in before.items():
        if name not in now or now[name] is not each:
            kind.__setattr__(value, name, each)
