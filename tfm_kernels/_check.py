"""Argument checks. Every message is one sentence: "op: argument must ..., got ..."."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import dropout

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def tensor(op: str, name: str, value: object, *, optional: bool = False) -> None:
    """Refuses anything but a tensor that has a shape (or None where ``optional``)."""
    if not (isinstance(value, Tensor) or (optional and value is None)):
        wanted = "a tensor or None" if optional else "a tensor"
        raise TypeError(f"{op}: {name} must be {wanted}, got {type(value).__name__}")
    if value is not None and value.is_nested:
        raise ValueError(f"{op}: {name} must be a padded tensor, got a nested one")


def floating(op: str, **tensors: Tensor | None) -> None:
    """Refuses tensors that are not float16, bfloat16, float32 or float64."""
    for name, value in tensors.items():
        if value is not None and value.dtype not in FLOATING:
            raise ValueError(f"{op}: {name} must be float16, bfloat16, float32 or float64, got {dtype_name(value)}")


def dense(op: str, **tensors: Tensor | None) -> None:
    """Refuses sparse and other tensors that are no grid of numbers."""
    for name, value in tensors.items():
        if value is not None and value.layout is not torch.strided:
            raise ValueError(f"{op}: {name} must be a dense tensor, got layout {value.layout}")


def same(op: str, **tensors: Tensor | None) -> None:
    """Refuses tensors of different dtype or device, naming each with its own."""
    same_device(op, **tensors)
    given = {name: value for name, value in tensors.items() if value is not None}
    if len({value.dtype for value in given.values()}) > 1:
        listed = ", ".join(f"{name} {dtype_name(value)}" for name, value in given.items())
        raise ValueError(f"{op}: {_names(given)} must have one dtype, got {listed}")


def same_device(op: str, **tensors: Tensor | None) -> None:
    """Refuses tensors on different devices, naming each with its own."""
    given = {name: value for name, value in tensors.items() if value is not None}
    if len({value.device for value in given.values()}) > 1:
        listed = ", ".join(f"{name} on {value.device} ({dtype_name(value)})" for name, value in given.items())
        raise ValueError(f"{op}: {_names(given)} must be on one device, got {listed}")


def shape(
    op: str, name: str, value: Tensor | None, expected: Sequence[int], to_match: str, other: Tensor | None = None
) -> None:
    """Refuses a tensor whose shape is not ``expected``, which follows from ``to_match``, the argument ``other``.

    The sentence is put together only when it is needed: formatting shapes costs more than a small kernel.
    """
    if value is not None and value.shape != expected:
        like = to_match if other is None else f"{to_match} {tuple(other.shape)}"
        raise ValueError(f"{op}: {name} must have shape {tuple(expected)} to match {like}, got {tuple(value.shape)}")


_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)


def number(op: str, name: str, value: object) -> None:
    """Refuses what is not a real number (bool, str and None among it)."""
    if isinstance(value, bool) or not (isinstance(value, _NUMBERS) or _is_of_numpy(value)):
        raise TypeError(f"{op}: {name} must be a number, got {type(value).__name__}")
    if isinstance(value, int) and value.bit_length() > 1023:
        raise ValueError(f"{op}: {name} must be a number that a float can hold, got {value.bit_length()} bits")


def _is_of_numpy(value: object) -> bool:
    """Whether it is a real scalar of numpy's, which torch takes for a number too."""
    return type(value).__module__ == "numpy" and isinstance(value, numbers.Real)


def eps(op: str, value: float, name: str = "eps") -> None:
    """Refuses an eps that is no finite number >= 0."""
    number(op, name, value)
    if not 0.0 <= value < float("inf"):
        raise ValueError(f"{op}: {name} must be a finite number >= 0, got {value}")


def probability(op: str, name: str, value: float) -> None:
    """Refuses what does not lie in [0, 1]."""
    number(op, name, value)
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{op}: {name} must lie in [0, 1], got {value}")


def seed(op: str, dropout_p: float, value: Tensor | None, device: torch.device) -> Tensor | None:
    """The seed a call will use: None without dropout, the given one, or a fresh one (``dropout.draw_seed``)."""
    probability(op, "dropout_p", dropout_p)
    tensor(op, "seed", value, optional=True)
    if value is not None:
        if value.dtype != torch.int64 or value.dim() != 0:
            raise ValueError(
                f"{op}: seed must be an int64 tensor of shape (), got {dtype_name(value)} of shape {tuple(value.shape)}"
            )
        if value.device != device:
            raise ValueError(f"{op}: seed must be on {device}, the call's device, got {value.device}")
    if dropout_p == 0.0:
        return None
    return dropout.draw_seed(device, dropout_p) if value is None else value


def dropout_rows(op: str, value: Tensor | None, rows: int) -> None:
    """Refuses row numbers of the random rule that are not one int64 per row."""
    tensor(op, "dropout_rows", value, optional=True)
    if value is not None and (value.dtype != torch.int64 or value.dim() != 1 or value.shape[0] != rows):
        raise ValueError(
            f"{op}: dropout_rows must be an int64 tensor of shape ({rows},), got {dtype_name(value)} of shape "
            f"{tuple(value.shape)}"
        )


def choice(op: str, name: str, value: object, allowed: Sequence[str]) -> None:
    """Refuses a value that is not among ``allowed``."""
    if value not in allowed:
        raise ValueError(f"{op}: {name} must be one of {', '.join(allowed)}, got {value!r}")


def dtype_name(value: Tensor | torch.dtype) -> str:
    """The plain name of a dtype, "float32", also of a tensor's."""
    return str(value.dtype if isinstance(value, Tensor) else value).removeprefix("torch.")


def int8_weight(op: str, name: str, value: Tensor, steps_name: str, steps: Tensor) -> None:
    """Refuses a weight that is not int8 (N, K), and steps that are not float32 (N,)."""
    for argument, given, wanted in ((name, value, torch.int8), (steps_name, steps, torch.float32)):
        if given.dtype != wanted:
            raise ValueError(f"{op}: {argument} must be {dtype_name(wanted)}, got {dtype_name(given)}")
        dense(op, **{argument: given})
    if value.dim() != 2:
        raise ValueError(f"{op}: {name} must have 2 dimensions, got shape {tuple(value.shape)}")
    shape(op, steps_name, steps, (value.shape[0],), name, value)


def int8_width(op: str, name: str, columns: int) -> None:
    """Refuses rows that are too long for a product of integers in int32: 2**17 * 127 * 128 is just below 2**31."""
    if columns > 1 << 17:
        raise ValueError(f"{op}: {name} must have at most {1 << 17:,} columns, got {columns:,}")


def _names(given: dict[str, Tensor]) -> str:
    names = list(given)
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]


def records_graph(*tensors: Tensor | None) -> bool:
    """Whether autograd records what is computed from any of these."""
    if torch.is_grad_enabled():
        for value in tensors:
            if value is not None and value.requires_grad:
                return True
    return False


def call_arguments(caller: str, inputs: Any) -> tuple[tuple, dict[str, Any]]:
    """Positional arguments and those by name: a tensor is the one argument, a mapping holds them by name."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), {}
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    raise TypeError(f"{caller}: inputs must be a tensor, a tuple or a dict of arguments, got {type(inputs).__name__}")
