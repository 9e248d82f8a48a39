"""``quantize``: a copy of a trained model with linear layers in 8 bits."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from . import parser
from .parser import told


def add(commands: Any) -> None:
    """Declares the command."""
    command = parser.add(
        commands,
        "quantize",
        _run,
        "write a copy of a trained run with the weights of its linear layers in 8 bits, for use and not for training",
        "quantize run run-int8",
        "quantize run run-int8 --scheme int8_dynamic",
    )
    command.add_argument("run_folder", type=Path, metavar="run", help="folder that `train` made")
    command.add_argument("out", type=Path, help="the new folder, for `translate`, `generate`, `classify` and the like")
    command.add_argument(
        "--scheme",
        choices=("int8_weight_only", "int8_dynamic"),
        default="int8_weight_only",
        help="int8_weight_only (default): for few rows at a time, as in decoding; int8_dynamic: the inputs of the "
        "layers in 8 bits as well, for many rows",
    )


def _run(options: argparse.Namespace) -> int:
    with told():
        from ..quantization import quantize
        from ..training import InputError
        from ..training.run_folder import opened, write_copy

        trained = opened(options.run_folder)
        if trained.settings.get("quantization") is not None:
            raise InputError(f"{options.run_folder} is quantized already, by {trained.settings['quantization']}")
        report = quantize(trained.model.cpu(), options.scheme)
        write_copy(trained, options.run_folder, options.out, options.scheme)
        print(report)
        print(f"written to {options.out}", file=sys.stderr)
    return 0
