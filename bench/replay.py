"""pytest-benchmark as a carrier of samples that were taken in turns: `pytest bench/replay.py -k "layer_norm and N768"`.

pytest-benchmark times one callable at a time, so peers would be measured minutes apart, and on a machine with a noisy
neighbour the difference between those minutes is larger than the one between kernels. So the samples come from
timing.interleave(), once per group, and each test of the group plays its own back through a clock that pytest-benchmark
reads as its timer: rounds, statistics, JSON and --benchmark-compare are its own.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tfm_kernels import _backend
from tfm_kernels.bench import grid, measure, timing
from tfm_kernels.bench.subject import Group, groups


def competitors() -> list[tuple[Group, str]]:
    """The parameters of the tests: each group with each implementation that may compete on it."""
    pairs = []
    for group in (group for subject in grid.SUBJECTS.values() for group in groups(subject)):
        compiled = [measure.COMPILED] if group.case.compiled else []
        backends = [name for name in _backend.OPS[group.case.op].support if name != "reference"]
        pairs += [(group, name) for name in (measure.EAGER, *compiled, *backends, measure.AUTO)]
    return pairs


def name(parameter: Group | str) -> str:
    """How pytest shows a parameter."""
    return parameter if isinstance(parameter, str) else parameter.key


class Clock:
    """A clock that stands still except when a sample is played."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        """Seconds of all samples played so far."""
        return self.time


CLOCK = Clock()


@functools.lru_cache(maxsize=1)  # the tests of one group run one after another
def _samples(group: Group) -> dict[str, list[tuple[float, ...]]]:
    return measure.samples(group, timing.FULL)


@pytest.mark.parametrize("group, implementation", competitors(), ids=name)
@pytest.mark.benchmark(timer=CLOCK.now)
def test_grid(group: Group, implementation: str, benchmark: Any) -> None:
    """One test: measures the group if it is the first of it, then plays back its own implementation's samples."""
    taken = _samples(group).get(implementation)
    if taken is None:
        pytest.skip(f"{implementation} does not compete on {group.key}")
    pending = iter(taken)

    def play() -> None:
        CLOCK.time += next(pending)[-1]

    benchmark.group = group.key
    benchmark.extra_info["directions"] = {
        direction: [sample[place] for sample in taken] for place, direction in enumerate(group.directions)
    }
    benchmark.pedantic(play, rounds=len(taken))
