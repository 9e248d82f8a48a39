"""Which axes of a file's inputs may vary, and what they are called."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.export import Dim, ExportedProgram

from .call import FlatCall

Axes = Mapping[str, Mapping[int, str]]  # input -> axis -> name
Shape = tuple[int | str, ...]


def checked(axes: Axes | None, call: FlatCall) -> Axes | None:
    """``dynamic_axes`` as a user gave it.

    Raises:
        TypeError: it is no dict of dicts.
        ValueError: it names an input or an axis that is not there.
    """
    if axes is None:
        return None
    wanted = "export_onnx: dynamic_axes must be None or a dict such as {'input_ids': {0: 'batch', 1: 'sequence'}}"
    if not isinstance(axes, Mapping):
        raise TypeError(f"{wanted}, got {type(axes).__name__}")
    shapes = dict(zip(call.names, call.shapes, strict=True))
    for name, named in axes.items():
        if name not in shapes:
            raise ValueError(f"export_onnx: dynamic_axes must name inputs ({', '.join(shapes)}), got {name!r}")
        if not isinstance(named, Mapping) or not all(isinstance(word, str) and word for word in named.values()):
            raise TypeError(f"{wanted}, got {named!r} for {name}")
        for axis in named:
            if isinstance(axis, bool) or not isinstance(axis, int) or not 0 <= axis < len(shapes[name]):
                raise ValueError(
                    f"export_onnx: dynamic_axes must name axes of {name}, which has shape {shapes[name]}, got {axis!r}"
                )
    return axes


def widened(call: FlatCall, axes: Axes | None) -> FlatCall:
    """The call with 2 wherever an axis that may vary has size 1: a tracer takes 1 for a constant."""
    shapes = [list(shape) for shape in call.shapes]
    if axes is None:
        if shapes[0][:1] == [1]:  # a batch of one; a vector has none
            shapes = [[2, *shape[1:]] if shape[:1] == [1] and len(shape) > 1 else shape for shape in shapes]
    else:
        for name, shape in zip(call.names, shapes, strict=True):
            for axis in axes.get(name, {}):
                shape[axis] = max(shape[axis], 2)
    return call.resized(shapes)


def hints(call: FlatCall, axes: Axes | None) -> dict[str, Any]:
    """What torch.export is told: to find out whether an axis may vary, of all or of those that were named."""
    if axes is None:
        shapes = zip(call.names, call.shapes, strict=True)
        axes = {name: {axis: "" for axis, size in enumerate(shape) if size > 1} for name, shape in shapes}
    return {"tensors": tuple(dict.fromkeys(axes.get(name, {}), Dim.AUTO) for name in call.names)}


def symbols(program: ExportedProgram) -> list[tuple[int | str, ...]]:
    """The shapes of the inputs as the program has them: a number where it is fixed, else a symbol."""
    inputs = set(program.graph_signature.user_inputs)
    values = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder" and node.name in inputs]
    return [tuple(_size(size) for size in value.shape) for value in values]


def _size(size: Any) -> int | str:
    words = str(size)
    return int(words) if words.isdigit() else words  # an axis that turned out fixed is a symbol with one value


def names(call: FlatCall, shapes: Sequence[Shape], axes: Axes | None) -> dict[str, str]:
    """What the symbols in ``shapes`` are called.

    Raises:
        ValueError: a symbol was given two names, or an axis that is fixed has one.
    """
    found: dict[str, str] = {}
    tokens = _holds_tokens(call)
    for name, shape in zip(call.names, shapes, strict=True):
        for axis, symbol in enumerate(shape):
            if isinstance(symbol, int) and axes is not None and axis in axes.get(name, {}):
                raise ValueError(
                    f"export_onnx: dynamic_axes names axis {axis} of {name}, which this model's code fixes at {symbol}"
                )
            if isinstance(symbol, int) or not symbol.isidentifier():  # of a sum or a product the parts are named
                continue
            called = _name(name, axis, tokens, found) if axes is None else axes.get(name, {}).get(axis)
            if called is not None and axes is not None and found.setdefault(symbol, called) != called:
                raise ValueError(
                    f"export_onnx: axis {axis} of {name} always has the size of {found[symbol]!r} in this model, so "
                    f"dynamic_axes must give it that name, got {called!r}"
                )
            found.setdefault(symbol, called or symbol)
    return found


def _holds_tokens(call: FlatCall) -> bool:
    """Whether the first input is (B, T) token numbers, whose axes have names that everybody knows."""
    first = call.tensors[0]
    return first.dim() == 2 and not first.is_floating_point() and not first.is_complex()


def _name(name: str, axis: int, tokens: bool, found: Mapping[str, str]) -> str:
    if not tokens or axis > 1:
        return f"{name}_{axis}"
    word = ("batch", "sequence")[axis]
    return word if word not in found.values() else f"{name.removesuffix('_ids')}_{word}"


def others(
    call: FlatCall, shapes: Sequence[Shape], limits: Mapping[str, tuple[float, float]]
) -> list[list[tuple[int, ...]]]:
    """Other sizes to try a file at: larger ones, smaller ones, and all ones.

    Symbols whose axes have one number and one size in ``call`` stay alike: a mask's batch follows that of the tokens,
    though the program may not know it.

    Args:
        call: the examples.
        shapes: of the inputs, as ``symbols`` gives them.
        limits: symbol -> least and largest size.

    Returns:
        Up to three lists of shapes; none where nothing may vary, or where a size is made of others that no axis has.
    """
    alike: dict[tuple[int, int], str] = {}
    vary: dict[str, str] = {}
    sizes: dict[str, int] = {}
    for shape, actual in zip(shapes, call.shapes, strict=True):
        for axis, symbol in enumerate(shape):
            if isinstance(symbol, str) and symbol.isidentifier():
                vary.setdefault(symbol, alike.setdefault((axis, actual[axis]), symbol))
                sizes.setdefault(symbol, actual[axis])
    parts = {part for shape in shapes for size in shape for part in re.findall(r"[A-Za-z_]\w*", str(size))}
    if not vary or not parts <= vary.keys():
        return []
    order = {symbol: number for number, symbol in enumerate(dict.fromkeys(vary.values()))}
    tried = []
    for change in (lambda size, number: size + 1 + number, lambda size, number: max(size - 1, 1), lambda *_: 1):
        sized = {symbol: change(sizes[symbol], order[first]) for symbol, first in vary.items()}
        if all(limits.get(symbol, (0, torch.inf))[1] >= size for symbol, size in sized.items()):
            tried.append([tuple(_number(size, sized) for size in shape) for shape in shapes])
    return [each for number, each in enumerate(tried) if each not in tried[:number]]


def _number(size: int | str, sized: Mapping[str, int]) -> int:
    """A size, or what a symbol or a formula of symbols is at those sizes."""
    import sympy  # torch brings it, and takes half a second to load it where it is needed

    return int(sympy.sympify(str(size), locals={symbol: sympy.Integer(value) for symbol, value in sized.items()}))
