"""``tune``: which backend is fastest for this model on this machine?"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch

from .. import _check, _measured, patching, tuning
from ..proof.runs import Call
from . import parser, target
from .parser import CommandError, in_one_line


def add(commands: Any) -> None:
    """Declares the command."""
    tune = parser.add(
        commands,
        "tune",
        _run,
        "measure which backend runs the calls of your model fastest on this machine, and choose it from then on",
        "tune my_model.py:build",
        "tune my_model.py:build --train --dtype bfloat16",
        "tune ./all-MiniLM-L6-v2 sentences.txt",
        "tune --forget",
    )
    target.declare(tune, optional=True)
    tune.add_argument("--dtype", choices=("float16", "bfloat16", "float32", "float64"), help="default: the model's")
    tune.add_argument("--train", action="store_true", help="measure training: forward with backward")
    target.declare_json(tune)
    tune.add_argument("--forget", action="store_true", help="delete everything that was measured")


def _run(options: argparse.Namespace) -> int:
    if options.forget:
        return _forget(options)
    if options.target is None:
        raise CommandError("a target is missing: file.py:function, module:function or a model folder")
    target.check_json(options.json)
    model, inputs, _ = target.load("tune", options.target, options.sentences)
    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    try:
        call = Call(*_check.call_arguments("tune", inputs)).to(dtype)
        model = model if dtype is None else model.to(dtype)
        patching.patch(model)
        model.train(options.train)
        with torch.set_grad_enabled(options.train):
            report = tuning.tune(model, call.args or call.kwargs, progress=_progress(options.prog))
    except Exception as error:  # whatever the user's model raises is told in one sentence
        raise CommandError(f"the model cannot be measured ({in_one_line(error)})") from error
    print(report.table())
    target.write_json(options.json, report)
    return 0


def _forget(options: argparse.Namespace) -> int:
    if options.target is not None:
        raise CommandError("--forget deletes what was measured for all models; it takes no target")
    try:
        found = _measured.forget()
    except OSError as error:
        raise CommandError(f"{_measured.file()} cannot be deleted ({error.strerror or error})") from error
    print(f"deleted {_measured.file()}" if found else "nothing was measured yet")
    return 0


def _progress(program: str) -> Any:
    """Tells on stderr what is measured: one line that is written over on a terminal."""

    def tell(what: str, number: int, count: int) -> None:
        line = f"{program}: {number + 1} of {count}, {what}"
        if sys.stderr.isatty():
            print(f"\r\033[K{line}", end="\n" if number + 1 == count else "", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)

    return tell
