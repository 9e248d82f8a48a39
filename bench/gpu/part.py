"""A part of the proof: items that processes share, each of which tells what it is at and what it found."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tfm_kernels import _library
from tfm_kernels.bench.record import Results

from . import keys
from .item import Item
from .subject import GpuSubject

GREEN, RED, UNAVAILABLE = "green", "red", "unavailable"
DEVICE_LOST = 17  # exit code of a process whose CUDA context an item has broken; the rest goes on in a new one


class NotYetError(Exception):
    """Raised by a part's items where the others wait for what is not finished; the words say what."""


@dataclass(frozen=True)
class Room:
    """What the items of a part may know.

    Attributes:
        folder: where the parts' files are.
        now: what the numbers depend on (machine.read()).
        deadline: time.monotonic() from which no item is started.
        subjects: the ops under test.
        device: where tensors are put.
    """

    folder: Path
    now: dict[str, Any]
    deadline: float
    subjects: Sequence[GpuSubject] = ()
    device: str = "cuda"

    def results(self, part: str) -> Results:
        """The file of a part, continued where sources, torch and GPU are the same."""
        return Results(self.folder / f"{part}.json", self.now)

    def finished(self, part: str) -> bool:
        """Whether a part came to its end for every op under test."""
        return {subject.stem for subject in self.subjects} <= set(self.results(part).data.get("complete", ()))

    def built(self) -> Iterator[GpuSubject]:
        """The subjects; raises NotYetError at the end where some need an extension that is still to be built."""
        absent = _library.cuda_extension is None and not self.results("build").has("extensions")
        ready = [subject for subject in self.subjects if not (absent and subject.backend == "cuda")]
        yield from ready
        if len(ready) < len(self.subjects):
            raise NotYetError("the extensions are not built")

    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()


@dataclass(frozen=True)
class Part:
    """A step of the proof.

    Attributes:
        name: of its file, and for --part.
        about: one line for --list.
        seconds: its share of the whole time; what it leaves goes to the parts behind it.
        items: (room, results) -> its items, in order and the same in each process; results is the part's own file, to
            which it may add what is expected of them.
        patience: seconds from which an item hangs: its process is ended, it is red, and the rest goes on in a new one.
        processes: how many processes share its items, where there are so many processors; what is timed has one.
        named: it runs only where --part names it.
    """

    name: str
    about: str
    seconds: float
    items: Callable[[Room, Results], Iterable[Item]]
    patience: float = float("inf")
    processes: int = 1
    named: bool = False


@dataclass(frozen=True)
class Listed:
    """What a process tells first.

    Attributes:
        left: op stem -> how many items of its share the part's file does not hold yet.
        waits: for what the items wait that could not be listed; "" where all are.
        data: of the part's file, beside its items.
    """

    left: Mapping[str, int]
    waits: str
    data: Mapping[str, Any]


@dataclass(frozen=True)
class Begun:
    """The item that a process is at: should it take the process with it, others can tell."""

    name: Mapping[str, str]
    since: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Done:
    """What an item found."""

    record: dict[str, Any]


Message = Listed | Begun | Done


def work(part: Part, room: Room, tell: Callable[[Message], None], index: int = 0, count: int = 1) -> None:
    """Runs what the part's file does not hold yet of a process's share, until that is done or the time is over.

    Args:
        part: whose items.
        room: the part's.
        tell: takes down what is told; what is Listed is in the file when it returns.
        index: of the process.
        count: how many processes share the items.
    """
    keys.settle()
    _library.load_again()  # this process began before the build part ended
    results = room.results(part.name)
    items: list[Item] = []
    waits = ""
    try:
        for item in part.items(room, results):
            items.append(item)
    except NotYetError as reason:
        waits = str(reason)
    left = [item for item in share(items, index, count) if not results.has(item.key)]
    data = {name: value for name, value in results.data.items() if name not in ("groups", "complete")}
    tell(Listed(Counter(item.stem for item in left), waits, _plain(data)))
    for item in left:
        if room.left() <= 0:
            return
        tell(Begun(item.name))
        record = run(item)
        tell(Done(record))
        if record["state"] == RED and device_lost():
            os._exit(DEVICE_LOST)


def share(items: Sequence[Item], index: int, count: int) -> list[Item]:
    """What one of ``count`` processes runs: every count-th item, but the heavy ones are all the first process's."""
    heavy = [item for item in items if item.heavy]
    others = [item for item in items if not item.heavy]
    if not heavy or count == 1:
        return [*heavy, *others][index::count]
    return heavy if index == 0 else others[index - 1 :: count - 1]


def run(item: Item) -> dict[str, Any]:
    """The record of one item: its state, how long it took, what it found or why it is red."""
    start = time.perf_counter()
    try:
        found = _plain(item.run())
    except Exception as error:  # whatever a kernel throws is a finding
        words = str(error).strip() or "no words"
        name = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
        found = {"state": RED, "why": (name + words)[:2000]}
    return {**item.name, "state": GREEN, **found, "seconds": round(time.perf_counter() - start, 3)}


def _plain(found: dict[str, Any]) -> dict[str, Any]:
    """A record as the file holds it: no tensor of a process's own is sent to another."""
    return json.loads(json.dumps(found))


def device_lost() -> bool:
    """Whether a CUDA error has made this process's context useless."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
