"""A user's model beside its patched self: proven first, then timed in turns with the original."""

from __future__ import annotations

import functools
import json
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .. import _measured, interleaved, patching
from .._version import __version__
from ..patching.copying import copied, copied_apart
from ..proof import prove_patched
from ..proof.compiled import Compiled, CompileFails, is_compiled, plain
from ..proof.modules import replaced
from ..proof.report import ProofReport
from ..proof.runs import Call, device_of, named_tensors
from ..proof.side_by_side import first_line
from . import memory, record

RUNNERS = STOCK, PATCHED, COMPILED, BOTH = "stock", "patched", "torch.compile", "patched, torch.compile"
ROUNDS = 1000

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Runner:
    """One way of running the model.

    Attributes:
        name: "stock", "patched", "torch.compile" (of the original) or "patched, torch.compile".
        seconds: the median of one call.
        faster: the median of the rounds' ratios stock / this one: how many times faster it is.
        least: the smallest of these ratios.
        largest: the largest.
        memory: the most bytes of tensors alive at once in one call, beyond those before it (weights, inputs); None on a
            device where it cannot be told.
    """

    name: str
    seconds: float
    faster: float
    least: float
    largest: float
    memory: int | None


@dataclass
class SpeedReport:
    """What compare() found.

    Attributes:
        model: class name of the model.
        training: whether a call is a training step, forward and backward, or inference without a graph.
        patched: what was replaced, in one line.
        proof: prove()'s report; where it failed nothing was timed.
        environment: machine and versions.
        runners: the original, the patched model and, where asked for, both compiled.
        rounds: name -> seconds of one call, a mapping a round.
        problems: name -> why it was not timed.
    """

    model: str
    training: bool
    patched: str
    proof: ProofReport
    environment: dict[str, Any]
    runners: list[Runner] = field(default_factory=list)
    rounds: list[dict[str, float]] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)

    def table(self) -> str:
        """A line for each runner, and what it was: model, machine, proof."""
        e = self.environment
        what = "training step (forward and backward)" if self.training else "inference (no_grad)"
        wide = max(14, *(len(runner.name) + 2 for runner in self.runners))
        where = e.get("gpu") or f"{e['cpu']}, {e['threads']} thread{'s' * (e['threads'] != 1)}"
        lines = [
            f"{self.model}, {what} in {self.proof.dtype} on {where}, torch {e['torch']}",
            f"patched: {self.patched}",
            str(self.proof),
            *(f"note: {note}" for note in self.proof.notes),
            "",
            f"{'runner':{wide}}{'median ms':>12}{'times faster':>14}{'least':>8}{'largest':>9}{'peak MiB':>11}",
        ]
        for runner in self.runners:
            held = "" if runner.memory is None else f"{runner.memory / 2**20:.1f}"
            ratios = f"{runner.faster:>14.2f}{runner.least:>8.2f}{runner.largest:>9.2f}"
            lines.append(f"{runner.name:{wide}}{runner.seconds * 1e3:>12.3f}{ratios}{held:>11}".rstrip())
        lines += [f"{name}: not timed ({why})" for name, why in self.problems.items()]
        lines.append(f"{len(self.rounds)} rounds in turns; times faster: stock / runner of each round, their median")
        lines.append(
            "peak: the most tensors alive at once in a call, beyond those before it, such as weights and inputs"
        )
        return "\n".join(lines)

    def to_json(self) -> str:
        """The whole report."""
        told = {name: getattr(self, name) for name in ("model", "training", "patched", "environment", "problems")}
        runners = [asdict(runner) for runner in self.runners]
        told |= {"runners": runners, "rounds": self.rounds, "proof": json.loads(self.proof.to_json())}
        return json.dumps(told, indent=1)


def compare(
    model: nn.Module,
    inputs: Any,
    *,
    loss_fn: Callable[[Any], Tensor] | None = None,
    dtype: torch.dtype | None = None,
    train: bool = False,
    freeze: bool = False,
    compiled: bool = False,
    seconds: float = 10.0,
    progress: Progress = lambda stage: None,
) -> SpeedReport:
    """Proves the patched model, then times it in turns with the original.

    The proof leaves memory to the process, so the original's large results cost fewer page faults than they do where
    nothing ran before: the comparison is not in the patched model's favour.

    Args:
        model: unpatched, it is compared with what ``patch(model)`` makes of it; patched, with what it was. It is
            copied, never changed; the copies run where its weights are.
        inputs: what to call it with: a tensor, a tuple of arguments, or a dict of arguments by name.
        loss_fn: maps the model's output to the scalar that a step differentiates; None gives every floating output that
            has a graph the same random gradient each time.
        dtype: run all in it; None is the model's own.
        train: a call is a training step, forward and backward without an optimizer; else inference under no_grad.
        freeze: ``patch(model, freeze=True)``, for inference only.
        compiled: time the original and the patched model under torch.compile, too, and prove that one as well
            (``prove``'s ``compile``). A model that comes compiled is.
        seconds: how long to time, at least three rounds and at most a thousand; short calls are repeated in a sample.
        progress: told of each stage.

    Raises:
        ValueError: nothing was replaced, an option does not fit, or no output can be compared or differentiated.
        RuntimeError: the patched model cannot run the call.

    Cost: ``prove`` with its copies of the model, then ``seconds`` and seven calls of each runner.
    """
    compiled = compiled or is_compiled(model)
    model = plain(model)
    fused = copied_apart(model).train(train)
    if not patching.settings(fused):
        patching.patch(fused, freeze=freeze)
    elif freeze:
        raise ValueError("the model is patched already, so freeze=True is for its own patch() to say")
    stock = copied(model).train(train)
    patching.unpatch(stock)
    names = replaced(stock, fused)
    if not names:
        raise ValueError(f"patch() replaces no module of {type(model).__name__}, so there is nothing to compare")
    problems: dict[str, str] = {}
    proves: Any = functools.partial(prove_patched, fused, inputs, loss_fn=loss_fn, dtype=dtype, progress=progress)
    try:
        proof = proves(compile=compiled)
    except CompileFails as error:
        problems[BOTH] = first_line(error)
        proof = proves(compile=False)
    call = Call.of(inputs)
    devices = _gpus(stock, call)
    report = SpeedReport(
        type(model).__name__, train, _summary(stock, names), proof, _environment(device_of(stock, call), devices)
    )
    if not proof.passed:
        return report
    report.problems |= problems
    models: dict[str, nn.Module] = {STOCK: stock, PATCHED: fused}
    if compiled:
        both = {COMPILED: stock, BOTH: fused}
        models |= {name: each for name, each in both.items() if name not in problems}
    with torch.set_grad_enabled(train), torch.random.fork_rng(devices):
        calls = _calls(models, call, dtype, loss_fn, train, report.problems, progress)
        _time(report, calls, devices, seconds, progress)
    return report


