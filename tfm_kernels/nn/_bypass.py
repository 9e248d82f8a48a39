"""When a fused module may read the parameters of a child instead of calling it: only where nobody could tell.

A child that is of another class (LoRA, quantised, parametrised, sharded), that carries hooks or a forward of its own,
or whose weights are no ordinary tensors, is called.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn.modules.module import _has_any_global_hook

_ORDINARY = (Tensor, nn.Parameter, nn.Buffer)
LINEARS: list[type] = [nn.Linear]  # classes that are x weight^T + bias and no more; patching adds its own


def plain(child: nn.Module | None, *classes: type) -> bool:
    """Whether ``child`` is exactly of one of ``classes``, and calling it would do nothing but its class's forward."""
    return (
        type(child) in classes
        and child is not None
        and not (child._forward_hooks or child._forward_pre_hooks or child._backward_hooks or child._backward_pre_hooks)
        and "forward" not in child.__dict__
        and child._compiled_call_impl is None
        and not _has_any_global_hook()
    )


def ordinary(*tensors: Tensor | None) -> bool:
    """Whether a kernel can read these tensors: dense, no subclass with a meaning of its own (None is fine)."""
    for tensor in tensors:  # a loop, because a generator in all() takes three times as long
        if tensor is None:
            continue
        if type(tensor) not in _ORDINARY and not isinstance(tensor, FakeTensor):
            return False
        if tensor.layout is not torch.strided:
            return False
    return True


def cannot_be_kept(*inputs: Tensor) -> bool:
    """Whether one of them was made in inference mode, and autograd may have to keep it for a backward pass."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return False
    return any(each.is_inference() for each in inputs)


def plain_linear(child: nn.Module) -> bool:
    """Whether ``child`` is an nn.Linear, patched or not, whose weight and bias may be read."""
    return plain(child, *LINEARS) and ordinary(child.weight, child.bias)  # type: ignore[arg-type]


def dropout_p(child: nn.Module) -> float | None:
    """The probability with which ``child`` drops just now, or None where it must be called."""
    if plain(child, nn.Dropout):
        assert isinstance(child, nn.Dropout)
        return child.p if child.training else 0.0
    return 0.0 if plain(child, nn.Identity) else None
