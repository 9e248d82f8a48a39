"""The folder of a run: what was trained on what, so that it can be continued and used, and is never written over.

``config.json``         task, model, training, labels, digests of the data; the scheme of a quantized copy
``<name>.json``         a vocabulary
``metrics.jsonl``       what was measured;  ``loss.png`` its picture
``checkpoints/step-*``  see ``checkpoint``
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import models
from .._durable import write_folder, write_json
from ..quantization import SCHEMES, quantize
from .checkpoint import Checkpoints, load_weights, save_weights
from .text_file import InputError
from .vocabulary import Vocabulary, load

FORMAT = 1
TASKS: dict[str, tuple[type[nn.Module], type]] = {
    "translate": (models.TranslationTransformer, models.TranslationConfig),
    "classify": (models.TransformerClassifier, models.ClassifierConfig),
    "masked-lm": (models.MaskedLanguageModel, models.MaskedLanguageConfig),
    "causal-lm": (models.CausalLanguageModel, models.CausalLanguageConfig),
}


@dataclass(frozen=True)
class Trained:
    """A model that was trained, and what turns text into its input.

    Attributes:
        task: one of TASKS.
        model: in evaluation mode, with the best checkpoint's weights.
        device: where it is: a GPU where there is one.
        vocabularies: by name: "source" and "target", or "text".
        labels: of a classifier, in the order of its logits.
        settings: all of config.json.
    """

    task: str
    model: nn.Module
    device: torch.device
    vocabularies: dict[str, Vocabulary]
    labels: list[str]
    settings: dict[str, Any]


@contextmanager
def begun(folder: Path, settings: dict[str, Any], vocabularies: dict[str, Vocabulary], resume: bool) -> Iterator[None]:
    """Makes the folder of a run, or sees that it is this run's, and keeps it for this process until the block ends.

    Where it refuses, nothing in the folder has changed.

    Args:
        folder: new, or empty, or of a run with the same settings and vocabularies; only ``training.steps`` may differ.
        settings: task, model, training, labels, data; JSON.
        vocabularies: by name.
        resume: whether a run that is there is to be continued.

    Raises:
        InputError: the folder holds something else, or a run and ``resume`` is False, or cannot be written, or another
            process trains it.
    """
    settings = json.loads(json.dumps({"format": FORMAT, **settings, "vocabularies": sorted(vocabularies)}))
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with held(folder):
        with _writing(folder):
            _check(folder, settings, vocabularies, resume)
            write_json(folder / "config.json", settings)
            for name, vocabulary in vocabularies.items():
                vocabulary.save(folder / f"{name}.json")
        yield


def _check(folder: Path, settings: dict[str, Any], vocabularies: dict[str, Vocabulary], resume: bool) -> None:
    """Refuses a folder that is neither empty nor of this run."""
    if not (folder / "config.json").exists():
        if any(not found.name.endswith(".partial") for found in folder.iterdir()):
            raise InputError(f"{folder} is not empty and holds no run; --out must be a new folder")
        return
    if not resume:
        raise InputError(f"{folder} holds a run; --resume continues it, another --out leaves it alone")
    before = {"hold_out": settings.get("hold_out"), **_settings(folder)}  # runs of older versions do not say
    for name, old, new in _differences(before, settings):
        if name != "training steps":
            raise InputError(f"{folder} cannot be continued: its {name} is {old}, now it is {new}")
    for name, vocabulary in vocabularies.items():
        path = folder / f"{name}.json"
        if path.exists() and not load(path).same(vocabulary):
            raise InputError(f"{folder} cannot be continued: {path} is another vocabulary than these options make")


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"{folder} cannot be written ({error.strerror or error})") from error


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keeps a run for this process, until the block or the process ends.

    Raises:
        InputError: another process trains it.
    """
    with _writing(folder):
        handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise InputError(f"{folder} is being trained by another process") from error
    finally:
        os.close(handle)


