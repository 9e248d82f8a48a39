"""The patched model under torch.compile, judged as it is without."""

from __future__ import annotations

import copy
import functools
import inspect
import operator
import sys
import types
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import fx, nn

from ..patching.copying import copied
from ..testing.same_dropout import around_graphs, in_graph
from . import padding
from .report import Row
from .rule import Judge
from .runs import Call, Returned, device_of, draws, forward, named
from .side_by_side import Models, Trio, first_line, run_three

T = TypeVar("T")
_FORMS = 1 << 16  # of one function; past eight a process would run what it proves next without compiling it

# where torch has it, else what follows a graph break counts for the model's class
_ISOLATES = "isolate_recompiles" in inspect.signature(torch.compile).parameters
_ISOLATED: dict[str, Any] = {"isolate_recompiles": True} if _ISOLATES else {}

NOT_RUN = "it was not run under torch.compile: {}"
_DRAWS = "the model draws random numbers for more than dropout ({}), and compiled code draws others"
_DROPS = "under torch.compile its dropout drops, by the proof's hand, what it drops without"


class CompileFails(RuntimeError):
    """torch.compile cannot compile the patched model, or the compiled form cannot run the call."""


def plain(model: nn.Module) -> nn.Module:
    """The model without what torch.compile(module) wraps around it, and of a model with such parts a copy without."""
    model = _inner(model)
    wrappers = [module for module in model.modules() if _is_wrapper(module)]
    if not wrappers:
        return model
    made: dict[int, Any] = {}
    for wrapper in reversed(wrappers):  # the inner ones first
        made[id(wrapper)] = copy.deepcopy(_inner(wrapper), made)
    return copied(model, made)


def is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile runs the model, a module in it, or the forward of one."""
    return any(
        _is_wrapper(module)
        or getattr(module, "_compiled_call_impl", None) is not None
        or _is_compiled(getattr(module, "forward", None))
        for module in model.modules()
    )


def _is_compiled(function: Any) -> bool:
    """Whether it comes of torch.compile, and not of torch.compiler.disable."""
    return hasattr(function, "_torchdynamo_orig_callable") and not getattr(function, "_torchdynamo_disable", False)


def _inner(module: nn.Module) -> nn.Module:
    while _is_wrapper(module):
        module = module.get_submodule("_orig_mod")
    return module


def _is_wrapper(module: nn.Module) -> bool:
    """Whether it is what torch.compile(module) returns; torch._dynamo, which makes these, is not imported for it."""
    made = sys.modules.get("torch._dynamo.eval_frame")
    return made is not None and isinstance(module, made.OptimizedModule)


class DrawsOthers(CompileFails):
    """The model draws random numbers for more than dropout; compiled code draws others."""


class Compiled:
    """A model under torch.compile, which forgets what was compiled for it when it goes, but not behind graph breaks.

    Compiled code is kept by the code of the function that is compiled: here one of its own, lest what is compiled of a
    class add up in a process until it reaches torch's limit.

    Args:
        model: that is called.
        dropping: the device on which its dropouts, within ``same_dropout``, drop what they drop there without a
            compiler; None leaves them to the compiler.

    Attributes:
        others: names of operators beside dropout that draw random numbers, where ``dropping``.
    """

    def __init__(self, model: nn.Module, dropping: torch.device | None = None) -> None:
        def call(*args: Any, **kwargs: Any) -> Any:
            return model(*args, **kwargs)

        # and globals of its own, in which graphs are kept
        own = types.FunctionType(call.__code__.replace(), dict(globals()), call.__name__, None, call.__closure__)
        self._graphs: list[None] = []
        self._dropping = dropping
        self.others: set[str] = set()
        backend = _inductor if dropping is None else functools.partial(_inductor_dropping, dropping, self.others)
        self._call = torch.compile(own, backend=functools.partial(backend, self._graphs), **_ISOLATED)
        weakref.finalize(self, torch._dynamo.eval_frame.reset_code, own.__code__).atexit = False

    @property
    def graphs(self) -> int:
        """How many have been compiled."""
        return len(self._graphs)

    def same_dropout(self) -> AbstractContextManager[None]:
        """To be called within, and the backward."""
        return nullcontext() if self._dropping is None else around_graphs(self._dropping)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model gives."""
        return self._call(*args, **kwargs)


def _inductor(graphs: list[None], graph: Any, inputs: Any) -> Any:
    graphs.append(None)
    return torch._dynamo.lookup_backend("inductor")(graph, inputs)


def _inductor_dropping(device: torch.device, others: set[str], graphs: list[None], graph: Any, inputs: Any) -> Any:
    graphs.append(None)
    around = fx.Graph()
    given = [around.placeholder(node.name) for node in graph.graph.find_nodes(op="placeholder")]
    results = around.call_module("dropping", tuple(given))
    returned = range(len(graph.graph.output_node().args[0]))
    around.output(tuple(around.call_function(operator.getitem, (results, number)) for number in returned))
    dropping = fx.GraphModule({"dropping": _Dropping(graph, device, others)}, around)
    with torch._functorch.config.patch(enable_autograd_cache=False):  # which would know it by ``around`` alone
        return torch._inductor.compile(dropping, inputs, options={"fallback_random": True})


