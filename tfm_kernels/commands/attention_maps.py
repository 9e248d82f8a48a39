"""``attention-maps``: who attends to whom in a trained model, for one text, as pictures and as numbers."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import parser
from .parser import CommandError, legible, shortened, told

if TYPE_CHECKING:
    from torch import Tensor

    from ..training.run_folder import Trained
    from ..training.vocabulary import Vocabulary

VISIBLE = str.maketrans({" ": "\u00b7", "\n": "\u21b5", "\t": "\u21e5"})


def add(commands: Any) -> None:
    """Declares the command."""
    command = parser.add(
        commands,
        "attention-maps",
        _run,
        "draw the attention weights of every layer and head for one text, and keep the numbers beside the pictures",
        'attention-maps run "a cat sat on the mat" --out maps',
        'attention-maps run "a dog" --target "ein Hund" --layers "*.layers.0.*" --heads 0 3 --out maps',
    )
    command.add_argument("run_folder", type=Path, metavar="run", help="folder that `train` made")
    command.add_argument(
        "text", help="one sentence; where it is longer than the run's --max-length it is cut, and this is told"
    )
    command.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="new folder of what is written")
    command.add_argument("--target", help="of a translation run: the target; default: the model's own, greedy")
    command.add_argument("--layers", nargs="+", metavar="NAME", help="names or patterns such as '*.layers.0.*'")
    command.add_argument("--heads", nargs="+", type=int, metavar="N", help="counted from 0; default all")


def _run(options: argparse.Namespace) -> int:
    legible("the text", options.text)
    legible("--target", options.target)
    if options.out.exists() and (not options.out.is_dir() or any(options.out.iterdir())):
        raise CommandError(f"{options.out} is there already; --out must be a new folder")
    with told():
        from ..attention_maps import get_attention_maps
        from ..training.run_folder import opened

        trained = opened(options.run_folder)
        if options.target is not None and trained.task != "translate":
            raise CommandError(f"--target needs a run of `train translate`, got one of `train {trained.task}`")
        if not options.text.strip():
            raise CommandError("the text must hold something besides blanks")
        inputs, labels = _inputs(trained, options.text, options.target)
        try:
            maps = get_attention_maps(
                trained.model, *(ids.to(trained.device) for ids in inputs), layers=options.layers, heads=options.heads
            )
        except ValueError as error:
            raise CommandError(str(error)) from error
        try:
            written = _write(options.out, maps, labels, options.heads)
        except ImportError as error:
            raise CommandError(
                f"the numbers are in {options.out / 'maps.safetensors'}; pictures need matplotlib"
            ) from error
        except BaseException as error:
            shutil.rmtree(options.out, ignore_errors=True)  # it was new or empty
            if not isinstance(error, OSError):
                raise
            raise CommandError(f"{options.out} cannot be written ({error.strerror or error})") from error
        print("\n".join(written))
    return 0


def _write(out: Path, maps: dict[str, Tensor], labels: dict[str, list[str]], heads: list[int] | None) -> list[str]:
    """Numbers, then labels, then pictures; a line on each file that is of use to a reader."""
    from ..heat_maps import write_heat_maps
    from ..training.checkpoint import save_tensors

    out.mkdir(parents=True, exist_ok=True)
    save_tensors({name: weights.cpu().contiguous() for name, weights in maps.items()}, out / "maps.safetensors")
    found = {
        name: {"queries": labels[queries], "keys": labels[keys]} for name in maps for queries, keys in [_ends(name)]
    }
    (out / "labels.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    lines = []
    for ends in sorted({_ends(name) for name in maps}):
        group = {name: weights for name, weights in maps.items() if _ends(name) == ends}
        path = out / f"{'_'.join(dict.fromkeys(ends))}.png"
        write_heat_maps(path, group, query_labels=labels[ends[0]], key_labels=labels[ends[1]], head_names=heads)
        lines.append(f"{path}: {', '.join(group)}")
    return [*lines, f"{out / 'maps.safetensors'}: the same as numbers (1, heads, queries, keys)"]


def _ends(name: str) -> tuple[str, str]:
    """Which tokens look and which are looked at, by a layer's name."""
    if ".decoder." in f".{name}":
        return ("target", "source") if "multihead_attn" in name else ("target", "target")
    return "source", "source"


def _inputs(trained: Trained, text: str, target: str | None) -> tuple[list[Tensor], dict[str, list[str]]]:
    """The model's inputs, and what their tokens are called."""
    import torch

    from ..training.examples import enclosed
    from ..training.vocabulary import END, START

    longest = trained.settings["model"]["max_length"]
    if trained.task != "translate":
        vocabulary = trained.vocabularies["text"]
        ids = vocabulary.encode(text)
        shortened(len(ids) > longest - 2, longest - 2)
        ids = enclosed(ids, longest)
        ids = ids[: len(ids) - 1] if trained.task == "causal-lm" else ids
        return [torch.tensor([ids])], {"source": _named(vocabulary, ids)}
    source, other = trained.vocabularies["source"], trained.vocabularies["target"]
    ids = source.encode(text)
    shortened(len(ids) >= longest, longest - 1)
    ids = [*ids[: longest - 1], END]
    if target is None:
        from ..generation import generate

        room = min(longest - 1, 2 * len(ids) + 10)
        source_ids = torch.tensor([ids], device=trained.device)
        answer = generate(trained.model, source_ids, room, bos_id=START, eos_id=END)[0].tolist()
        answer = [number for number in answer if number != END]
    else:
        answer = other.encode(target)
        shortened(len(answer) >= longest, longest - 1)
        answer = [START, *answer[: longest - 1]]
    labels = {"source": _named(source, ids), "target": _named(other, answer)}
    return [torch.tensor([ids]), torch.tensor([answer])], labels


def _named(vocabulary: Vocabulary, ids: list[int]) -> list[str]:
    return [vocabulary.token(number).translate(VISIBLE) for number in ids]
