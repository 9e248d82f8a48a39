"""The patched model under torch.compile, judged as it is without."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from ..patching.copying import copied
from . import padding
from .runs import Call, Returned, draws, forward
from .side_by_side import Models, Trio, first_line, run_three

T = TypeVar("T")
_FORMS = 1 << 16  # of one function; past eight a process would run what it proves next without compiling it


class CompileFails(RuntimeError):
    """torch.compile cannot compile the patched model, or the compiled form cannot run the call."""


def plain(model: nn.Module) -> nn.Module:
    """The model without what torch.compile(module) wraps around it, and of a model with such parts a copy without."""
    model = _inner(model)
    if any(map(_is_wrapper, model.modules())):
        model = copied(model)
        for module in list(model.modules()):
            module._modules.update(
                {name: _inner(child) for name, child in module._modules.items() if child is not None}
            )
    return model


def _inner(module: nn.Module) -> nn.Module:
    while _is_wrapper(module):
        module = module.get_submodule("_orig_mod")
    return module


def _is_wrapper(module: nn.Module) -> bool:
    """Whether it is what torch.compile(module) returns; torch._dynamo, which makes these, is not imported for it."""
    made = sys.modules.get("torch._dynamo.eval_frame")
    return made is not None and isinstance(module, made.OptimizedModule)


def is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile runs the model or a module in it."""
    return any(_is_wrapper(m) or m._compiled_call_impl is not None for m in model.modules())


def form(
    model: nn.Module, call: Call, notes: list[str], tell: Callable[[str], None] = lambda stage: None
) -> Form | None:
    """The form of a patched model under torch.compile, after a call without a graph; None, with a note, where it draws.

    Args:
        model: patched, and maybe frozen.
        call: its arguments.
        notes: gets one.
        tell: told of each stage.

    Raises:
        CompileFails: torch.compile raises, or has compiled nothing.
    """
    if draws(model, call):
        notes.append(
            "it was not run under torch.compile: the model draws random numbers (dropout), and compiled code draws "
            "others; prove it in evaluation mode, or without dropout"
        )
        return None
    made = Form(model, call, tell)
    notes.append(f"torch.compile made {made.graphs} graph{'s' * (made.graphs != 1)} of it for a call without gradients")
    return made


class Form:
    """A model under torch.compile.

    Attributes:
        model: itself.
        call: its arguments.
        graphs: how many graphs have been compiled.
        plain: what the call without a graph gave.
    """

    def __init__(self, model: nn.Module, call: Call, tell: Callable[[str], None]) -> None:
        self.model, self.call, self.tell, self.graphs = model, call, tell, 0
        self.compiled = torch.compile(model, backend=self._backend)
        tell("patched model under torch.compile, without a graph")
        self.plain: Returned = self._watched(lambda: forward(model, call.to(None), compiled=self.compiled))

    def run(self, models: Models, dtype: torch.dtype, loss_fn: Callable | None) -> Trio:
        """Its forward and backward beside those of the original, whose padding stays: compiled stacks run padded."""
        self.tell("patched model under torch.compile, forward and backward")
        given: Any = {"left_out": padding.LeftOut(), "loss_fn": loss_fn, "compiled": self.compiled}
        return self._watched(lambda: run_three(models, self.call, dtype, **given))

    def _backend(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return torch._dynamo.lookup_backend("inductor")(graph, inputs)

    def _watched(self, runs: Callable[[], T]) -> T:
        try:
            with torch._dynamo.config.patch(recompile_limit=_FORMS, accumulated_recompile_limit=_FORMS):
                found = runs()
        except Exception as error:  # whatever a compiler throws
            told = f"{type(error).__name__}: {first_line(error)}"
            raise CompileFails(f"prove: the patched model fails under torch.compile: {told}") from error
        if not self.graphs:
            raise CompileFails("prove: torch.compile has compiled nothing of the patched model")
        return found
