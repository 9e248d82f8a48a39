"""``export``: a model as an ONNX file, from a run or from a function of the user's."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from . import parser, target
from .parser import CommandError, stages, told

ROWS, TOKENS = 3, 8  # of the examples for a run's model: padding at the end, in front, and none


def add(commands: Any) -> None:
    """Declares the command."""
    command = parser.add(
        commands,
        "export",
        _run,
        "write a model as an ONNX file of standard operators, and check its numbers in onnxruntime",
        "export run model.onnx",
        "export my_model.py:build model.onnx --fixed",
        "export ./all-MiniLM-L6-v2 sentences.txt model.onnx",
    )
    target.declare(command, run=True)
    command.add_argument("path", type=Path, metavar="model.onnx", help="the file, replaced where there is one")
    command.add_argument("--opset", type=int, default=20, help="of the standard operators, 18 to 23; default 20")
    command.add_argument("--fixed", action="store_true", help="fix all sizes at those of the inputs")


def _run(options: argparse.Namespace) -> int:
    with told():
        from ..onnx_export import export_stage_by_stage

        model, inputs = _model(options)
        tell = stages(options.prog)
        axes: Any = {} if options.fixed else None
        try:
            report = export_stage_by_stage(model, options.path, inputs, axes, options.opset, tell)
        except (ImportError, TypeError, RuntimeError) as error:  # sentences, but told() would add their class
            if sys.flags.dev_mode:
                raise
            raise CommandError(str(error)) from error
        finally:
            tell("")
    print(report)
    return 0


def _model(options: argparse.Namespace) -> tuple[Any, Any]:
    folder = Path(options.target)
    if not (folder / "checkpoints").is_dir():
        return target.load("export", options.target, options.sentences)[:2]
    if options.sentences is not None:
        raise CommandError(f"{folder} holds a run, whose export takes no sentences, got {options.sentences}")
    from ..training.run_folder import opened

    trained = opened(folder)
    return trained.model, _examples(trained)


def _examples(trained: Any) -> Any:
    """Token numbers for every input of a run's model, padded as batches are."""
    import torch

    sizes = trained.settings["model"]
    length = min(TOKENS, sizes["max_length"])

    def ids(vocabulary: str, length: int) -> Any:
        number = torch.arange(ROWS * length).view(ROWS, length)
        found = number % (trained.vocabularies[vocabulary].size - 1) + 1  # 0 is padding
        found[0, (length + 1) // 2 :] = 0
        found[1, : length // 2] = 0
        return found

    if trained.task != "translate":
        return (ids("text", length),)
    return ids("source", length), ids("target", max(length - 1, 1))
