"""The frame of the programs that time whole models: cases by name, in turns, into one file."""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfm_kernels import _measured
from tfm_kernels.bench import record, timing

from . import places

Runs = Mapping[str, Callable[[], object]]
Seconds = dict[str, list[float]]  # of each implementation, a number a round


def program(
    doc: str,
    arguments: Sequence[str] | None,
    name: str,
    cases: Mapping[str, Callable[[], tuple[Runs, Any]]],
    plan: timing.Plan,
    told: Callable[[str, Seconds, Any], dict[str, Any]],
) -> int:
    """Measures every case that is asked for and writes bench/results/<device>/models/<name>.json.

    Args:
        doc: what the help says.
        arguments: as on the command line, None for the process's own.
        name: of the program, bench.<name>, and of its file.
        cases: name -> a function that gives a run of each implementation, and what is known of them.
        plan: how long each case is measured.
        told: told(case, seconds, what is known) prints a case and gives what the file holds of it.

    Returns:
        0.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m bench.{name}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="REGEX", help="only the cases whose name matches")
    parser.add_argument("--out", help=f"the result file; by default bench/results/<device>/models/{name}.json")
    options = parser.parse_args(arguments)
    _measured.ignore()  # the choice that ships is what is compared
    found: dict[str, Any] = {"environment": record.environment(), "cases": {}}
    for case, make in cases.items():
        if re.search(options.only, case):
            runs, known = make()
            found["cases"][case] = told(case, _seconds(runs, plan), known)
    usual = places.ROOT / f"bench/results/{found['environment']['device']}/models/{name}.json"
    out = Path(options.out) if options.out else usual
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def beside(seconds: Seconds, first: str) -> dict[str, dict[str, float]]:
    """Of each implementation the spread of its seconds, and how many times faster than the first it is."""
    return {
        who: {**vars(timing.spread(taken)), "times": 1.0 / timing.paired_ratio(taken, seconds[first])}
        for who, taken in seconds.items()
    }


def _seconds(runs: Runs, plan: timing.Plan) -> Seconds:
    for run in runs.values():
        run(), run()  # torch.compile compiles, kernels and memory warm up
    samples = timing.interleave({who: _timed(run) for who, run in runs.items()}, plan)
    return {who: [sample[0] for sample in taken] for who, taken in samples.items()}


def _timed(run: Callable[[], object]) -> timing.Sampler:
    def sample() -> tuple[float, ...]:
        begin = time.perf_counter()
        run()
        return (time.perf_counter() - begin,)

    return sample
