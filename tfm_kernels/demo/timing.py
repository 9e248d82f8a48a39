"""Original against patched, timed in turns; medians are compared."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from .. import interleaved


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
    """Times both in turns until ``seconds`` are spent, at least three rounds and at most nine, after one warm-up.

    Args:
        label: of the result.
        stock: one run of the original.
        patched: one run of the patched model.
        seconds: how long to go on.
        tick: told how much of the work is done, from 0 to 1, after each round.
    """
    rounds = interleaved.race({"stock": stock, "patched": patched}, seconds, 9, tick)
    stock_seconds, patched_seconds = (interleaved.median(rounds, name) for name in ("stock", "patched"))
    speedup = statistics.median(interleaved.ratios(rounds, "stock", "patched"))
    return Timing(label, stock_seconds, patched_seconds, speedup, len(rounds))
