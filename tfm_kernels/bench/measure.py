"""One group from start to end: who competes, are they right, how long do they take, how much memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from .. import _backend, ops
from ..testing.contract import CONSTANTS
from . import gate, limits, memory, timing
from .subject import Group, drawer

EAGER, COMPILED, AUTO = "torch", "torch.compile", "auto"


class Runner:
    """One implementation on one group's tensors: ``run()`` is the timed thing, ``results`` what it computed last."""

    def __init__(self, group: Group, function: Callable[..., Any], leaves: dict[str, Tensor]) -> None:
        self.train, self.dtype = group.kind == "train", group.dtype
        self.function = function
        self.leaves = {name: t.detach().requires_grad_(self.train) for name, t in leaves.items()}
        self.douts: list[Tensor] = []
        self.results: tuple[Tensor, ...] = ()

    def run(self) -> tuple[float, ...]:
        """Seconds of the forward, or of the backward and of both."""
        clock = time.perf_counter
        if not self.train:
            start = clock()
            self.results = self.function(**self.leaves)
            return (clock() - start,)
        start = clock()
        outputs = self.function(**self.leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        middle = clock()
        self.results = torch.autograd.grad(outputs, list(self.leaves.values()), self.douts)
        end = clock()
        return end - middle, end - start

    def warm_up(self) -> tuple[Tensor, ...]:
        """First runs (torch.compile compiles in them); the outputs and, in training, the gradients."""
        outputs = gate.flat(self.function(**self.leaves))
        if self.train:
            draw = drawer(1, self.dtype, outputs[0].device)
            self.douts = [draw(*t.shape).to(t.dtype) for t in outputs]
        self.run()
        self.run()
        return tuple(t.detach() for t in outputs) + (gate.flat(self.results) if self.train else ())

    def peak_memory(self) -> int:
        """The most bytes of tensors that were alive at once in one run, beyond the arguments."""
        self.results = ()  # or their release would be counted
        return memory.peak(self.run)


def measure(
    group: Group,
    plan: timing.Plan,
    machine: dict,
    make: type[Runner] = Runner,
    device: str = "cpu",
    barred: Mapping[str, str] = MappingProxyType({}),
) -> dict:
    """The record of one group, ready for JSON.

    Args:
        group: what to measure.
        plan: how long to sample.
        machine: what limits.measure() found.
        make: how an implementation is run and timed.
        device: where the tensors are.
        barred: backend -> why it must not be timed.

    Returns:
        A dict: "key", the case and its physics, "chosen" by automatic choice, one row a direction and implementation,
        and the reasons why an implementation is "refused" (it is wrong) or "unavailable" (it cannot run the call).
    """
    case, subject, itemsize = group.case, group.subject, getattr(torch, group.dtype).itemsize
    record: dict[str, Any] = {
        "key": group.key, "op": case.op, "label": case.label, "case": case.data(), "dtype": group.dtype,
        "kind": group.kind, "headline": case.headline, "chosen": None, "memory": {}, "rows": [],
        "refused": {}, "unavailable": {},
    }  # fmt: skip
    with _grad(group.kind == "train"):
        runners = _ready(group, record, make, device, barred)
        samples = timing.interleave({name: runner.run for name, runner in runners.items()}, plan)
        for name, runner in runners.items():
            record["memory"][name] = runner.peak_memory()
    for place, direction in enumerate(group.directions):
        flops, moved = subject.flops(case, direction), subject.bytes_moved(case, itemsize, direction)
        floor = limits.least_time(machine, group.dtype, flops, moved)
        baseline = [sample[place] for sample in samples[EAGER]]
        for name, taken in samples.items():
            seconds = [sample[place] for sample in taken]
            record["rows"].append(
                {
                    "direction": direction, "implementation": name, **asdict(timing.spread(seconds)),
                    "ratio": timing.paired_ratio(seconds, baseline), "flops": flops, "bytes": moved,
                    "limit": floor, "bound": limits.bound_by(machine, group.dtype, flops, moved),
                }
            )  # fmt: skip
    return record


def samples(group: Group, plan: timing.Plan) -> dict[str, list[tuple[float, ...]]]:
    """The interleaved samples alone, by implementation; raises AssertionError where one is refused."""
    record: dict[str, Any] = {"chosen": None, "refused": {}, "unavailable": {}}
    with _grad(group.kind == "train"):
        runners = _ready(group, record)
        assert not record["refused"], record["refused"]
        return timing.interleave({name: runner.run for name, runner in runners.items()}, plan)


def _ready(
    group: Group,
    record: dict,
    make: type[Runner] = Runner,
    device: str = "cpu",
    barred: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Runner]:
    """The implementations that may be timed, warm; fills the record's "chosen", "refused" and "unavailable"."""
    case, subject = group.case, group.subject
    torch.manual_seed(0)
    arguments = gate.on(device, subject.arguments(case, group.dtype, device))
    function, leaves = subject.eager(case, arguments)
    runners = {EAGER: make(group, function, leaves)}
    own = truth = runners[EAGER].warm_up()
    if group.dtype != "float32":  # PyTorch's own sums in 16 bits are no measure: 5 % off for dweight over 4096 rows
        wide = {n: a.float() if isinstance(a, Tensor) and a.is_floating_point() else a for n, a in arguments.items()}
        truth = Runner(group, *subject.eager(case, wide)).warm_up()
    rivals = dict(subject.rivals(function))
    if case.compiled:
        torch.compiler.reset()
        rivals[COMPILED] = torch.compile(function, dynamic=False)
    for name, rival in rivals.items():
        competitor = make(group, rival, leaves)
        try:
            competitor.warm_up()
            runners[name] = competitor
        except Exception as error:  # whatever a compiler or PyTorch throws, the others are still worth timing
            record["unavailable"][name] = _words(error)
    for name, backend in _candidates(group, arguments, record, barred):
        runner = _ours(group, arguments, backend if name != AUTO else None, make)
        try:
            wrong = gate.refusal(group, backend, device)
            if wrong is None:
                wrong = gate.disagreement(group, runner.warm_up(), own if backend == "aten" else truth)
        except Exception as error:  # a kernel that fails to launch says nothing of the others
            wrong = _words(error)
        if wrong is None:
            runners[name] = runner
        else:
            record["refused"][name] = wrong
    return runners


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no words'}"


def _candidates(group: Group, arguments: dict, record: dict, barred: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Automatic choice, then each backend that it did not take; the one that it took would be timed twice.

    The reference is not timed: float64 at full size takes what all the others have.
    """
    op = _backend.OPS[group.case.op]
    leaves = _leaves(group, arguments, group.kind == "train")
    call = op.describe(**{**arguments, **leaves})
    chosen = record["chosen"] = _backend.select(op, call, None)
    for name, backend in {AUTO: chosen, **{name: name for name in op.support if name != chosen}}.items():
        reason = barred.get(backend) or _backend.why_not(op, call, backend)
        if backend == "reference":
            reason = "the reference is not timed"
        if reason is None:
            yield name, backend
        elif name != "reference":
            record["unavailable"][name] = reason


def _ours(group: Group, arguments: dict, backend: str | None, make: type[Runner]) -> Runner:
    op = getattr(ops, group.case.op)
    leaves = _leaves(group, arguments, False)
    rest = {name: value for name, value in arguments.items() if name not in leaves}
    if backend is not None:
        rest["backend"] = backend
    return make(group, lambda **tensors: op(**tensors, **rest), leaves)


def _leaves(group: Group, arguments: dict, train: bool) -> dict[str, Tensor]:
    """The floating tensors among the arguments: those that a gradient may be asked for."""
    constants = CONSTANTS.get(group.case.op, ())
    return {
        name: value.detach().requires_grad_(train)
        for name, value in arguments.items()
        if isinstance(value, Tensor) and value.is_floating_point() and name not in constants
    }


@contextmanager
def _grad(train: bool) -> Iterator[None]:
    with torch.set_grad_enabled(train):
        yield
