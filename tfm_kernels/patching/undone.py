"""What a trial of a copy writes into things that the copy shares with the module is put back."""

from __future__ import annotations

import functools
import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from .copying import OF_AN_OBJECT, held, in_cell

_MANY = 20_000  # things that are looked at
_CONTAINERS: tuple[Any, ...] = (OrderedDict, dict, list, deque, set, bytearray)
_LEFT = (types.ModuleType, type, nn.Module, Tensor)
_PACKAGES = frozenset({"torch", "builtins"})


@contextmanager
def undone(module: nn.Module) -> Iterator[None]:
    """After the block, what its callables hold, and the classes of its modules, are as they were before.

    That is what deepcopy leaves to a copy and the original alike. Put back are lists, dicts, sets, variables of
    closures, attributes of objects and of functions, and the state of random generators; not tensors and arrays, other
    modules, an ``itertools.count``, what functions find in their file, and objects that refuse to be looked at.
    """
    back: list[Callable[[], object]] = []
    for value in _shared(module):
        with suppress(Exception):  # an object may want anything
            back += _restores(value)
    try:
        yield
    finally:
        for restore in back:
            with suppress(Exception):
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
        with suppress(Exception):
            shared = shared or isinstance(value, (types.FunctionType, *OF_AN_OBJECT))
            left += [(each, shared) for each in [*held(value), *_attributes(value)] if not isinstance(each, _LEFT)]
    return [value for (_, shared), value in found.items() if shared or type(value) is types.FunctionType]


def _attributes(value: Any) -> list[Any]:
    """What an object, a function or a class has as attributes, but for what the language keeps there."""
    if type(value).__module__.partition(".")[0] == "torch":
        return []
    own = [each for name, each in getattr(value, "__dict__", {}).items() if not name.startswith("__")]
    if isinstance(value, type):
        methods = [function for each in own for function in _functions(each)]
        return [*methods, *(each for each in own if not hasattr(type(each), "__get__"))]
    return [*own, *(content for slot in _slots(value) for content in _in_slot(slot, value))]


def _functions(attribute: Any) -> list[types.FunctionType]:
    """The functions of a method, static or of the class or not, and of a property, a cached one or a partial method."""
    found = [attribute, *(getattr(attribute, name, None) for name in ("__func__", "fget", "fset", "fdel", "func"))]
    return [each for each in found if isinstance(each, types.FunctionType)]


def _slots(value: Any) -> list[Any]:
    """The descriptors of an object's slots."""
    return [
        each
        for base in type(value).__mro__
        if "__slots__" in base.__dict__
        for each in base.__dict__.values()
        if isinstance(each, types.MemberDescriptorType)
    ]


def _in_slot(slot: Any, value: Any) -> list[Any]:
    try:
        return [slot.__get__(value)]
    except AttributeError:  # not set
        return []


def _restores(value: Any) -> list[Callable[[], object]]:
    """What puts a thing back as it is now."""
    if isinstance(value, types.CellType):
        return [functools.partial(_refill_cell, value, in_cell(value))]
    if isinstance(value, type):
        return [functools.partial(_reset_class, value, dict(vars(value)))]
    found: list[Callable[[], object]] = []
    kind = next((kind for kind in _CONTAINERS if isinstance(value, kind)), None)
    if kind is not None:
        found.append(functools.partial(_refill, kind, value, _items(kind, value)))
    with suppress(Exception):  # such as a SystemRandom
        put, state = _state(value)
        if put is not None:
            return [*found, functools.partial(put, state)]
    found += [functools.partial(_refill_slot, slot, value, _in_slot(slot, value)) for slot in _slots(value)]
    own = getattr(value, "__dict__", None)
    if type(own) is dict:
        found.append(functools.partial(_refill, dict, own, _items(dict, own)))
    return found


def _refill_cell(cell: types.CellType, content: list[Any]) -> None:
    if content:
        cell.cell_contents = content[0]
    elif in_cell(cell):
        del cell.cell_contents


def _refill_slot(slot: Any, value: Any, content: list[Any]) -> None:
    now = _in_slot(slot, value)
    if content and not (now and now[0] is content[0]):
        slot.__set__(value, content[0])
    elif now and not content:
        slot.__delete__(value)


def _items(kind: Any, value: Any) -> list[Any]:
    """What lies in a container, by its own type's methods, which a subclass may change."""
    return list(kind.items(value)) if issubclass(kind, dict) else list(kind.__iter__(value))


def _refill(kind: Any, value: Any, before: list[Any]) -> None:
    now = _items(kind, value)
    if issubclass(kind, dict):
        same = all(a[0] is b[0] and a[1] is b[1] for a, b in zip(now, before, strict=False))
    else:
        same = all(a is b for a, b in zip(now, before, strict=False))
    if same and len(now) == len(before):
        return
    kind.clear(value)
    if issubclass(kind, dict):
        for name, each in before:
            kind.__setitem__(value, name, each)
    elif kind is set:
        kind.update(value, before)
    else:
        kind.extend(value, before)


def _reset_class(cls: type, before: dict[str, Any]) -> None:
    now = dict(vars(cls))
    for name in now.keys() - before.keys():
        type.__delattr__(cls, name)
    for name, each in before.items():
        if name not in now or now[name] is not each:
            type.__setattr__(cls, name, each)


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
