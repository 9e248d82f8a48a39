"""python -m bench.gpu: builds, proves and times the kernels on this machine's GPU, in under 9 minutes.

python -m bench.gpu                      all parts in order; files go to bench/results/<device>/<part>.json
python -m bench.gpu --part contract      one part; may be repeated
python -m bench.gpu --part models        whole patched models, eager and compiled, and tune(): a run of its own
python -m bench.gpu --part sanitizers    NVIDIA's compute-sanitizer on the smallest calls, a second run of its own
python -m bench.gpu --ahead --out FOLDER --op attention    attention, ffn or linear_cross_entropy by kernels that wait
                                         for their proof
python -m bench.gpu --minutes 4          less time; the same command continues where it ended
python -m bench.gpu --compile FILE       compiles Triton's kernels into a file; needs no GPU
python -m bench.gpu --kernels FILE       takes them from there, and goes on as without
python -m bench.gpu --report FOLDER      prints the table of finished files; needs no GPU

An interrupted run is continued as long as sources, torch and GPU are the same. Exit code 0: all green; 1: something is
red, or there is nothing to run on; 75: the time was over before the end.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench import places
from tfm_kernels.bench import record

from . import machine, packed, table
from .conductor import ask, conduct
from .part import Part, Room
from .parts import PARTS
from .subject import GpuSubject
from .subjects import STEMS, SUBJECTS

GREEN, RED, UNFINISHED = 0, 1, 75
DEFAULT = "9.0"  # compute capability of H100 and H200


def main(
    arguments: Sequence[str] | None = None,
    parts: Sequence[Part] = PARTS,
    read: Callable[[], dict[str, Any]] = machine.read,
) -> int:
    """The command.

    Args:
        arguments: of the command line.
        parts: what there is to run.
        read: says what the machine is, or {"refusal": why it cannot}; called in a process of its own.
    """
    options = _options(arguments)
    names = [part.name for part in parts]
    wrong = _wrong(options, names)
    if wrong is not None:
        return _refuse(wrong)
    if options.list:
        named = {True: "; only where --part names it", False: ""}
        print("\n".join(f"{part.name:12} {part.seconds:4.0f} s  {part.about}{named[part.named]}" for part in parts))
        return GREEN
    if options.report is not None:
        files = {name: file for name, file in record.load(options.report).items() if name in names}
        if not files:
            return _refuse(f"--report must name a folder that holds results, got {options.report}")
        return _report(files, names, STEMS)
    subjects = [subject for subject in SUBJECTS if not options.op or subject.stem in options.op]
    try:
        for kernels in options.kernels:  # before a GPU is asked for
            packed.check(kernels, options.capability)
        if options.ahead:
            _ahead()
        if options.compile is not None:
            return _compile(options, subjects)
        now = {**ask(read), "ahead": options.ahead}
        if "refusal" in now:
            return _refuse(now["refusal"])
        if not now.get("calls", True):
            print("bench.gpu: the C++ extension is not built, so every call is planned anew: build it first")
        for kernels in options.kernels:
            packed.unpack(kernels, ".".join(map(str, now["capability"])))
    except packed.PackError as error:
        return _refuse(str(error))
    folder = options.out or places.RESULTS / now["device"]
    chosen = [part for part in parts if (part.name in options.part if options.part else not part.named)]
    room = Room(folder, now, time.monotonic(), subjects)
    for part in chosen:
        file = record.Results(folder / f"{part.name}.json", now, options.fresh)
        if file.data["groups"]:
            print(f"continuing {part.name}: {len(file.data['groups'])} items are there already (--fresh starts anew)")
        file.write()
    try:
        conduct(chosen, room, options.minutes * 60)
    except KeyboardInterrupt:
        print("\nbench.gpu: interrupted; the same command goes on from there", file=sys.stderr)
        return UNFINISHED
    files = {name: room.results(name).data for name in names if (folder / f"{name}.json").exists()}
    print(f"\nwritten to {folder}\n")
    return _report(files, [part.name for part in chosen], [subject.stem for subject in subjects])


def _ahead() -> None:
    """Has Triton's kernels taken that wait for their proof, in the processes that follow, too: they are forks."""
    from tfm_kernels.triton import _gemm, _gemm_ahead, attention_bwd, attention_fwd  # here: a report needs no Triton

    for module in (attention_fwd, attention_bwd, _gemm):
        module.AHEAD = True
    _gemm_ahead.LEAST = 0  # the contract's calls are small


def _compile(options: argparse.Namespace, subjects: Sequence[GpuSubject]) -> int:
    capability = options.capability or DEFAULT
    for kernels in options.kernels:
        packed.unpack(kernels, capability)
    try:
        failures = packed.make(options.compile, subjects, capability, options.ahead)
    except KeyboardInterrupt:
        print("\nbench.gpu: interrupted; the same command goes on from there", file=sys.stderr)
        return UNFINISHED
    return RED if failures else GREEN


def _report(files: dict[str, dict[str, Any]], parts: Sequence[str], stems: Sequence[str]) -> int:
    print(table.render(files, parts, stems))
    late = table.unfinished(files, parts, stems)
    if table.red(files):
        return RED
    if late:
        print(f"\nnot finished: {', '.join(late)}; the same command goes on from there")
        return UNFINISHED
    return GREEN


def _refuse(why: str) -> int:
    print(f"bench.gpu: {why}", file=sys.stderr)
    return RED


def _wrong(options: argparse.Namespace, names: Sequence[str]) -> str | None:
    """None where the options make sense, else one sentence."""
    for name in options.part:
        if name not in names:
            return f"--part must be one of {', '.join(names)}, got {name}"
    for stem in options.op:
        if stem not in STEMS:
            return f"--op must be one of {', '.join(STEMS)}, got {stem}"
    if options.ahead and options.out is None and options.compile is None:
        return "--ahead needs --out FOLDER, so that its figures stay apart from those of the kernels that are taken"
    if options.compile is not None and (options.compile.is_dir() or not os.access(options.compile.parent, os.W_OK)):
        return f"--compile must name a file in a folder that can be written, got {options.compile}"
    if options.capability not in (None, *packed.ARCHITECTURES):
        return f"--capability must be one of {', '.join(packed.ARCHITECTURES)}, got {options.capability}"
    if options.capability is not None and options.compile is None:
        return "--capability needs --compile FILE: kernels that run here are made for this GPU"
    if (options.compile or options.kernels or options.ahead) and machine.package("triton") is None:
        return machine.NO_TRITON
    if not 0 < options.minutes <= 60:
        return f"--minutes must lie above 0 and up to 60, got {options.minutes:g}"
    return None


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", action="append", default=[], metavar="NAME", help="only this part; may be repeated")
    parser.add_argument("--op", action="append", default=[], metavar="STEM", help="only this op; may be repeated")
    parser.add_argument("--minutes", type=float, default=8.0, help="for all parts together; 8 unless told")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where the files go")
    parser.add_argument("--ahead", action="store_true", help="by Triton's kernels that wait for their proof")
    parser.add_argument("--compile", type=Path, metavar="FILE", help="compile Triton's kernels into FILE and stop")
    parser.add_argument("--capability", metavar="N.N", help="of the GPU to compile for; 9.0 (H100, H200) unless told")
    parser.add_argument(
        "--kernels", type=Path, nargs="+", action="extend", default=[], metavar="FILE", help="kernels from --compile"
    )
    parser.add_argument("--fresh", action="store_true", help="do everything anew")
    parser.add_argument("--list", action="store_true", help="print the parts and stop")
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="print the table of a folder's files and stop")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
