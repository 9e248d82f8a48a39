"""Copies of a model that share nothing with it, what its functions hold included."""

from __future__ import annotations

import copy
import functools
import types
from contextlib import suppress
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
