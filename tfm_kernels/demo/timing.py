"""Interleaved timing: each round runs every model once, in alternating order, and medians are compared."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """Original against patched on one batch.

    Attributes:
        label: "float32, padded".
        stock: median seconds of the original.
        patched: median seconds of the patched model.
        speedup: median of the rounds' ratios stock / patched.
        rounds: how many.
    """

    label: str
    stock: float
    patched: float
    speedup: float
    rounds: int


def race(
    label: str,
    stock: Callable[[], object],
    patched: Callable[[], object],
    seconds: float,
    tick: Callable[[float], None],
) -> Timing:
    """Times both in turns until ``seconds`` are spent, at least three rounds and at most thirty, after one warm-up.

    Args:
        label: of the result.
        stock: one run of the original.
        patched: one run of the patched model.
        seconds: how long to go on.
        tick: told how much of the work is done, from 0 to 1, after each round.
    """
    stock(), patched()
    spent: list[tuple[float, float]] = []
    begin = time.perf_counter()
    while len(spent) < 3 or (len(spent) < 30 and time.perf_counter() - begin < seconds):
        order = (stock, patched) if len(spent) % 2 == 0 else (patched, stock)
        took = {run: _seconds(run) for run in order}
        spent.append((took[stock], took[patched]))
        part = (time.perf_counter() - begin) / seconds if seconds > 0.0 else 1.0
        tick(min(1.0, max(len(spent) / 30, part)))
    ratios = [before / after for before, after in spent]
    medians = [statistics.median(column) for column in zip(*spent, strict=True)]
    return Timing(label, medians[0], medians[1], statistics.median(ratios), len(spent))


def _seconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin
