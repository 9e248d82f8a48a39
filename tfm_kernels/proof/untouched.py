"""The user's own model, of which a proof runs copies alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class RunsTheOriginal(ValueError):
    """A copy of the model runs parts of the model itself, so that original and patched model cannot be told apart."""


class _Apart(TorchDispatchMode):
    """Refuses to compute with some memory, before anything is written there."""

    def __init__(self, own: set[int], name: str) -> None:
        super().__init__()
        self._own, self._name = own, name

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        given = pytree.tree_leaves((args, kwargs))
        if any(_address(each) in self._own for each in given if isinstance(each, Tensor)):
            raise RunsTheOriginal(
                f"prove: a copy of {self._name} runs parts of the model itself, which an object or a function in it "
                "holds, so that original and patched model cannot be told apart"
            )
        return func(*args, **(kwargs or {}))


@contextmanager
def apart(model: nn.Module, copy: nn.Module) -> Iterator[None]:
    """Within the block nothing is computed with parameters and buffers of ``model`` that ``copy`` does not hold, too.

    Raises:
        RunsTheOriginal: instead.
    """
    with _Apart(_addresses(model) - _addresses(copy), type(model).__name__):
        yield


def _addresses(model: nn.Module) -> set[int]:
    return {_address(each) for each in (*model.parameters(), *model.buffers())} - {0}


def _address(tensor: Tensor) -> int:
    """Where its memory begins, 0 without any."""
    with suppress(Exception):  # of tensors that have none, there are many kinds
        return tensor.untyped_storage().data_ptr()
    return 0


@contextmanager
def gradients_kept(model: nn.Module, loss_fn: Callable | None) -> Iterator[None]:
    """After the block the model's parameters have the gradients that they had before, whatever happened.

    Raises:
        ValueError: one was another at the end of the block.
    """
    before = [(each, each.grad, None if each.grad is None else each.grad.clone()) for each in model.parameters()]
    versions = [None if gradient is None else gradient._version for _, gradient, _ in before]
    touched = False
    try:
        yield
    finally:
        for (parameter, gradient, numbers), version in zip(before, versions, strict=True):
            touched |= parameter.grad is not gradient
            parameter.grad = gradient
            if gradient is not None and numbers is not None and gradient._version != version:  # added to in place
                touched = True
                gradient.copy_(numbers)
    if touched:
        reader = "an object or a function in it" if loss_fn is None else "loss_fn"
        raise ValueError(
            f"prove: gradients reached parameters of the {type(model).__name__} itself, of which copies are proven; "
            f"{reader} must not compute with them"
        )
