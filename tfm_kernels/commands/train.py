"""``train``: translation, classification, masked and causal language models, from users' files to a checkpoint."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import parser
from .parser import LARGEST, SEEDS, CommandError, told, within

if TYPE_CHECKING:
    from ..training.tasks import Job

# options that are fields of TrainingConfig
AS_NAMED = (
    *("steps", "accumulation", "schedule", "warmup", "weight_decay", "clip", "smoothing", "precision", "strategy"),
    *("seed", "log_every", "save_every"),
)
LAYERS, LONGEST, VOCABULARY = 1000, 1_000_000, 10_000_000  # beyond them memory ends, or the process in the tokenizer
SMALL = "--d-model 128 --heads 4 --feed-forward 512 --layers 2"


def add(commands: Any) -> None:
    """Declares the command and its four tasks."""
    train = parser.add(
        commands,
        "train",
        None,
        "train a model of one of four tasks on your own text",
        f"train translate train.en train.de --out run {SMALL} --steps 500",
        "train causal-lm book.txt --out run --unit character --max-length 64 --batch 12",
    )
    tasks = train.add_subparsers(metavar="task", required=True)
    translate = parser.add(
        tasks,
        "translate",
        _translate,
        "train an encoder-decoder on two files, one sentence a line, line n of one the translation of line n of the "
        "other (as WMT has them; .gz too)",
        f"train translate train.en train.de --validation val.en val.de --out run {SMALL} --steps 500",
        f"train translate train.en train.de --out run {SMALL} --steps 500 --resume",
        "translate run test.en --beams 4 --reference test.de",
    )
    translate.add_argument("source", help="file of sentences")
    translate.add_argument("target", help="file of their translations")
    translate.add_argument("--validation", nargs=2, default=(), metavar=("SOURCE", "TARGET"), help="two more files")
    classify = parser.add(
        tasks,
        "classify",
        _classify,
        "train a classifier on a file with a text, a tab and a label in each line",
        f"train classify train.tsv --validation dev.tsv --out run {SMALL} --steps 500",
        "classify run texts.txt",
    )
    masked = parser.add(
        tasks,
        "masked-lm",
        _masked_lm,
        "train a model to fill in hidden tokens, on plain text with one sentence a line",
        f"train masked-lm train.txt --validation val.txt --out run {SMALL} --steps 500",
    )
    causal = parser.add(
        tasks,
        "causal-lm",
        _causal_lm,
        "train a model to continue plain text, as one stream or, with --by-line, line by line",
        f"train causal-lm book.txt --out run --unit character --max-length 64 --batch 12 {SMALL} --steps 500",
        'generate run --prompt "To be" --tokens 200 --temperature 0.8',
    )
    for task in (classify, masked, causal):
        task.add_argument("text", help="file to learn from")
        task.add_argument("--validation", metavar="FILE", help="a file like it, to validate with")
    causal.add_argument("--hold-out", type=float, default=0.1, help="without --validation, the last part of the text")
    causal.add_argument("--by-line", action="store_true", help="each line is an example, with a start and an end")
    for task in (translate, classify, masked, causal):
        _add_model(task)
        _add_training(task)


def _add_model(task: argparse.ArgumentParser) -> None:
    group = task.add_argument_group("model (the defaults are the paper's)")
    group.add_argument("--d-model", type=int, default=512, help="width, default 512")
    group.add_argument("--heads", type=int, default=8, help="default 8")
    group.add_argument("--layers", type=int, default=6, help="of each stack, default 6")
    group.add_argument("--feed-forward", type=int, default=2048, help="width inside, default 2048")
    group.add_argument("--dropout", type=float, default=0.1, help="default 0.1")
    group.add_argument("--activation", default="relu", help="relu, gelu, gelu_tanh or silu")
    group.add_argument("--norm-first", action="store_true", help="norms before the sublayers (pre-LN)")
    group.add_argument("--positions", choices=("sinusoidal", "learned"), default="sinusoidal")
    group.add_argument("--share-embeddings", action="store_true", help="one matrix for embeddings and output")
    group = task.add_argument_group("text")
    group.add_argument("--unit", choices=("byte-pair", "character"), default="byte-pair", help="what a token is")
    group.add_argument("--vocabulary", type=int, default=8000, metavar="SIZE", help="byte pairs, default 8000")
    group.add_argument(
        "--max-length",
        type=int,
        default=256,
        help="of an example in tokens, default 256; longer ones are cut, pairs left out, and how many is told",
    )


def _add_training(task: argparse.ArgumentParser) -> None:
    group = task.add_argument_group("training")
    group.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="of the run; never written over")
    group.add_argument(
        "--resume", action="store_true", help="go on from the newest checkpoint; only --steps may differ"
    )
    group.add_argument("--steps", type=int, default=1000, help="updates, default 1000")
    group.add_argument("--tokens", type=int, help="of an update, padding included; default 4096")
    group.add_argument("--batch", type=int, metavar="EXAMPLES", help="at most so many examples an update")
    group.add_argument("--accumulation", type=int, default=1, help="parts an update is computed in, default 1")
    group.add_argument("--schedule", choices=("noam", "cosine", "constant"), default="cosine", help="default cosine")
    group.add_argument("--learning-rate", type=float, help="default 1 for noam, as in the paper, else 0.001")
    group.add_argument("--warmup", type=int, default=100, help="updates, default 100")
    group.add_argument("--weight-decay", type=float, default=0.01, help="default 0.01")
    group.add_argument("--clip", type=float, default=1.0, help="norm of the gradient, default 1; 0 for no limit")
    group.add_argument("--smoothing", type=float, default=0.0, help="of the labels, default 0; the paper has 0.1")
    group.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="fp32", help="default fp32")
    group.add_argument("--strategy", choices=("ddp", "fsdp"), default="ddp", help="under torchrun")
    group.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU where there is one")
    group.add_argument("--seed", type=int, default=0, help="default 0")
    group.add_argument("--log-every", type=int, default=1, help="updates between lines of metrics, default 1")
    group.add_argument("--save-every", type=int, default=500, help="updates between checkpoints, default 500")
    group.add_argument("--quiet", action="store_true", help="no progress bar")


def _text(options: argparse.Namespace) -> tuple[Any, int, dict[str, Any]]:
    """How text becomes tokens, the number of layers, and the sizes that every model has."""
    from ..training.tasks import Text

    sizes = {
        "d_model": options.d_model,
        "nhead": options.heads,
        "dim_feedforward": options.feed_forward,
        "dropout": options.dropout,
        "activation": options.activation,
        "norm_first": options.norm_first,
        "positions": options.positions,
        "share_embeddings": options.share_embeddings,
        "max_length": options.max_length,
    }
    return Text(options.unit, options.vocabulary, options.max_length), options.layers, sizes


def _translate(options: argparse.Namespace) -> int:
    with told():
        from ..training.tasks import translation

        _check(options)
        return _train(options, translation(options.source, options.target, options.validation, *_text(options)))


def _classify(options: argparse.Namespace) -> int:
    with told():
        from ..training.tasks import classification

        _check(options)
        return _train(options, classification(options.text, options.validation, *_text(options)))


def _masked_lm(options: argparse.Namespace) -> int:
    with told():
        from ..training.tasks import masked_lm

        _check(options)
        return _train(options, masked_lm(options.text, options.validation, *_text(options), options.seed))


def _causal_lm(options: argparse.Namespace) -> int:
    with told():
        from ..training.tasks import causal_lm

        _check(options)
        if not 0.0 <= options.hold_out < 1.0:
            raise CommandError(f"--hold-out must be in [0, 1), got {options.hold_out}")
        where = options.validation, options.hold_out, options.by_line
        return _train(options, causal_lm(options.text, *where, *_text(options), options.seed))


def _check(options: argparse.Namespace) -> None:
    """Refuses numbers that mean nothing, before any file is read."""
    counts = "steps", "accumulation", "log_every", "save_every", "tokens", "batch", "d_model", "heads", "feed_forward"
    within(options, **dict.fromkeys(counts, (1, LARGEST)), warmup=(int(options.schedule == "noam"), LARGEST))
    within(options, layers=(1, LAYERS), max_length=(3, LONGEST), vocabulary=(1, VOCABULARY), seed=SEEDS)
    within(options, **dict.fromkeys(("learning_rate", "clip", "weight_decay"), (0, None)))
    within(options, smoothing=(0, 1), dropout=(0, 1))


def _train(options: argparse.Namespace, job: Job) -> int:
    import torch

    from .. import training
    from ..training.allocator import keep_freed_memory
    from ..training.checkpoint import safetensors
    from ..training.loop import as_dict
    from ..training.run_folder import begun, build

    safetensors()  # or its absence would be found at the first checkpoint
    longest = max(job.examples.lengths)
    tokens = options.tokens or (options.batch * longest if options.batch else max(4096, longest))
    if tokens < longest:
        raise CommandError(f"--tokens must be at least the longest example, {longest}, got {tokens}")
    if options.accumulation > len(job.examples.lengths):
        raise CommandError(
            f"--accumulation must be at most the number of examples, {len(job.examples.lengths):,}, got "
            f"{options.accumulation:,}"
        )
    rate = options.learning_rate if options.learning_rate is not None else {"noam": 1.0}.get(options.schedule, 1e-3)
    config = training.TrainingConfig(
        tokens=tokens,
        max_examples=options.batch,
        learning_rate=rate,
        **{name: getattr(options, name) for name in AS_NAMED},
    )
    if options.device == "cuda" and not torch.cuda.is_available():
        raise CommandError("--device cuda needs a CUDA build of torch and a GPU; one of them is not here")
    keep_freed_memory()
    with training.processes(options.device) as here, ExitStack() as stack:
        torch.manual_seed(options.seed)
        model = build(job.task, job.sizes)
        shown = here.rank == 0
        if shown:
            stack.enter_context(begun(options.out, job.settings(as_dict(config)), job.vocabularies, options.resume))
            count = sum(parameter.numel() for parameter in model.parameters())
            print("; ".join([*job.remarks, f"{count:,} parameters"]), file=sys.stderr)
        here.wait()
        result = training.train(
            model,
            job.examples,
            config,
            options.out,
            d_model=options.d_model,
            validation=job.validation,
            processes=here,
            progress=shown and not options.quiet,
        )
        if shown:
            print(json.dumps({**result, **job.baseline}, allow_nan=False))
    return 0
