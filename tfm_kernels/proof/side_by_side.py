"""Three runs of one call: the float64 original, the original, the patched model; padding left out of all."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import padding, precision
from .runs import Call, Run, device_of, forward, run


class PatchedFails(RuntimeError):
    """The patched model raises where the original runs."""


@dataclass(frozen=True)
class Models:
    """One model, or one module of it, three times.

    Attributes:
        exact: the original in float64.
        stock: the original in the dtype to be judged.
        patched: the patched one in that dtype.
    """

    exact: nn.Module
    stock: nn.Module
    patched: nn.Module

    def at(self, name: str) -> Models:
        """The submodule of this name in each."""
        return Models(*(model.get_submodule(name) for model in (self.exact, self.stock, self.patched)))


@dataclass
class Trio:
    """What the three runs gave.

    Attributes:
        exact: float64.
        stock: the original.
        patched: the patched model.
        ignored: output -> bool over its leading axes, True at padding that the patched model did not compute.
    """

    exact: Run
    stock: Run
    patched: Run
    ignored: dict[str, Tensor]

    def outputs(self) -> list[dict[str, Tensor]]:
        """The outputs of the three, padding left out."""
        return [without_padding(done.outputs, self.ignored) for done in (self.exact, self.stock, self.patched)]

    def gradients(self) -> list[dict[str, Tensor]]:
        """The gradients of the three."""
        return [self.exact.gradients, self.stock.gradients, self.patched.gradients]

    def buffers(self) -> list[dict[str, Tensor]]:
        """Those of the three that any of them changed."""
        runs = (self.exact, self.stock, self.patched)
        changed = set().union(*(done.changed for done in runs))
        return [{name: b for name, b in done.buffers.items() if name in changed} for done in runs]

    @property
    def rows(self) -> int:
        """Of the output that has most: over so many a gradient of a vector sums."""
        return max(
            (value.numel() // max(value.shape[-1:].numel(), 1) for value in self.exact.outputs.values()), default=0
        )


def run_three(
    models: Models,
    call: Call,
    dtype: torch.dtype,
    loss_fn: Callable[[Any], Tensor] | None = None,
    tell: Callable[[str], None] = lambda stage: None,
) -> Trio:
    """Forward and backward of all three.

    Args:
        models: to be called.
        call: the arguments, as the original and the patched model take them.
        dtype: as in ``run``.
        loss_fn: as in ``run``.
        tell: told of each stage.

    Raises:
        PatchedFails: the patched model raises and the original does not; where both do, the original's error.
    """
    try:
        tell("patched model, forward")
        ignored = padding_of(forward(models.patched, call.to(None)), models.stock, call)
        tell("patched model, forward and backward")
        patched = run(models.patched, call.to(None), dtype, loss_fn=loss_fn, ignored=ignored)
    except Exception as error:  # whatever the model raises
        run(models.stock, call.to(None), dtype, loss_fn=loss_fn)
        raise PatchedFails(f"{type(error).__name__}: {first_line(error)}") from error
    options: dict[str, Any] = {"loss_fn": loss_fn, "ignored": ignored}
    tell("original, forward and backward")
    stock = run(models.stock, call.to(None), dtype, **options, within=precision.in_its_own_dtype)
    if loss_fn is None and not patched.outputs.keys() <= stock.outputs.keys():  # more was weighted than there should be
        patched = run(models.patched, call.to(None), dtype, only=stock.outputs, ignored=ignored)
    tell("original in float64, forward and backward")
    with torch.autocast(device_of(models.stock, call).type, enabled=False):
        exactly = functools.partial(precision.exactly, dtype)
        exact = run(models.exact, call.to(torch.float64), dtype, **options, within=exactly)
    return Trio(exact, stock, patched, ignored)


def padding_of(outputs: dict[str, Tensor], model: nn.Module, call: Call) -> dict[str, Tensor]:
    """Which positions of these outputs of the patched model are padding that it did not compute."""
    arguments = call.named(model)
    return padding.padded(outputs, padding.masks(arguments), arguments)


def without_padding(outputs: dict[str, Tensor], ignored: dict[str, Tensor]) -> dict[str, Tensor]:
    """The outputs with ignored positions cut out."""
    return {name: value[~ignored[name]] if name in ignored else value for name, value in outputs.items()}


def first_line(error: Exception) -> str:
    """What an error says, cut to a line."""
    return (str(error).splitlines() or ["no message"])[0]
