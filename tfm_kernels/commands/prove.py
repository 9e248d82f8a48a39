"""``prove``: is the patched model the original one?"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch

from ..proof import prove_patched
from . import parser, target
from .parser import CommandError, in_one_line, stages


def add(commands: Any) -> None:
    """Declares the command."""
    prove = parser.add(
        commands,
        "prove",
        _run,
        "compare the patched model with the original: outputs, gradients, training steps, every replaced module",
        "prove my_model.py:build --dtype bfloat16",
        "prove my_package.my_module:build --train --steps 3 --json proof.json",
        "prove ./all-MiniLM-L6-v2 sentences.txt",
    )
    target.declare(prove)
    prove.add_argument(
        "--dtype", choices=("float16", "bfloat16", "float32", "float64"), help="run both in it; default: the model's"
    )
    prove.add_argument("--steps", type=int, default=0, help="training steps to compare, default 0")
    prove.add_argument("--limit", type=float, default=1.05, help="allowed ratio of errors, default 1.05")
    prove.add_argument("--train", action="store_true", help="in training mode, dropout on")
    prove.add_argument("--compile", action="store_true", help="prove the patched model under torch.compile as well")
    target.declare_json(prove)


def _run(options: argparse.Namespace) -> int:
    target.check_json(options.json)
    if not (1.0 <= options.limit < math.inf and options.steps >= 0):
        raise CommandError(f"--limit must be >= 1 and finite, --steps >= 0, got {options.limit} and {options.steps}")
    model, inputs, loss_fn = target.load("prove", options.target, options.sentences)
    if options.train:
        model.train()
    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    arguments = {"loss_fn": loss_fn, "dtype": dtype, "count": options.steps, "limit": options.limit}
    arguments["compile"] = options.compile or None  # a model that comes compiled is proven as it is
    try:
        report = prove_patched(model, inputs, **arguments, progress=stages(options.prog))
    except Exception as error:  # whatever the user's model raises is told in one sentence
        raise CommandError(f"the proof cannot run ({in_one_line(error)})") from error
    finally:
        stages(options.prog)("")
    print(report.table())
    target.write_json(options.json, report)
    return 0 if report.passed else 1
