"""Timing of several implementations of one thing, in turns, and what the samples say."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Sampler = Callable[[], tuple[float, ...]]  # one run; the seconds of each direction it has


@dataclass(frozen=True)
class Plan:
    """How long to sample one group: rounds until the budget is spent, but at least and at most so many.

    Slow cases stop at three rounds once they have spent four budgets.
    """

    seconds: float
    least: int
    most: int


FULL = Plan(seconds=1.6, least=7, most=300)
QUICK = Plan(seconds=0.7, least=5, most=100)


@dataclass(frozen=True)
class Spread:
    """The middle of the samples in seconds: 20 %, 50 % and 80 % of them lie below."""

    p20: float
    median: float
    p80: float
    rounds: int


def interleave(samplers: Mapping[str, Sampler], plan: Plan) -> dict[str, list[tuple[float, ...]]]:
    """Samples of each implementation, one from each a round, in an order shuffled anew each round.

    A machine that is busy, hot or throttled is so for all of them alike, and none always follows the one that warms
    the caches for it; sample i of all implementations belongs to the same round, so their ratio can be taken in pairs.
    """
    samples: dict[str, list[tuple[float, ...]]] = {name: [] for name in samplers}
    order, generator = list(samplers), random.Random(0)
    collecting = gc.isenabled()
    gc.disable()
    try:
        start = time.perf_counter()
        for round_ in range(plan.most):
            spent = time.perf_counter() - start
            if (round_ >= plan.least and spent > plan.seconds) or (round_ >= 3 and spent > 4 * plan.seconds):
                break
            generator.shuffle(order)
            for name in order:
                samples[name].append(samplers[name]())
    finally:
        if collecting:
            gc.enable()
    return samples


def spread(samples: Sequence[float]) -> Spread:
    """Median and the 20 % and 80 % points."""
    ordered = sorted(samples)
    return Spread(_quantile(ordered, 0.2), _quantile(ordered, 0.5), _quantile(ordered, 0.8), len(ordered))


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of ours / theirs, round by round: a slow minute of the machine cancels."""
    return _quantile(sorted(a / b for a, b in zip(ours, theirs, strict=True)), 0.5)


def _quantile(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])
