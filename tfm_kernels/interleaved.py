"""Interleaved timing: a round runs every rival once, in an order that turns, so that a slow moment hits all alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping


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


def _seconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin
