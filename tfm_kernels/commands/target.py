"""The model that a command reports on, its inputs (from a function of the user's, or a folder with sentences), and the
file that the report may go to.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch

from .parser import CommandError, in_one_line

SENTENCES = 16  # how many lines of a text file make the batch: a float64 run of more takes minutes


def declare(command: argparse.ArgumentParser, *, optional: bool = False, run: bool = False) -> None:
    """Adds the arguments ``target`` and ``sentences``; ``run``: the folder that ``train`` made is a target, too."""
    command.add_argument(
        "target",
        nargs="?" if optional else None,
        help="file.py:function or module:function, a function without arguments that returns (model, inputs) or "
        "(model, inputs, loss_fn); or the folder of a Hugging Face model"
        + ("; or the folder of a run that `train` made" if run else ""),
    )
    command.add_argument(
        "sentences", nargs="?", help=f"with a model folder: a text file, of which the first {SENTENCES} lines are used"
    )


def declare_json(command: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Adds the option ``--json``."""
    command.add_argument("--json", metavar="OUT", help="also write the whole report to this file")


def check_json(path: str | None) -> None:
    """Refuses what cannot be written, before the work; nothing is made yet."""
    if path is None:
        return
    file = Path(path).absolute()
    if not file.parent.is_dir():
        raise CommandError(f"--json must lie in a folder that exists, got {path!r}")
    if file.is_dir():
        raise CommandError(f"--json must be a file, got the folder {path!r}")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise CommandError(f"--json must be a file that may be written, got {path!r}")


def write_json(path: str | None, report: Any) -> None:
    """Writes a report where the file was asked for."""
    if path is None:
        return
    try:
        Path(path).write_text(report.to_json() + "\n")
    except OSError as error:
        raise CommandError(f"--json cannot be written ({in_one_line(error)})") from error


def load(command: str, target: str, sentences: str | None) -> tuple[Any, Any, Any]:
    """The model, its inputs, and a loss function or None."""
    return _from_folder(command, target, sentences) if Path(target).is_dir() else _from_function(target)


def _from_function(target: str) -> tuple[Any, Any, Any]:
    """What the named function returns: a model, its inputs, and a loss function or None."""
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise CommandError(f"the target must be file.py:function, module:function or a model folder, got {target!r}")
    try:
        if place.endswith(".py"):
            sys.path.insert(0, str(Path(place).absolute().parent))
            spec = spec_from_file_location(Path(place).stem, place)
            assert spec is not None and spec.loader is not None
            module = module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            sys.path.insert(0, "")
            module = import_module(place)
    except FileNotFoundError as error:
        raise CommandError(f"there is no file {error.filename or place}") from error
    except Exception as error:
        raise CommandError(f"{place} cannot be imported ({in_one_line(error)})") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise CommandError(f"{place} has no function {name}")
    try:
        returned = function()
    except Exception as error:
        raise CommandError(f"{target} raised an error ({in_one_line(error)})") from error
    if not (isinstance(returned, tuple) and len(returned) in (2, 3) and isinstance(returned[0], torch.nn.Module)):
        raise CommandError(f"{target} must return (model, inputs) or (model, inputs, loss_fn)")
    return (*returned, None)[:3]


def _from_folder(command: str, folder: str, sentences: str | None) -> tuple[Any, Any, Any]:
    """A Hugging Face model from its local folder, in evaluation mode, and the sentences as one padded batch."""
    if sentences is None:
        raise CommandError(f"a model folder needs a text file of sentences after it: {command} {folder} sentences.txt")
    try:
        lines = [line.strip() for line in Path(sentences).read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or in_one_line(error)
        raise CommandError(f"{sentences} cannot be read ({reason})") from error
    if not lines:
        raise CommandError(f"{sentences} holds no sentence")
    try:
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils import logging
    except ImportError as error:
        raise CommandError("a model folder needs transformers; `pip install transformers` brings it") from error
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        model = AutoModel.from_pretrained(folder, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        longest = min(tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", 512))
        batch = tokenizer(lines[:SENTENCES], padding=True, truncation=True, max_length=longest, return_tensors="pt")
    except Exception as error:
        raise CommandError(f"{folder} cannot be loaded ({in_one_line(error)})") from error
    return model.eval(), dict(batch), None
