"""How long the proven kernels take, beside their peers in turns; what was expected is written down first."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from tfm_kernels import _measured, ops
from tfm_kernels.bench import gate, measure, memory, timing
from tfm_kernels.bench.record import Results
from tfm_kernels.bench.subject import Group, groups

from . import limits, machine
from .part import GREEN, RED, UNAVAILABLE, Item, NotYetError, Room
from .subject import GpuSubject

# one sample is about a millisecond, most of it flush and lead
PLAN = timing.Plan(seconds=0.3, least=15, most=100)
PROOFS = ("contract", "repeats", "memory", "sanitizers")
CALLS = 200  # for the host's cost of a call


def items(room: Room, results: Results) -> Iterator[Item]:
    machine_limits = limits.measured(room.results("limits"))
    if machine_limits is None:
        raise NotYetError("the limits are not measured")
    predicted = results.data.setdefault("predicted", {})
    proven = set(room.results("contract").data.get("complete", ()))
    ready = [subject for subject in room.subjects if subject.stem in proven]
    timed: dict[str, tuple[Group, list[GpuSubject]]] = {}  # a group times all backends of its op
    for subject in ready:
        yield subject.item(f"{subject.stem} launch", partial(launch_cost, subject, room.device))
        for group in groups(subject.speed):
            timed.setdefault(group.key, (group, []))[1].append(subject)
            predicted[group.key] = {d: subject.predicted(group, d, machine_limits) for d in group.directions}
    files = {part: room.results(part).data["groups"] for part in PROOFS}
    for group, subjects in sorted(timed.values(), key=lambda found: not found[0].case.headline):
        whys = {subject.backend: refusal(files, group.case.op, subject) for subject in subjects}
        barred = {backend: f"not timed, because {why}" for backend, why in whys.items() if why is not None}
        run = partial(_measure, group, machine_limits, predicted, room.device, barred)
        if len(barred) == len(subjects):
            run = partial(dict, state=UNAVAILABLE, why="; ".join(dict.fromkeys(barred.values())))
        yield Item(group.key, run, group.case.op, subjects[0].stem)
    late = dict.fromkeys(subject.stem for subject in room.subjects if subject.stem not in proven)
    if late:
        raise NotYetError(f"the contract of {', '.join(late)} is not finished")


def refusal(files: Mapping[str, Sequence[Mapping[str, Any]]], op: str, subject: GpuSubject) -> str | None:
    """None where a backend's op is proven on this GPU, else what its speed is not taken for; files: by part, items."""

    def judges(item: Mapping[str, Any]) -> bool:
        return (
            item["op"] in (op, "") and item["stem"] in (subject.stem, "") and item["backend"] in (subject.backend, "")
        )

    for part, items in files.items():
        red = [item for item in items if item["state"] == RED and judges(item)]
        if red:
            return f"{part}: {red[0]['key']} is red"
    if not any(item["state"] == GREEN and item["op"] == op and judges(item) for item in files["contract"]):
        return f"contract: there is no case of {op} on {subject.backend}"
    return None


def _measure(
    group: Group, machine_limits: dict, predicted: dict, device: str, barred: Mapping[str, str]
) -> dict[str, Any]:
    _measured.ignore()  # the choice that ships
    before = machine.clocks()
    found = measure.measure(group, PLAN, machine_limits, DeviceRunner, device, barred)
    torch.cuda.empty_cache()
    for row in found["rows"]:
        row["predicted"] = predicted[group.key][row["direction"]]
    state = {"state": RED, "why": "; ".join(map(": ".join, found["refused"].items()))} if found["refused"] else {}
    return {**found, **state, "clocks": [before, machine.clocks()]}


class DeviceRunner(measure.Runner):
    """An implementation timed on the device: events around it, L2 cold, the host ahead by twice what it needs."""

    _flush: limits.Flush | None = None
    host = 2e-2  # seconds that the GPU is kept busy while a call is queued

    def run(self) -> tuple[float, ...]:
        """Seconds of the forward, or of the backward and of both, each begun with a cold L2."""
        if DeviceRunner._flush is None:
            DeviceRunner._flush = limits.Flush("cuda")
        if not self.train:
            return (self._timed(lambda: self.function(**self.leaves)),)
        forward = self._timed(lambda: self.function(**self.leaves))
        outputs = self.results
        backward = self._timed(lambda: torch.autograd.grad(outputs, list(self.leaves.values()), self.douts))
        return backward, forward + backward

    def _timed(self, call: Callable[[], Any]) -> float:
        def kept() -> None:
            start = time.perf_counter()
            result = call()
            self.results = tuple(result) if isinstance(result, (tuple, list)) else (result,)
            self.host = min(max(2 * (time.perf_counter() - start), self.host / 2, 2e-4), 2e-2)

        assert DeviceRunner._flush is not None
        return limits.timed(kept, DeviceRunner._flush, self.host)

    def peak_memory(self) -> int:
        """The most bytes that were allocated at once in one run, beyond what was before."""
        self.results = ()
        return memory.peak_on_gpus(self.run, [torch.device("cuda")])


def launch_cost(subject: GpuSubject, device: str) -> dict[str, Any]:
    """Seconds of host time of a small call: the first in a process (from Triton's cache on disk), and a warm one."""
    case = min(subject.speed.cases, key=lambda case: subject.speed.bytes_moved(case, 1, "forward"))
    case = subject.speed.proof(case)
    given = gate.on(device, subject.speed.arguments(case, case.dtypes[0], device))
    op, found = getattr(ops, case.op), {}
    with torch.no_grad():
        for backend in (subject.backend, "aten"):
            torch.cuda.synchronize()
            start = time.perf_counter()
            op(**given, backend=backend)
            torch.cuda.synchronize()
            first = time.perf_counter() - start
            for _ in range(
                3
            ):  # the second call of a kind is recorded, and the first that is repeated loads what it needs
                op(**given, backend=backend)
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                op(**given, backend=backend)
            torch.cuda.synchronize()
            found[backend] = {"first": first, "warm": (time.perf_counter() - start) / CALLS}
    return {"case": case.label, "host": found}
