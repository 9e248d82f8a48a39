"""A call as ONNX knows it: a flat list of named tensors in, one of named tensors out, and the sizes that may vary."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..proof.runs import Call, named_tensors


@dataclass(frozen=True)
class FlatCall:
    """The arguments of one call, taken apart.

    Attributes:
        names: of the tensors, as inputs of the file.
        tensors: the arguments that are tensors, wherever they lie.
        leaves: all arguments; None in the places of the tensors.
        places: of the tensors in ``leaves``.
        spec: how the leaves make up (args, kwargs).
    """

    names: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    leaves: tuple[Any, ...]
    places: tuple[int, ...]
    spec: Any

    @staticmethod
    def of(model: nn.Module, call: Call) -> FlatCall:
        """The call, its tensors copied to the CPU and without gradients."""
        paths, spec = pytree.tree_flatten_with_path((call.args, call.kwargs))
        places = tuple(place for place, (_, leaf) in enumerate(paths) if isinstance(leaf, Tensor))
        tensors = tuple(paths[place][1].detach().cpu().clone() for place in places)
        named = [_input_name(model, paths[place][0]) for place in places]
        leaves = tuple(None if isinstance(leaf, Tensor) else leaf for _, leaf in paths)
        return FlatCall(_unique(named), tensors, leaves, places, spec)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of the tensors."""
        return tuple(tuple(tensor.shape) for tensor in self.tensors)

    def call(self, tensors: Sequence[Any] | None = None) -> Call:
        """The call put together again, with other tensors where given."""
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, self.tensors if tensors is None else tensors, strict=True):
            leaves[place] = tensor
        return Call(*pytree.tree_unflatten(leaves, self.spec))

    def resized(self, shapes: Sequence[Sequence[int]]) -> FlatCall:
        """The same call at other sizes: values are repeated from the start, so that each keeps its meaning."""
        return replace(self, tensors=tuple(map(_resized, self.tensors, shapes)))


class Flat(nn.Module):
    """A model that takes the tensors of a call and gives those of its result.

    Args:
        model: to be called.
        call: whose other arguments are constants.
    """

    def __init__(self, model: nn.Module, call: FlatCall) -> None:
        super().__init__()
        self.model = model
        self._call = call

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The tensors of the result, in the order of ``named_tensors``."""
        call = self._call.call(tensors)
        return tuple(named_tensors(self.model(*call.args, **call.kwargs)).values())


def output_names(outputs: Mapping[str, Tensor], inputs: Sequence[str]) -> tuple[str, ...]:
    """What a file calls them: "output.logits" is "logits", "output.0" is "output_0"."""
    names = [name.removeprefix("output.") for name in outputs]
    names = [f"output_{name}" if name[0].isdigit() else name for name in names]
    return _unique([name.replace(".", "_") for name in names], taken=inputs)


def _input_name(model: nn.Module, path: tuple) -> str:
    """The parameter of ``forward`` that an argument belongs to, and the place inside of it."""
    first, *inner = [getattr(key, "idx", getattr(key, "key", getattr(key, "name", key))) for key in path[1:]]
    if path[0].idx == 0:  # a positional argument
        parameters = list(inspect.signature(model.forward).parameters.values())
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        plain = [parameter.name for parameter in parameters if parameter.kind in kinds]
        first = plain[first] if first < len(plain) else f"input_{first}"
    return "_".join(map(str, (first, *inner)))


def _unique(names: Sequence[str], taken: Sequence[str] = ()) -> tuple[str, ...]:
    """The names, those that come again with a number behind them."""
    found: list[str] = []
    for name in names:
        number, candidate = 1, name
        while candidate in found or candidate in taken:
            number += 1
            candidate = f"{name}_{number}"
        found.append(candidate)
    return tuple(found)


def _resized(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    for axis, size in enumerate(shape):
        if size != tensor.shape[axis]:
            tensor = tensor.index_select(axis, torch.arange(size) % tensor.shape[axis])
    return tensor
