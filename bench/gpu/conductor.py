"""Leads the parts: when each has to end, the processes that share its items, and what is left when one dies."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from typing import Any

import torch

from .ledger import Ledger
from .part import DEVICE_LOST, RED, Item, Listed, Message, Part, Room, work

GRACE = 15.0  # seconds that an item may take beyond its part's deadline before its process is ended
HANGING = 60.0  # seconds from which an item that had to be ended is red; a shorter one runs again next time
ANSWERS = 180.0  # seconds within which a process that looks for a CUDA device has to answer
_LOOK = 0.2  # seconds between two looks at how long the items take

# Forked, not spawned: torch is imported once. The parent must never touch CUDA, or its children could not.
_processes = multiprocessing.get_context("fork")


def ask(question: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The answer of a function that touches CUDA, from a process of its own; a refusal where none comes in time."""
    ours, theirs = _processes.Pipe(duplex=False)
    child = _processes.Process(target=lambda: theirs.send(question()))
    child.start()
    theirs.close()
    if not ours.poll(ANSWERS):
        child.kill()
        child.join(GRACE)  # one that hangs in the driver does not end
        return {"refusal": f"no answer came for {ANSWERS:g} seconds from the process that looked for a CUDA device"}
    try:
        answer = ours.recv()
    except EOFError:
        answer = {"refusal": "the process that looked for a CUDA device died"}
    child.join()
    return answer


def deadlines(parts: Sequence[Part], seconds: float) -> list[float]:
    """When each part has to end, in seconds from the start; what a part leaves goes to those behind it."""
    whole = sum(part.seconds for part in parts)
    ends, sofar = [], 0.0
    for part in parts:
        sofar += part.seconds
        ends.append(seconds * sofar / whole)
    return ends


def _say(line: str) -> None:
    print(line, flush=True)


def conduct(parts: Sequence[Part], room: Room, seconds: float, say: Callable[[str], None] = _say) -> None:
    """Runs the parts in order; what they find is in their files.

    Args:
        parts: what to run.
        room: their room; its deadline is set here.
        seconds: for all of them together.
        say: prints a line.
    """
    start = time.monotonic()

    def run(part: Part, end: float) -> None:
        began = time.monotonic()
        say(f"-- {part.name}: {part.about} (until {end:.0f} s)")
        _run(part, replace(room, deadline=start + end), say)
        say(f"-- {part.name}: {time.monotonic() - began:.0f} s")

    for part, end in zip(parts, deadlines(parts, seconds), strict=True):
        run(part, end)
    for part in parts:  # what ran out of time, or waited for such a part, has what the others left
        if time.monotonic() < start + seconds and not room.finished(part.name):
            run(part, seconds)


@dataclass(frozen=True)
class _Child:
    """A process at its share of a part's items; what it tells comes through the pipe."""

    index: int
    process: Any
    pipe: Any

    def told(self) -> Iterator[Message]:
        """What it has told since the last look."""
        try:
            while self.pipe.poll():
                yield self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(_LOOK)  # its end is closed: it is ending

    def end(self) -> None:
        """Ends it with all that it started: compilers, compute-sanitizer."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()


def _run(part: Part, room: Room, say: Callable[[str], None]) -> None:
    """One part, in several processes at once and as many after them as its items break."""
    count = min(part.processes, len(os.sched_getaffinity(0)))
    ledger = Ledger(part.name, room.results(part.name), [subject.stem for subject in room.subjects], count, say)
    children: list[_Child] = []

    def start(index: int) -> None:
        children.append(_start(part, room, index, count, [child.pipe for child in children]))

    try:
        for index in range(count):
            start(index)
        while children:
            wait([child.pipe for child in children], max(0.0, min(_LOOK, room.left() + GRACE)))
            for child in children:
                _hear(child, ledger)
            ledger.write()
            for child in [child for child in children if _over(child, part, room, ledger)]:
                goes_on = _close(child, part, ledger)
                children.remove(child)
                if goes_on and room.left() > 0:
                    start(child.index)
    finally:
        for child in children:
            child.end()


def _start(part: Part, room: Room, index: int, count: int, others: Sequence[Any]) -> _Child:
    ours, theirs = _processes.Pipe()
    process = _processes.Process(target=_begin, args=(part, room, index, count, theirs, [ours, *others]))
    process.start()
    theirs.close()
    with suppress(OSError):  # by whoever comes first, the child or we
        os.setpgid(process.pid or 0, process.pid or 0)
    return _Child(index, process, ours)


def _begin(part: Part, room: Room, index: int, count: int, pipe: Any, others: Sequence[Any]) -> None:
    with suppress(OSError):
        os.setpgid(0, 0)
    for other in others:  # the conductor's: were it killed, those who wait for it would not see that
        other.close()
    if count > 1:
        torch.set_num_threads(1)  # the processors are shared

    def tell(message: Message) -> None:
        pipe.send(message)
        if isinstance(message, Listed):
            pipe.recv()

    work(part, room, tell, index, count)


def _hear(child: _Child, ledger: Ledger) -> None:
    """Takes down what a process has told; what it expects of its items is in the file before it begins them."""
    for message in child.told():
        ledger.take(child.index, message)
        if isinstance(message, Listed):
            ledger.write()
            with suppress(OSError):  # it may have been ended
                child.pipe.send("written")


def _over(child: _Child, part: Part, room: Room, ledger: Ledger) -> bool:
    """Whether a process has ended, hangs, or is late."""
    late = room.left() + GRACE <= 0
    return late or child.process.exitcode is not None or ledger.age(child.index) > part.patience


def _close(child: _Child, part: Part, ledger: Ledger) -> bool:
    """Ends a process and records what it died of; whether another one is to go on with its share."""
    ended = child.process.exitcode is not None
    child.end()
    _hear(child, ledger)  # all that it has told is there now
    child.pipe.close()
    code = child.process.exitcode if ended else None
    running = ledger.running[child.index] is not None
    if running or code not in (0, DEVICE_LOST):
        _bury(child.index, code, part, ledger)
    ledger.write()
    return running or code in (None, DEVICE_LOST)


def _bury(index: int, code: int | None, part: Part, ledger: Ledger) -> None:
    """Records what a process died of: the item that was running, or the part itself where none was."""
    running, age = ledger.running[index], ledger.age(index)
    ledger.running[index] = None
    name = running.name if running else Item(f"the part {part.name} itself", dict).name
    if code is not None:
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        ledger.add({**name, "state": RED, "why": f"its process ended by {how}"})
    elif age > (HANGING if math.isinf(part.patience) else part.patience):
        ledger.add({**name, "state": RED, "why": f"did not end within {age:.0f} s"})
