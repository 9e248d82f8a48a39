"""A part of the proof: items that are run one after another, each recorded in the part's file as soon as it is done."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.progress import Progress
from bench.record import Results
from tfm_kernels import _library

from .subject import GpuSubject

GREEN, RED, UNAVAILABLE = "green", "red", "unavailable"
DEVICE_LOST = 17  # exit code of a process whose CUDA context an item has broken; the rest goes on in a new one
_SAY_EVERY = 10.0  # seconds


class NotYetError(Exception):
    """Raised by a part's items: what it builds on is not finished; the words say what."""


@dataclass(frozen=True)
class Item:
    """One thing to find out.

    Attributes:
        key: its name, unique in the part; a resumed run skips the keys that the file holds.
        run: returns what to record of it, with "state" UNAVAILABLE where it cannot be found out here. What it raises
            makes it red.
        op: the public function that it judges, "" for none.
    """

    key: str
    run: Callable[[], dict[str, Any]]
    op: str = ""


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

    def built(self) -> Sequence[GpuSubject]:
        """The subjects; raises NotYetError where the extension that one of them needs is still to be built."""
        waits = any(subject.backend == "cuda" for subject in self.subjects) and _library.cuda_extension is None
        if waits and not self.results("build").has("extensions"):
            raise NotYetError("the extensions are not built")
        return self.subjects

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
    """

    name: str
    about: str
    seconds: float
    items: Callable[[Room, Results], Iterable[Item]]


def work(part: Part, room: Room) -> None:
    """Runs what the part's file does not hold yet, until it is complete or the time is over.

    The file names the item that is running: should it take the process with it, whoever started the process can tell.
    """
    _library.load_again()  # this process began before the build part ended
    results = room.results(part.name)
    try:
        pending = [item for item in part.items(room, results) if not results.has(item.key)]
    except NotYetError as reason:
        print(f"{part.name}: {reason}", flush=True)
        return
    progress, said = Progress(pending, "item"), time.monotonic()
    for item in progress:
        if room.left() <= 0:
            results.write()
            return
        results.data["running"] = {"key": item.key, "op": item.op, "since": time.time()}
        results.write()
        record = run(item)
        del results.data["running"]
        results.add(record)
        if record["state"] == RED or time.monotonic() - said > _SAY_EVERY:
            said = time.monotonic()
            progress.say(f"{part.name}: {item.key}: {record['state']} {record.get('why', '')}".rstrip())
        if record["state"] == RED and device_lost():
            os._exit(DEVICE_LOST)
    if any(group.get("unfinished") for group in results.data["groups"]):
        results.write()
        return
    finished = {subject.stem for subject in room.subjects}
    results.data["complete"] = sorted(finished.union(results.data.get("complete", ())))
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
    return {
        "key": item.key,
        "op": item.op,
        "state": GREEN,
        **found,
        "seconds": round(time.perf_counter() - start, 3),
    }


def device_lost() -> bool:
    """Whether a CUDA error has made this process's context useless."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
