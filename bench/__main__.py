"""python -m bench: proves and times every kernel beside its peers, and writes bench/results/<device>/<op>.json.

python -m bench                        the whole grid, about 15 minutes on 2 cores
python -m bench --op attention --quick a few cases of one op, in a minute; results stay out of the repository
python -m bench --only "T512.*causal"  the groups whose name matches

An interrupted run is continued by the same command, as long as sources, torch and machine are the same.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # before torch is loaded: the memory profiler would talk

from tfm_kernels import _measured  # noqa: E402

from . import limits, measure, record, report, shapes, timing  # noqa: E402
from .ops import (  # noqa: E402
    bench_attention,
    bench_ffn,
    bench_int8_ffn,
    bench_int8_linear,
    bench_layer_norm,
    bench_linear,
    bench_linear_cross_entropy,
)
from .progress import Progress  # noqa: E402
from .subject import Group, groups  # noqa: E402

SUBJECTS = {
    module.SUBJECT.stem: module.SUBJECT
    for module in (
        bench_layer_norm,
        bench_attention,
        bench_ffn,
        bench_linear,
        bench_int8_linear,
        bench_int8_ffn,
        bench_linear_cross_entropy,
    )
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    _measured.ignore()  # the choice that ships is what is compared
    warnings.filterwarnings("ignore", message=".*Memory block of unknown size.*")
    now = record.environment()
    work = [(stem, group) for stem in options.op for group in _groups(stem, options)]
    if not work:
        print("bench: --only must match a group; `--list` prints their names", file=sys.stderr)
        return 1
    if options.list:
        print("\n".join(group.key for _, group in work))
        return 0
    folder = options.out or (record.QUICK_RESULTS if options.quick else record.RESULTS) / now["device"]
    files = {stem: record.Results(folder / f"{stem}.json", now, options.fresh) for stem in options.op}
    left = [(stem, group) for stem, group in work if not files[stem].has(group.key)]
    if len(left) < len(work):
        print(f"continuing: {len(work) - len(left)} of {len(work)} groups are measured already (--fresh starts anew)")
    machine: dict = {}  # measured once a run, when the first group needs it
    progress = Progress(left, "group")
    for stem, group in progress:
        data = files[stem].data
        if not data["limits"]:
            machine = machine or limits.measure(shapes.ALL)
            data["limits"] = machine
        result = measure.measure(group, timing.QUICK if options.quick else timing.FULL, data["limits"])
        files[stem].add(result)
        progress.say(f"{group.key:64} {_outcome(result)}")
    results = {stem: file.data for stem, file in files.items()}
    print("\n" + report.summary(results))
    print(f"\nwritten to {folder}; `python -m bench.report {folder}` prints the tables")
    return 1 if report.refusals(results) else 0


def _groups(stem: str, options: argparse.Namespace) -> list[Group]:
    subject = SUBJECTS[stem]
    cases = [shapes.quick(case) for case in subject.cases if case.quick] if options.quick else subject.cases
    return [group for group in groups(subject, cases) if re.search(options.only, group.key)]


def _outcome(result: dict) -> str:
    """One group in one line: automatic choice beside PyTorch, by direction."""
    words = [f"{name} REFUSED: {why}" for name, why in result["refused"].items()]
    for row in result["rows"]:
        if row["implementation"] == measure.AUTO:
            against = record.best_torch(result, row["direction"])["median"] / row["median"]
            words.append(f"{row['direction']} {row['median'] * 1e6:.0f} us, {against:.2f}x")
    return f"[{result['chosen']}] " + ", ".join(words)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--op", action="append", choices=sorted(SUBJECTS), help="only this op; may be repeated")
    parser.add_argument("--quick", action="store_true", help="few cases, few rounds, no torch.compile")
    parser.add_argument("--only", default="", metavar="REGEX", help="only groups whose name matches")
    parser.add_argument("--fresh", action="store_true", help="measure everything anew")
    parser.add_argument("--list", action="store_true", help="print the groups' names and stop")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where the result files go")
    options = parser.parse_args(arguments)
    options.op = options.op or list(SUBJECTS)
    try:
        re.compile(options.only)
    except re.error as error:
        parser.error(f"--only must be a regular expression: {error}")
    return options


if __name__ == "__main__":
    sys.exit(main())
