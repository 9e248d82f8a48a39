"""``classify``: the label of each line of a text."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from . import parser
from .parser import shortened, told

TOKENS = 4096  # of a batch, padding included


def add(commands: Any) -> None:
    """Declares the command."""
    command = parser.add(
        commands,
        "classify",
        _run,
        "print the label of each line, its probability and the line, with a tab between them",
        "classify run texts.txt",
        "classify run dev.tsv --labelled",
    )
    command.add_argument("run_folder", type=Path, metavar="run", help="folder that `train classify` made")
    command.add_argument(
        "text",
        help="file of texts, one a line; - is the standard input. What is longer than the run's --max-length is cut, "
        "and how many lines were is told",
    )
    command.add_argument(
        "--labelled", action="store_true", help="the file has labels, too: print the accuracy at the end"
    )


def _run(options: argparse.Namespace) -> int:
    with told():
        import torch

        from ..training.examples import LabelledExamples
        from ..training.run_folder import opened
        from ..training.text_file import read_labelled, read_sentences

        trained = opened(options.run_folder, "classify")
        if options.labelled:
            rows = read_labelled(options.text)
        else:
            rows = [(line, trained.labels[0]) for line in read_sentences(options.text)]
        length = trained.settings["model"]["max_length"]
        examples = LabelledExamples(rows, trained.vocabularies["text"], trained.labels, length, options.text)
        shortened(examples.cut, length - 2)
        right = 0
        for begin in range(0, len(rows), max(1, TOKENS // length)):  # in the file's order
            chosen = range(begin, min(len(rows), begin + max(1, TOKENS // length)))
            inputs, labels = examples.batch(chosen, 0)
            with torch.inference_mode():
                best = trained.model(inputs[0].to(trained.device)).softmax(-1).max(-1)
            right += int((best.indices.cpu() == labels).sum())
            for at, probability, label in zip(chosen, best.values.tolist(), best.indices.tolist(), strict=True):
                print(f"{trained.labels[label]}\t{probability:.4f}\t{rows[at][0]}")
        if options.labelled:
            print(f"accuracy {right / len(rows):.4f} ({right:,} of {len(rows):,})", file=sys.stderr)
    return 0