def _summary(stock: nn.Module, names: Sequence[str]) -> str:
    """Such as "4 of 9 modules: 2 Linear, 2 LayerNorm"."""
    kinds = Counter(type(stock.get_submodule(name)).__name__ for name in names)
    listed = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    return f"{len(names)} of {len(list(stock.modules()))} modules: {listed}"


def _environment(device: torch.device, gpus: Sequence[torch.device]) -> dict[str, Any]:
    found = {"device": str(device), **record.machine(), "tfm_kernels": __version__}
    if gpus:
        found |= {"gpu": ", ".join(map(torch.cuda.get_device_name, gpus)), "cuda": torch.version.cuda}
    if "transformers" in sys.modules:
        found["transformers"] = sys.modules["transformers"].__version__
    return {**found, "tuned": len(_measured.choices(device.type)), "date": record.today()}


def _gpus(model: nn.Module, call: Call) -> list[torch.device]:
    """The GPUs that the model or its inputs are on."""
    tensors = [*model.parameters(), *model.buffers(), *pytree.tree_leaves((call.args, call.kwargs))]
    return list(dict.fromkeys(t.device for t in tensors if isinstance(t, Tensor) and t.is_cuda))


def _calls(
    models: Mapping[str, nn.Module],
    call: Call,
    dtype: torch.dtype | None,
    loss_fn: Callable[[Any], Tensor] | None,
    train: bool,
    problems: dict[str, str],
    progress: Progress,
) -> dict[str, Callable[[], object]]:
    """Name -> one call, run twice; of the compiled models, which compile in them, only where that works."""
    calls: dict[str, Callable[[], object]] = {}
    for name, each in models.items():
        progress(f"first calls, {name}")
        each = each if dtype is None else each.to(dtype)
        own = call.to(dtype)
        called = Compiled(each) if name in (COMPILED, BOTH) else None
        run: Callable[[], object] = Step(each, own, loss_fn, called) if train else Inference(each, own, called)
        try:
            run()
            run()
            if called is not None and not called.graphs:
                raise CompileFails("it has compiled nothing")
        except Exception as error:  # whatever a compiler throws, the others are still worth timing
            if name not in (COMPILED, BOTH):
                raise
            problems[name] = f"{type(error).__name__}: {first_line(error)}"
        else:
            calls[name] = run
    return calls


@dataclass(frozen=True)
class Inference:
    """One call of a model; what it returns is freed."""

    model: nn.Module
    call: Call
    compiled: Compiled | None = None

    def __call__(self) -> None:
        """The call."""
        called = self.compiled or self.model
        called(*self.call.args, **self.call.kwargs)


class Step:
    """A training step of a model without its optimizer: forward, backward, gradients dropped."""

    def __init__(
        self,
        model: nn.Module,
        call: Call,
        loss_fn: Callable[[Any], Tensor] | None,
        compiled: Compiled | None = None,
    ) -> None:
        self.model, self.call, self.loss_fn, self.called = model, call, loss_fn, compiled or model
        self.leaves = [*model.parameters(), *call.tensors().values()]
        self.weights: list[Tensor] | None = None

    def __call__(self) -> None:
        """The step."""
        result = self.called(*self.call.args, **self.call.kwargs)
        outputs = [result] if self.loss_fn is None else [self.loss_fn(result)]
        ends = [end for end in named_tensors(outputs).values() if end.requires_grad]
        if not ends:
            raise ValueError(f"{type(self.model).__name__} returns nothing that a gradient can flow from")
        if self.weights is None:
            self.weights = [torch.ones_like(e) if self.loss_fn is not None else torch.randn_like(e) for e in ends]
        torch.autograd.backward(ends, self.weights)
        for leaf in self.leaves:
            leaf.grad = None


def _time(
    report: SpeedReport,
    calls: Mapping[str, Callable[[], object]],
    gpus: Sequence[torch.device],
    seconds: float,
    progress: Progress,
) -> None:
    """Fills in the rounds and the runners."""

    def wait() -> None:
        for gpu in gpus:
            torch.cuda.synchronize(gpu)

    progress("timing")
    rounds = interleaved.race_calls(
        calls, seconds, ROUNDS, wait=wait, tick=lambda part: progress(f"timing, {part:.0%} done")
    )
    progress("memory")
    for name, call in calls.items():
        faster = interleaved.ratios(rounds, STOCK, name)
        held: int | None = None
        if gpus or report.environment["device"] == "cpu":
            held = memory.peak_on_gpus(call, gpus) if gpus else memory.peak(call)
        report.runners.append(
            Runner(name, interleaved.median(rounds, name), statistics.median(faster), min(faster), max(faster), held)
        )
    report.rounds = rounds
