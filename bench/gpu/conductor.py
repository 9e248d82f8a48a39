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

from .part import DEVICE_LOST, RED, Part, Room, work

GRACE = 15.0  # seconds that an item may take beyond its part's deadline before its process is ended
HANGING = 60.0  # seconds from which an item that had to be ended is red; a shorter one runs again next time

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
    for part, end in zip(parts, deadlines(parts, seconds), strict=True):
        began = time.monotonic()
        say(f"-- {part.name}: {part.about} (until {end:.0f} s)")
        _run(part, replace(room, deadline=start + end))
        say(f"-- {part.name}: {time.monotonic() - began:.0f} s")


def _run(part: Part, room: Room) -> None:
    """One part, in as many processes as its items break."""
    while True:
        child = _processes.Process(target=_begin, args=(part, room))
        child.start()
        with suppress(OSError):  # by whoever comes first, the child or we
            os.setpgid(child.pid or 0, child.pid or 0)
        try:
            child.join(max(0.0, room.left()) + GRACE)
        finally:
            late = child.exitcode is None
            with suppress(ProcessLookupError):  # with all that it started: compilers, compute-sanitizer
                os.killpg(child.pid or 0, signal.SIGKILL)
            child.join()
        if child.exitcode == 0 and not late:
            return
        if child.exitcode != DEVICE_LOST:
            _bury(part, room, None if late else child.exitcode)
            if room.results(part.name).has(_itself(part)):
                return
        if late or room.left() <= 0:
            return


def _begin(part: Part, room: Room) -> None:
    with suppress(OSError):
        os.setpgid(0, 0)
    work(part, room)


def _bury(part: Part, room: Room, exitcode: int | None) -> None:
    """Records what a process died of: the item that was running, or the part itself where none was."""
    results = room.results(part.name)
    running = results.data.pop("running", None)
    if exitcode is not None:
        how = f"signal {-exitcode}" if exitcode < 0 else f"exit code {exitcode}"
        item = running or {"key": _itself(part), "op": ""}
        results.add({"key": item["key"], "op": item["op"], "state": RED, "why": f"its process ended by {how}"})
        return
    if running is not None and time.time() - running["since"] > HANGING:
        why = f"did not end within {time.time() - running['since']:.0f} s"
        results.add({"key": running["key"], "op": running["op"], "state": RED, "why": why})
    else:
        results.write()


def _itself(part: Part) -> str:
    return f"the part {part.name} itself"
