"""Interleaved timing: a round runs every rival once, in an order that turns, so that a slow moment hits all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

LEAST = 300e-6  # seconds that one sample of a short call takes at least: the call is repeated within it

Rounds = Sequence[Mapping[str, float]]  # one mapping a round: name -> seconds


def race(
    runs: Mapping[str, Callable[[], object]],
    seconds: float,
    most: int,
    tick: Callable[[float], None] = lambda done: None,
) -> list[dict[str, float]]:
    """Times all in turns until ``seconds`` are spent, at least three rounds and at most ``most``, after one warm-up.

    Args:
        runs: name -> one run.
        seconds: how long to go on.
        most: rounds, 3 or more.
        tick: told how much of the work is done, from 0 to 1, after each round.

    Returns:
        One dict a round: name -> seconds.
    """
    order = list(runs)
    for run in runs.values():
        run()
    rounds: list[dict[str, float]] = []
    begin = time.perf_counter()
    while len(rounds) < 3 or (len(rounds) < most and time.perf_counter() - begin < seconds):
        rounds.append({name: _seconds(runs[name]) for name in order})
        order.append(order.pop(0))
        part = (time.perf_counter() - begin) / seconds if seconds > 0.0 else 1.0
        tick(min(1.0, max(len(rounds) / most, part)))
    return rounds


def race_calls(
    calls: Mapping[str, Callable[[], object]],
    seconds: float,
    most: int,
    least: float = LEAST,
    wait: Callable[[], object] = lambda: None,
    tick: Callable[[float], None] = lambda done: None,
) -> list[dict[str, float]]:
    """``race`` of calls that may be short or leave their work to a GPU.

    Args:
        calls: name -> one call.
        seconds: how long to go on.
        most: rounds, 3 or more.
        least: seconds that a sample takes at least; shorter calls, the same number of each, are repeated within it.
        wait: returns when the device has done all that it was given; a sample ends with it.
        tick: as ``race`` has it.

    Returns:
        One dict a round: name -> seconds of one call.
    """
    once = {name: _repeated(call, 1, wait) for name, call in calls.items()}
    for run in once.values():
        run()
    times = max(1, int(least / min(_seconds(run) for run in once.values() for _ in range(2))))
    rounds = race({name: _repeated(call, times, wait) for name, call in calls.items()}, seconds, most, tick)
    return [{name: taken / times for name, taken in each.items()} for each in rounds]


def median(rounds: Rounds, name: str) -> float:
    """The median of its seconds."""
    return statistics.median(taken[name] for taken in rounds)


def ratios(rounds: Rounds, name: str, rival: str) -> list[float]:
    """Its seconds over the rival's, round by round: a slow moment of the machine cancels."""
    return [taken[name] / taken[rival] for taken in rounds]


def _repeated(call: Callable[[], object], times: int, wait: Callable[[], object]) -> Callable[[], None]:
    def runs() -> None:
        for _ in range(times):
            call()
        wait()

    return runs


def _seconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin
