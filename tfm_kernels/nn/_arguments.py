"""Checks of what the modules' constructors and forwards are given, beyond those of the ops."""

from __future__ import annotations

import numbers
from typing import Any

from torch import Tensor

from .. import _backend, _check


def backend(op: str, value: object) -> None:
    """Refuses a name that no backend has."""
    if value is not None:
        _check.choice(op, "backend", value, _backend.BACKENDS)


def size(op: str, name: str, value: object, least: int = 1) -> None:
    """Refuses what is not an int of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{op}: {name} must be an int, got {type(value).__name__}")
    if int(value) < least:
        raise ValueError(f"{op}: {name} must be at least {least}, got {value}")


def heads(op: str, width_name: str, width: int, heads_name: str, count: int) -> None:
    """Refuses a width that does not split into so many heads."""
    size(op, width_name, width)
    size(op, heads_name, count)
    if width % count != 0:
        raise ValueError(
            f"{op}: {width_name} must be divisible by {heads_name}, got {width_name} {width} and {heads_name} {count}"
        )


def normalized_shape(op: str, value: Any) -> None:
    """Refuses what is neither a positive int nor a non-empty sequence of them."""
    sizes = (value,) if isinstance(value, numbers.Integral) else value
    if isinstance(sizes, (str, bytes)) or not hasattr(sizes, "__iter__"):
        raise TypeError(f"{op}: normalized_shape must be an int or a list or tuple of ints, got {type(value).__name__}")
    sizes = tuple(sizes)
    if not sizes:
        raise ValueError(f"{op}: normalized_shape must have at least one dimension, got {value}")
    for length in sizes:
        size(op, "each size in normalized_shape", length)


def features(op: str, name: str, value: object, width: int, width_name: str) -> None:
    """Refuses anything but a tensor whose last dimension is ``width``."""
    _check.tensor(op, name, value)
    assert isinstance(value, Tensor)
    if value.dim() == 0 or value.shape[-1] != width:
        raise ValueError(f"{op}: {name} must have {width_name} {width} as its last size, got {tuple(value.shape)}")
