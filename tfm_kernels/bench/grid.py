"""The grid: proves and times every kernel of the CPU beside its peers, and writes FOLDER/<op>.json as it goes."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import torch

from .. import _measured
from . import limits, measure, record, report, shapes, timing
from .ops import attention, ffn, int8_ffn, int8_linear, layer_norm, linear, linear_cross_entropy, rotary
from .progress import Progress
from .subject import Group, groups

SUBJECTS = {
    module.SUBJECT.stem: module.SUBJECT
    for module in (layer_norm, attention, ffn, linear, int8_linear, int8_ffn, linear_cross_entropy, rotary)
}


class GridError(Exception):
    """The grid cannot run as it was asked to; the message is one sentence."""


def declare(parser: argparse.ArgumentParser | argparse._ArgumentGroup, default: str) -> None:
    """Adds the grid's options.

    Args:
        parser: of the command, or a group of its options.
        default: what the help says of the folder that is written to unless ``--out`` names one.
    """
    parser.add_argument(
        "--op",
        action="append",
        choices=sorted(SUBJECTS),
        help="only this op, or those of this kind: all norms, attention of packed sequences too; may be repeated",
    )
    parser.add_argument("--quick", action="store_true", help="few cases, few rounds, no torch.compile")
    parser.add_argument("--only", type=_pattern, metavar="REGEX", help="only groups whose name matches")
    parser.add_argument("--fresh", action="store_true", help="measure everything anew")
    parser.add_argument("--list", action="store_true", help="print the groups' names and stop")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=f"where the result files go; default: {default}")


def run(options: argparse.Namespace, full: Path, quick: Path, reader: str) -> int:
    """Measures what is asked for and not measured yet, or lists it.

    Args:
        options: what ``declare`` added.
        full: the folder whose subfolder of the device's name is written to by default.
        quick: the same of ``--quick``.
        reader: the command that prints the tables of a folder.

    Returns:
        0, or 1 where a kernel was refused because its numbers are wrong.

    Raises:
        GridError: no group has such a name, or a file of the folder is no file of results.
        OSError: the folder cannot be written to.
    """
    stems = options.op or list(SUBJECTS)
    work = [(stem, group) for stem in stems for group in _groups(stem, options)]
    if not work:
        raise GridError("--only must match a group; `--list` prints their names")
    if options.list:
        print("\n".join(group.key for _, group in work))
        return 0
    _measured.ignore()  # the choice that ships is what is compared
    if torch.cuda.is_available():
        print("the grid measures the CPU; `python -m bench.gpu`, from a checkout, proves and times the GPU's kernels")
    now = record.environment()
    folder = options.out or (quick if options.quick else full) / now["device"]
    folder.mkdir(parents=True, exist_ok=True)
    files = {stem: _results(folder / f"{stem}.json", now, options.fresh) for stem in stems}
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
    print(f"\nwritten to {folder}; `{reader} {folder}` prints the tables")
    return 1 if report.refusals(results) else 0


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"must be a regular expression: {error}") from error


def _groups(stem: str, options: argparse.Namespace) -> list[Group]:
    subject = SUBJECTS[stem]
    cases = [shapes.quick(case) for case in subject.cases if case.quick] if options.quick else subject.cases
    return [group for group in groups(subject, cases) if options.only is None or options.only.search(group.key)]


def _results(path: Path, now: dict, fresh: bool) -> record.Results:
    try:
        return record.Results(path, now, fresh)
    except (ValueError, KeyError, TypeError) as error:
        raise GridError(f"{path} is there and holds no results; --fresh writes over it") from error


def _outcome(result: dict) -> str:
    """One group in one line: automatic choice beside PyTorch, by direction."""
    words = [f"{name} REFUSED: {why}" for name, why in result["refused"].items()]
    for row in result["rows"]:
        if row["implementation"] == measure.AUTO:
            against = record.best_torch(result, row["direction"])["median"] / row["median"]
            words.append(f"{row['direction']} {row['median'] * 1e6:.0f} us, {against:.2f}x")
    return f"[{result['chosen']}] " + ", ".join(words)
