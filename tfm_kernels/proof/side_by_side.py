"""Three runs of one call: the float64 original, the original, the patched model; all leave the same padding out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..patching import huggingface
from ..patching.registry import unasked
from . import padding, precision
from .runs import Call, Run, device_of, forward, run
from .untouched import RunsTheOriginal


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
        ignored: output -> bool over its leading axes, True at padding that packed execution left out.
        reached: the stacks to whose padding a gradient came back.
    """

    exact: Run
    stock: Run
    patched: Run
    ignored: dict[str, Tensor] = field(default_factory=dict)
    reached: set[str] = field(default_factory=set)

    def outputs(self) -> list[dict[str, Tensor]]:
        """The outputs of the three."""
        return [done.outputs for done in (self.exact, self.stock, self.patched)]

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


@dataclass(frozen=True)
class Originals:
    """How the original runs where the patched model left padding out.

    Attributes:
        models: the three.
        left_out: by the patched model.
        dtype: to be judged.
    """

    models: Models
    left_out: padding.LeftOut
    dtype: torch.dtype

    @contextmanager
    def exactly(self, reached: set[str] | None = None) -> Iterator[None]:
        """In float64; ``reached`` as in ``LeftOut.applied``."""
        with self.left_out.applied(self.models.exact, reached), precision.exactly(self.dtype):
            yield

    @contextmanager
    def in_its_own_dtype(self) -> Iterator[None]:
        """In the dtype."""
        with self.left_out.applied(self.models.stock), precision.in_its_own_dtype():
            yield


def run_alone(models: Models, call: Call, dtype: torch.dtype) -> Trio:
    """Forward and backward of all three, of one module; what the patched one gives only when asked does not count.

    Raises:
        PatchedFails: the patched model raises and the original does not; where both do, the original's error.
    """
    with told_apart(models, call, dtype), padding.observed(models.patched) as left_out:
        if left_out.calls:  # else no stack is in it
            forward(models.patched, call.to(None))
        without = {*unasked(models.patched), *_eager_weights(models, call)}
    return run_three(models, call, dtype, left_out, without=without)


def _eager_weights(models: Models, call: Call) -> list[str]:
    """The attention weights that transformers' "eager" attention gives in every call, ours where they are asked for."""
    config: Any = getattr(models.stock, "config", None)
    if not huggingface.attends(models.patched) or config._attn_implementation != "eager":
        return []
    given, fused = (forward(model, call.to(None)).outputs for model in (models.stock, models.patched))
    missing = {name: output for name, output in given.items() if name not in fused}
    return [name for name, output in missing.items() if output.dim() == 4 and bool((output >= 0.0).all())]


@contextmanager
def told_apart(models: Models, call: Call, dtype: torch.dtype, loss_fn: Callable | None = None) -> Iterator[None]:
    """What the patched model raises within the block is PatchedFails, unless the original raises, too."""
    try:
        yield
    except RunsTheOriginal:
        raise
    except Exception as error:  # whatever the model raises
        run(models.stock, call.to(None), dtype, loss_fn=loss_fn)
        raise PatchedFails(f"{type(error).__name__}: {first_line(error)}") from error


def run_three(
    models: Models,
    call: Call,
    dtype: torch.dtype,
    left_out: padding.LeftOut,
    loss_fn: Callable | None = None,
    at_padding: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = lambda outputs: {},
    tell: Callable[[str], None] = lambda stage: None,
    without: Collection[str] = (),
    compiled: Callable[..., Any] | None = None,
) -> Trio:
    """Forward and backward of all three.

    Args:
        models: to be called.
        call: the arguments, as the original and the patched model take them.
        dtype: as in ``run``.
        left_out: what the patched model leaves out.
        loss_fn: as in ``run``.
        at_padding: from the outputs in float64, output -> which positions are padding, and weigh nothing.
        tell: told of each stage.
        without: as in ``run``.
        compiled: as in ``run``, of the patched model.

    Raises:
        PatchedFails: as in ``run_alone``; what a compiled form raises is raised as it is.
    """
    originals = Originals(models, left_out, dtype)
    ignored: dict[str, Tensor] = {}
    reached: set[str] = set()

    def look(outputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        ignored.update(at_padding(outputs))
        return ignored

    tell("original in float64, forward and backward")
    with not_autocast(models.exact, call):
        exact = run(
            models.exact, call.to(torch.float64), dtype, loss_fn=loss_fn, without=without, ignored=look,
            within=lambda: originals.exactly(reached),
        )  # fmt: skip
    known = lambda outputs: ignored  # noqa: E731
    tell("original, forward and backward")
    told: Any = {"loss_fn": loss_fn, "without": without, "ignored": known}
    stock = run(models.stock, call.to(None), dtype, within=originals.in_its_own_dtype, **told)
    tell("patched model, forward and backward")
    with told_apart(models, call, dtype, loss_fn) if compiled is None else nullcontext():
        patched = run(models.patched, call.to(None), dtype, **told, compiled=compiled)
    if loss_fn is None and not patched.outputs.keys() <= stock.outputs.keys():  # more was weighted than there should be
        patched = run(models.patched, call.to(None), dtype, only=stock.outputs, ignored=known, compiled=compiled)
    return Trio(exact, stock, patched, ignored, reached)


def not_autocast(model: nn.Module, call: Call) -> torch.autocast:
    """The float64 original computes in float64, whatever the caller's autocast says."""
    return torch.autocast(device_of(model, call).type, enabled=False)


def first_line(error: Exception) -> str:
    """What an error says, cut to a line."""
    return (str(error).splitlines() or ["no message"])[0]