class _Dropping(nn.Module):
    """What a graph does, dropouts in it by the rule of ``same_dropout``."""

    def __init__(self, graph: nn.Module, device: torch.device, others: set[str]) -> None:
        super().__init__()
        self.graph, self._device, self._others = graph, device, others

    def forward(self, *args: Any) -> Any:
        with in_graph(self._device, self._others):
            return self.graph(*args)


def form(
    model: nn.Module, call: Call, notes: list[str], tell: Callable[[str], None], *, asked: bool = True
) -> Form | None:
    """The form of a patched model under torch.compile, after a call without a graph; None, with a note, for no form.

    Args:
        model: patched, and maybe frozen.
        call: its arguments.
        notes: gets one.
        tell: told of each stage.
        asked: whether the caller asked for it; else a note is enough where it fails.

    Raises:
        CompileFails: torch.compile raises, or has compiled nothing.
    """
    try:
        made = Form(model, call, tell)
    except CompileFails as error:
        failed(error, notes, asked)
        return None
    if made.drops:
        notes.append(_DROPS)
    notes.append(f"torch.compile made {made.graphs} graph{'s' * (made.graphs != 1)} of it for a call without gradients")
    return made


def failed(error: CompileFails, notes: list[str], asked: bool) -> None:
    """Makes a note of it, or raises it where the caller asked for what torch.compile cannot do."""
    if asked and not isinstance(error, DrawsOthers):
        raise error
    notes.append(NOT_RUN.format(error))


class Form:
    """A model under torch.compile, and what it gave.

    Attributes:
        graphs: how many graphs the call without a graph took.
        drops: whether it draws random numbers.
    """

    _trio: Trio
    _again: Callable[[], Trio]

    def __init__(self, model: nn.Module, call: Call, tell: Callable[[str], None]) -> None:
        self.drops = draws(model, call)
        self._call, self._tell = call, tell
        self._compiled = Compiled(model, device_of(model, call) if self.drops else None)
        tell("patched model under torch.compile, without a graph")
        self._plain: Returned = self._watched(lambda: forward(model, call.to(None), compiled=self._compiled))
        self.graphs = self._compiled.graphs

    def beside(
        self,
        models: Models,
        dtype: torch.dtype,
        loss_fn: Callable | None,
        ways: Sequence[tuple[padding.LeftOut, Any]],
        judge: Judge,
        typical: float,
    ) -> list[Row]:
        """Runs forward and backward beside the original, and compares outputs and buffers.

        Args:
            models: the original and the patched one, which this is a form of.
            dtype: to be judged.
            loss_fn: as ``prove`` has it.
            ways: in which the original may leave padding out, with ``at_padding`` of ``run_three``: compiled stacks run
                padded, the first, and one that the compiler was told to leave alone packed, the second. The first
                counts unless the second passes.
            judge: of the rows.
            typical: relative error.
        """
        found: list[tuple[list[Row], Trio, Callable[[], Trio]]] = []
        for left_out, at_padding in ways:
            given: Any = {"left_out": left_out, "loss_fn": loss_fn, "at_padding": at_padding}
            self._again = functools.partial(run_three, models, self._call, dtype, **given, compiled=self._compiled)
            self.run_again()
            without_graph = self._trio.exact.outputs, self._trio.stock.outputs, self._plain.copies
            rows = judge.compare("buffer", *named(self._trio.buffers(), "compiled"), typical=typical)
            for values, words in ((self._trio.outputs(), "compiled"), (without_graph, "compiled, no_grad")):
                rows += judge.compare("output", *named(values, words), module="", typical=typical, by_row=True)
            found.append((rows, self._trio, self._again))
            if all(row.passed for row in rows):
                break
        else:
            rows, self._trio, self._again = found[0]
        return rows

    def gradients(self, judge: Judge) -> list[Row]:
        """Compares those of the last run."""
        values = named(self._trio.gradients(), "compiled")
        return judge.compare("gradient", *values, rows_summed=self._trio.rows, no_more=True)

    def run_again(self) -> None:
        """Forward and backward once more, with other weights."""
        self._tell("patched model under torch.compile, forward and backward")
        self._trio = self._watched(self._again)

    def _watched(self, runs: Callable[[], T]) -> T:
        try:
            with torch._dynamo.config.patch(recompile_limit=_FORMS, accumulated_recompile_limit=_FORMS):
                found = runs()
        except Exception as error:  # whatever a compiler throws
            cause = getattr(error, "inner_exception", error)  # of a backend that failed
            told = f"{type(cause).__name__}: {first_line(cause)}"
            raise CompileFails(f"prove: the patched model fails under torch.compile: {told}") from error
        if not self._compiled.graphs:
            raise CompileFails("prove: torch.compile has compiled nothing of the patched model")
        if self._compiled.others:
            raise DrawsOthers(_DRAWS.format(", ".join(sorted(self._compiled.others))))
        return found
