"""Leads the parts: when each has to end, a process of its own for each, and what is left when one dies."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from .part import DEVICE_LOST, RED, Item, Part, Room, work

GRACE = 15.0  # seconds that an item may take beyond its part's deadline before its process is ended
HANGING = 60.0  # seconds from which an item that had to be ended is red; a shorter one runs again next time
_LOOK = 0.2  # seconds between two looks at how long an item takes

# Forked, not spawned: torch is imported once. The parent must never touch CUDA, or its children could not.
_processes = multiprocessing.get_context("fork")


def ask(question: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The answer of a function that touches CUDA, from a process of its own."""
    ours, theirs = _processes.Pipe(duplex=False)
    child = _processes.Process(target=lambda: theirs.send(question()))
    child.start()
    theirs.close()
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


def conduct(parts: Sequence[Part], room: Room, seconds: float, say: Callable[[str], None] = print) -> None:
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
        _run(part, replace(room, deadline=start + end))
        say(f"-- {part.name}: {time.monotonic() - began:.0f} s")

    for part, end in zip(parts, deadlines(parts, seconds), strict=True):
        run(part, end)
    for part in parts:  # what ran out of time, or waited for such a part, has what the others left
        if time.monotonic() < start + seconds and not room.finished(part.name):
            run(part, seconds)


def _run(part: Part, room: Room) -> None:
    """One part, in as many processes as its items break."""
    while True:
        room.note(part.name, None)
        child = _processes.Process(target=_begin, args=(part, room))
        child.start()
        with suppress(OSError):  # by whoever comes first, the child or we
            os.setpgid(child.pid or 0, child.pid or 0)
        try:
            _watch(child, part, room)
        finally:
            ended = child.exitcode is not None
            with suppress(ProcessLookupError):  # with all that it started: compilers, compute-sanitizer
                os.killpg(child.pid or 0, signal.SIGKILL)
            child.join()
        if child.exitcode == 0 and ended:
            return
        if child.exitcode != DEVICE_LOST or not ended:
            _bury(part, room, child.exitcode if ended else None)
            if room.results(part.name).has(_itself(part)):
                return
        if room.left() <= 0:
            return


def _watch(child: Any, part: Part, room: Room) -> None:
    """Waits until a part's process ends, hangs, or is late."""
    while room.left() + GRACE > 0:
        child.join(min(_LOOK, room.left() + GRACE))
        if child.exitcode is not None or _age(room.running(part.name)) > part.patience:
            return


def _age(running: dict[str, Any] | None) -> float:
    return time.monotonic() - running["since"] if running else 0.0


def _begin(part: Part, room: Room) -> None:
    with suppress(OSError):
        os.setpgid(0, 0)
    work(part, room)


def _bury(part: Part, room: Room, exitcode: int | None) -> None:
    """Records what a process died of: the item that was running, or the part itself where none was."""
    running = room.running(part.name)
    room.note(part.name, None)
    item = {name: value for name, value in (running or Item(_itself(part), dict).name).items() if name != "since"}
    if exitcode is not None:
        how = f"signal {-exitcode}" if exitcode < 0 else f"exit code {exitcode}"
        room.results(part.name).add({**item, "state": RED, "why": f"its process ended by {how}"})
    elif _age(running) > min(part.patience, HANGING):
        room.results(part.name).add({**item, "state": RED, "why": f"did not end within {_age(running):.0f} s"})


def _itself(part: Part) -> str:
    return f"the part {part.name} itself"
