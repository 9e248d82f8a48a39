"""How calls meet torch.autocast: an op never, whatever its backend; who follows autocast casts before the call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

_Function = TypeVar("_Function", bound=Callable[..., Any])


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype that torch.autocast gives to linear and attention on ``device``, None where it is off."""
    kind = device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def as_autocast(*tensors: Any) -> tuple[Any, ...]:
    """The tensors as autocast, where it is on for the first one's device, hands them to linear and attention.

    In its dtype; float64, what is not floating, and None stay as they are.
    """
    dtype = autocast_dtype(tensors[0].device)
    return tensors if dtype is None else tuple(_cast(tensor, dtype) for tensor in tensors)


def _cast(tensor: Any, dtype: torch.dtype) -> Any:
    if tensor is None or tensor.dtype == torch.float64 or not tensor.is_floating_point():
        return tensor
    return tensor.to(dtype)


def beyond_autocast(function: _Function) -> _Function:
    """``function``, whose first argument is a tensor, with PyTorch's own operators in it as blind as kernels are."""

    @functools.wraps(function)
    def called(tensor: Tensor, *others: Any, **named: Any) -> Any:
        if not torch._C._is_any_autocast_enabled() or autocast_dtype(tensor.device) is None:
            return function(tensor, *others, **named)
        with torch.autocast(tensor.device.type, enabled=False):
            return function(tensor, *others, **named)

    return cast(_Function, called)
