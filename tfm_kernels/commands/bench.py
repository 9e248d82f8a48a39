"""``bench``: is your model faster when patched? And the grid of ops beside PyTorch's."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from ..bench import grid, record, report
from ..bench.model import compare
from . import parser, target
from .parser import CommandError, in_one_line, stages

SECONDS = 10.0
FOLDER = Path("tfm_kernels_bench")
# options of one of the two alone
MODEL = ("train", "dtype", "freeze", "compile", "seconds", "json")
GRID = ("op", "quick", "only", "fresh", "list", "out", "report")


def add(commands: Any) -> None:
    """Declares the command."""
    bench = parser.add(
        commands,
        "bench",
        _run,
        "prove your patched model and time it in turns with the original; without a model, measure every op of the CPU "
        "beside PyTorch's",
        "bench my_model.py:build",
        "bench my_model.py:build --train --dtype bfloat16 --compile",
        "bench ./all-MiniLM-L6-v2 sentences.txt --freeze --json speed.json",
        "bench --op attention --quick",
        f"bench --report {FOLDER}/quick/cpu",
    )
    target.declare(bench, optional=True)
    model = bench.add_argument_group("with a target")
    model.add_argument("--train", action="store_true", help="time forward and backward; default: inference, no_grad")
    model.add_argument("--dtype", choices=("float16", "bfloat16", "float32", "float64"), help="default: the model's")
    model.add_argument("--freeze", action="store_true", help="patch(model, freeze=True), for inference only")
    model.add_argument("--compile", action="store_true", help="time both under torch.compile as well")
    model.add_argument("--seconds", type=float, help=f"how long to time, three rounds at least; default {SECONDS:g}")
    target.declare_json(model)
    ops = bench.add_argument_group("without a target: the grid of ops, about 15 minutes on 2 cores")
    grid.declare(ops, f"{FOLDER}/<device> in the current folder, with --quick {FOLDER}/quick/<device>")
    ops.add_argument("--report", type=Path, metavar="FOLDER", help="print the tables of a folder of result files")


def _run(options: argparse.Namespace) -> int:
    if options.target is None:
        _refuse(options, MODEL, "needs a target: file.py:function, module:function or a model folder")
        return _grid(options)
    _refuse(options, GRID, "is of the grid of ops, which takes no target")
    return _model(options)


def _refuse(options: argparse.Namespace, names: tuple[str, ...], why: str) -> None:
    for name in names:
        value = getattr(options, name)
        if value is not None and value is not False:  # 0.0 is a value
            raise CommandError(f"--{name} {why}")


def _model(options: argparse.Namespace) -> int:
    target.check_json(options.json)
    parser.within(options, seconds=(0.0, None))
    if options.freeze and options.train:
        raise CommandError("--freeze is for inference only: leave out --train")
    model, inputs, loss_fn = target.load("bench", options.target, options.sentences)
    try:
        found = compare(
            model,
            inputs,
            loss_fn=loss_fn,
            dtype=None if options.dtype is None else getattr(torch, options.dtype),
            train=options.train,
            freeze=options.freeze,
            compiled=options.compile,
            seconds=SECONDS if options.seconds is None else options.seconds,
            progress=stages(options.prog),
        )
    except Exception as error:  # whatever the user's model raises is told in one sentence
        raise CommandError(f"the model cannot be measured ({in_one_line(error)})") from error
    finally:
        stages(options.prog)("")
    if found.proof.passed:
        print(found.table())
    target.write_json(options.json, found)
    if not found.proof.passed:
        raise CommandError(f"no speed is told, because the proof failed: {found.proof}")
    return 0


def _grid(options: argparse.Namespace) -> int:
    if options.report is not None:
        return _report(options)
    try:
        return grid.run(options, FOLDER, FOLDER / "quick", f"{options.prog} --report")
    except grid.GridError as error:
        raise CommandError(str(error)) from error


def _report(options: argparse.Namespace) -> int:
    _refuse(options, GRID[:-1], "measures, and --report prints what was measured; one of them at a time")
    try:
        results = record.load(options.report)
        text = report.render(results)
    except (ValueError, KeyError, TypeError) as error:
        raise CommandError(f"--report must name a folder of result files alone, got {options.report}") from error
    if not results:
        raise CommandError(f"--report must name a folder that holds results, got {options.report}")
    print(text)
    return 0
