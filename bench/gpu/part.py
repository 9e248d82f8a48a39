"""A part of the proof: items that are run one after another, each recorded in the part's file as soon as it is done."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tfm_kernels import _library
from tfm_kernels.bench.progress import Progress
from tfm_kernels.bench.record import Results

from .item import Item
from .subject import GpuSubject

GREEN, RED, UNAVAILABLE = "green", "red", "unavailable"
DEVICE_LOST = 17  # exit code of a process whose CUDA context an item has broken; the rest goes on in a new one
_SAY_EVERY = 10.0  # seconds


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

    def running(self, part: str) -> dict[str, Any] | None:
        """The names of the item that a part's process is at, and "since", time.monotonic(); None between items."""
        with suppress(OSError, ValueError):
            return json.loads(self._note(part).read_text())
        return None

    def note(self, part: str, item: Item | None) -> None:
        """Writes down what a part's process is at: should it take the process with it, others can tell."""
        if item is None:
            self._note(part).unlink(missing_ok=True)
            return
        partial = self._note(part).with_suffix(".partial-note")
        partial.write_text(json.dumps({**item.name, "since": time.monotonic()}))
        partial.replace(self._note(part))

    def _note(self, part: str) -> Path:
        return self.folder / f"{part}.running"

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
        items: (room, results) -> its items, in order; results is the part's own file.
        patience: seconds from which an item hangs: its process is ended, it is red, and the rest goes on in a new one.
        named: it runs only where --part names it.
    """

    name: str
    about: str
    seconds: float
    items: Callable[[Room, Results], Iterable[Item]]
    patience: float = float("inf")
    named: bool = False


def work(part: Part, room: Room) -> None:
    """Runs what the part's file does not hold yet, until it is complete or the time is over."""
    _library.load_again()  # this process began before the build part ended
    results = room.results(part.name)
    pending, waits = [], False
    try:
        for item in part.items(room, results):
            if not results.has(item.key):
                pending.append(item)
    except NotYetError as reason:
        print(f"{part.name}: {reason}", flush=True)
        waits = True
    left = Counter(item.stem for item in pending)

    def settle() -> None:
        if not waits and not left[""]:
            done = {subject.stem for subject in room.subjects if not left[subject.stem]}
            results.data["complete"] = sorted(done.union(results.data.get("complete", ())))

    settle()
    progress, said = Progress(pending, "item"), time.monotonic()
    for item in progress:
        if room.left() <= 0:
            results.write()
            return
        room.note(part.name, item)
        record = run(item)
        room.note(part.name, None)
        left[item.stem] -= not record.get("unfinished")
        settle()
        results.add(record)
        if record["state"] == RED or time.monotonic() - said > _SAY_EVERY:
            said = time.monotonic()
            progress.say(f"{part.name}: {item.key}: {record['state']} {record.get('why', '')}".rstrip())
        if record["state"] == RED and device_lost():
            os._exit(DEVICE_LOST)
    results.write()


def run(item: Item) -> dict[str, Any]:
    """The record of one item: its state, how long it took, what it found or why it is red."""
    start = time.perf_counter()
    try:
        found = item.run()
    except Exception as error:  # whatever a kernel throws is a finding
        words = str(error).strip() or "no words"
        name = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
        found = {"state": RED, "why": (name + words)[:2000]}
    return {**item.name, "state": GREEN, **found, "seconds": round(time.perf_counter() - start, 3)}


def device_lost() -> bool:
    """Whether a CUDA error has made this process's context useless."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
