"""Copies of a model that share nothing with it, what its functions hold included."""

from __future__ import annotations

import copy
import functools
import types
from contextlib import suppress
from types import NoneType
from typing import Any

from torch import nn


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
    """``copied``, whose callables hold copies of all that the model's hold, such as a list that one appends to."""
    new = copy.deepcopy(model, made)
    for module in new.modules():
        for name, value in module.__dict__.items():
            module.__dict__[name] = _apart(value, made)
    return new


def _apart(value: Any, made: dict[int, Any]) -> Any:
    """``value``, which deepcopy gave, with copies of what the callables in it hold, which deepcopy does not reach."""
    if type(value) in (list, tuple, dict):
        return value if made.get(id(value)) is value else _container_apart(value, made)
    if isinstance(value, functools.partial):
        function = _apart(value.func, made)
        return value if function is value.func else functools.partial(function, *value.args, **value.keywords)
    if isinstance(value, types.BuiltinMethodType):
        owner = value.__self__  # a module, a class or nothing where it is a function or no instance's
        held = isinstance(owner, (types.ModuleType, type, NoneType))
        return value if held else getattr(copy.deepcopy(owner, made), value.__name__)
    if isinstance(value, types.FunctionType) and (value.__closure__ or value.__defaults__ or value.__kwdefaults__):
        return _function_apart(value, made)
    return value


def _container_apart(value: Any, made: dict[int, Any]) -> Any:
    made[id(value)] = value  # it has been copied, and may hold itself
    if type(value) is dict:
        for key, each in value.items():
            value[key] = _apart(each, made)
        return value
    held = [_apart(each, made) for each in value]
    if type(value) is tuple:
        return tuple(held) if any(new is not old for new, old in zip(held, value, strict=True)) else value
    value[:] = held
    return value


def _function_apart(function: types.FunctionType, made: dict[int, Any]) -> types.FunctionType:
    if id(function) in made:
        return made[id(function)]
    cells = tuple(types.CellType() for _ in function.__closure__ or ())
    held = types.FunctionType(function.__code__, function.__globals__, function.__name__, None, cells)
    functools.update_wrapper(held, function)
    made[id(function)] = held  # before its cells, in one of which it may be itself
    held.__defaults__ = _copy_apart(function.__defaults__, made)
    held.__kwdefaults__ = _copy_apart(function.__kwdefaults__, made)
    for old, new in zip(function.__closure__ or (), cells, strict=True):
        with suppress(ValueError):  # an empty one
            new.cell_contents = _copy_apart(old.cell_contents, made)
    return held


def _copy_apart(value: Any, made: dict[int, Any]) -> Any:
    return _apart(copy.deepcopy(value, made), made)


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