def _differences(before: dict[str, Any], now: dict[str, Any], name: str = ""):
    for key in sorted(before.keys() | now.keys()):
        old, new, words = before.get(key), now.get(key), f"{name} {key}".strip()
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _differences(old, new, words)
        elif old != new:
            yield words, old, new


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise InputError(f"{folder} is not the folder of a run: it holds no config.json")
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        if settings["format"] != FORMAT or settings["task"] not in TASKS:
            raise ValueError(f"format {settings['format']}, task {settings['task']}")
        for name, kind in (("model", dict), ("vocabularies", list), ("labels", list)):
            if not isinstance(settings[name], kind):
                raise ValueError(f"its {name} is {settings[name]!r}")
        for name in (*_vocabularies(settings["task"]), "max_length"):
            if not isinstance(settings["model"][name], int):
                raise ValueError(f"its model's {name} is {settings['model'][name]!r}")
        if settings.get("quantization") not in (None, *SCHEMES):
            raise ValueError(f"its quantization is {settings['quantization']!r}")
        if settings["task"] == "classify" and len(settings["labels"]) != settings["model"]["num_classes"]:
            raise ValueError(f"it has {len(settings['labels'])} labels for {settings['model']['num_classes']} classes")
    except KeyError as error:
        raise InputError(f"{path} was not written by this version (it lacks {error})") from error
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{path} was not written by this version ({error})") from error
    return settings


def _vocabularies(task: str) -> dict[str, str]:
    """The name of a vocabulary's size in a model's configuration -> the vocabulary."""
    return {"source_vocab": "source", "target_vocab": "target"} if task == "translate" else {"vocab": "text"}


def opened(folder: Path, *tasks: str) -> Trained:
    """The trained model of a run, for use.

    Args:
        folder: of the run.
        tasks: those that will do; none means any.

    Raises:
        InputError: there is no run, it is of another task, or a file of it is missing, damaged or of another run.
    """
    settings = _settings(folder)
    task = settings["task"]
    if tasks and task not in tasks:
        raise InputError(
            f"{folder} holds a run of `train {task}`; this needs one of `train {'` or `train '.join(tasks)}`"
        )
    vocabularies = {name: load(folder / f"{name}.json") for name in _vocabularies(task).values()}
    for size, name in _vocabularies(task).items():
        if vocabularies[name].size != settings["model"][size]:
            raise InputError(
                f"{folder / f'{name}.json'} is of another run: it has {vocabularies[name].size:,} tokens, the model "
                f"{settings['model'][size]:,}"
            )
    built = build(task, settings["model"])
    if settings.get("quantization") is not None:
        quantize(built, settings["quantization"])
    load_weights(built, Checkpoints(folder / "checkpoints").best())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return Trained(task, built.eval().to(device), device, vocabularies, settings["labels"], settings)


def write_copy(trained: Trained, run: Path, out: Path, quantization: str) -> None:
    """Writes a run with a model that was quantized, for use and not for training; the folder is whole or not there.

    Args:
        trained: of the run, its model quantized since.
        run: its folder.
        out: the new folder.
        quantization: the scheme.

    Raises:
        InputError: ``out`` is there already, or cannot be written.
    """
    best = Checkpoints(run / "checkpoints").best()

    def fill(folder: Path) -> None:
        write_json(folder / "config.json", {**trained.settings, "quantization": quantization})
        for name, vocabulary in trained.vocabularies.items():
            vocabulary.save(folder / f"{name}.json")
        checkpoint = folder / "checkpoints" / best.name
        checkpoint.mkdir(parents=True)
        save_weights(trained.model, checkpoint)
        write_json(checkpoint / "state.json", json.loads((best / "state.json").read_text(encoding="utf-8")))

    if out.exists():
        raise InputError(f"{out} exists; the copy must be a new folder")
    with _writing(out):
        write_folder(out, fill)


def build(task: str, sizes: dict[str, Any]) -> nn.Module:
    """A task's model, its weights drawn anew.

    Raises:
        InputError: no model has such sizes.
    """
    model, config = TASKS[task]
    try:
        return model(config(**sizes))
    except (TypeError, ValueError) as error:
        raise InputError(str(error)) from error


def digest(path: str | Path) -> str:
    """What tells a file's content from another's.

    Raises:
        InputError: it cannot be read, or not twice, as the standard input.
    """
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror})") from error
