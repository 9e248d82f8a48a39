"""The user's own model, of which a proof runs copies alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class RunsTheOriginal(ValueError):
    """A copy of the model runs parts of the model itself, so that original and patched model cannot be told apart."""


class _Apart(TorchDispatchMode):
    """Refuses to compute with parameters, and to write into buffers, before it is done."""

    supports_higher_order_operators = True

    def __init__(self, parameters: set[int], buffers: set[int], name: str) -> None:
        super().__init__()
        self._parameters, self._buffers, self._name = parameters, buffers, name

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        given = {_address(each) for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        schema = getattr(func, "_schema", None)  # a batch norm's does not tell that it writes
        writes = schema is not None and (schema.is_mutable or "batch_norm" in schema.name)
        if given & self._parameters or (writes and given & self._buffers):
            raise RunsTheOriginal(
                f"prove: a copy of {self._name} runs parts of the model itself, which an object or a function in it "
                "holds, so that original and patched model cannot be told apart"
            )
        return func(*args, **(kwargs or {}))


@contextmanager
def apart(model: nn.Module, copy: nn.Module) -> Iterator[None]:
    """Within the block nothing is computed with parameters of ``model`` that ``copy`` does not hold, too.

    Nor is anything written into such buffers: what else a program reads of them may be a table of many models.

    Raises:
        RunsTheOriginal: instead.
    """
    shared = {0} | _addresses(copy.parameters()) | _addresses(copy.buffers())
    own = _addresses(model.parameters()) - shared, _addresses(model.buffers()) - shared
    with _Apart(*own, type(model).__name__):
        yield


def _addresses(tensors: Iterable[Tensor]) -> set[int]:
    return {_address(each) for each in tensors}


def _address(tensor: Tensor) -> int:
    """Where its memory begins, 0 without any."""
    with suppress(Exception):  # of tensors that have none, there are many kinds
        return tensor.untyped_storage().data_ptr()
    return 0


def _version(tensor: Tensor) -> int:
    """How often it has been written into; what inference mode has made does not count, and no backward adds to it."""
    return 0 if tensor.is_inference() else tensor._version


@contextmanager
def gradients_kept(model: nn.Module, loss_fn: Callable | None) -> Iterator[None]:
    """After the block the model's parameters have the gradients that they had before, whatever happened.

    Raises:
        ValueError: one was another at the end of the block.
    """
    before = [(each, each.grad, None if each.grad is None else each.grad.clone()) for each in model.parameters()]
    versions = [None if gradient is None else _version(gradient) for _, gradient, _ in before]
    touched = False
    try:
        yield
    finally:
        for (parameter, gradient, numbers), version in zip(before, versions, strict=True):
            touched |= parameter.grad is not gradient
            parameter.grad = gradient
            if gradient is not None and numbers is not None and _version(gradient) != version:  # added to in place
                touched = True
                gradient.copy_(numbers)
    if touched:
        reader = "an object or a function in it" if loss_fn is None else "loss_fn"
        raise ValueError(
            f"prove: gradients reached parameters of the {type(model).__name__} itself, of which copies are proven; "
            f"{reader} must not compute with them"
        )
