"""``prove``: is the patched model the original one?"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch

from ..proof import prove_patched
from . import parser
from .parser import CommandError, in_one_line

SENTENCES = 16  # how many lines of a text file make the batch: a float64 run of more takes minutes


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
    prove.add_argument(
        "target",
        help="file.py:function or module:function, a function without arguments that returns (model, inputs) or "
        "(model, inputs, loss_fn); or the folder of a Hugging Face model",
    )
    prove.add_argument(
        "sentences", nargs="?", help=f"with a model folder: a text file, of which the first {SENTENCES} lines are used"
    )
    prove.add_argument(
        "--dtype", choices=("float16", "bfloat16", "float32", "float64"), help="run both in it; default: the model's"
    )
    prove.add_argument("--steps", type=int, default=0, help="training steps to compare, default 0")
    prove.add_argument("--limit", type=float, default=1.05, help="allowed ratio of errors, default 1.05")
    prove.add_argument("--train", action="store_true", help="in training mode, dropout on")
    prove.add_argument("--json", metavar="OUT", help="also write the whole report to this file")


def _run(options: argparse.Namespace) -> int:
    if options.json is not None and not Path(options.json).absolute().parent.is_dir():
        raise CommandError(f"--json must lie in a folder that exists, got {options.json!r}")
    if not (options.limit >= 1.0 and options.steps >= 0):
        raise CommandError(f"--limit must be >= 1 and --steps >= 0, got {options.limit} and {options.steps}")
    if Path(options.target).is_dir():
        model, inputs, loss_fn = _from_folder(options.target, options.sentences)
    else:
        model, inputs, loss_fn = _from_function(options.target)
    if options.train:
        model.train()
    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    arguments = {"loss_fn": loss_fn, "dtype": dtype, "count": options.steps, "limit": options.limit}
    try:
        report = prove_patched(model, inputs, **arguments, progress=_progress(options.prog))
    except Exception as error:  # whatever the user's model raises is told in one sentence
        raise CommandError(f"the proof cannot run ({in_one_line(error)})") from error
    finally:
        _progress(options.prog)("")
    print(report.table())
    if options.json is not None:
        try:
            Path(options.json).write_text(report.to_json() + "\n")
        except OSError as error:
            raise CommandError(f"--json cannot be written ({in_one_line(error)})") from error
    return 0 if report.passed else 1


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


def _from_folder(folder: str, sentences: str | None) -> tuple[Any, Any, Any]:
    """A Hugging Face model from its local folder, in evaluation mode, and the sentences as one padded batch."""
    if sentences is None:
        raise CommandError(f"a model folder needs a text file of sentences after it: prove {folder} sentences.txt")
    try:
        lines = [line.strip() for line in Path(sentences).read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{sentences} cannot be read ({in_one_line(error)})") from error
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


def _progress(program: str) -> Callable[[str], None]:
    """Tells stages on stderr: one line that is written over on a terminal, the main stages elsewhere."""

    def tell(stage: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{program}: {stage}" if stage else "\r\033[K", end="", file=sys.stderr, flush=True)
        elif stage and not stage.startswith("module"):
            print(f"{program}: {stage}", file=sys.stderr, flush=True)

    return tell
