"""python -m bench.tasks: trains the four tasks on real text; what they reach goes to bench/results/<device>/tasks.

python -m bench.tasks character-lm --data DIR    one task; on one core about 5 minutes
python -m bench.tasks --data DIR                 all four, about an hour on 2 cores

The texts: DIR/multi30k/{train,val,test_2016_flickr}.{en,de}.gz (one sentence a line), DIR/sst2/{train,dev}.tsv.gz
(text, tab, label), DIR/tinyshakespeare/input.txt.gz. An interrupted run is continued by the same command.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfm_kernels import _measured, cli
from tfm_kernels.bench import record
from tfm_kernels.training import metrics

from . import places

WORK = places.ROOT / ".benchmarks" / "tasks"  # runs: not for the repository
TRANSLATION = "--share-embeddings --norm-first --d-model 256 --heads 4 --layers 3 --feed-forward 1024 --dropout 0.2"


@dataclass(frozen=True)
class Task:
    """One task on one text.

    Attributes:
        command: of ``train``; {data} stands for the folder of texts.
        needs: files in that folder.
        target: what has to be reached, in words.
        reached: whether a result does.
        test: (source, reference) to translate when the training is done, or none.
    """

    command: str
    needs: tuple[str, ...]
    target: str
    reached: Callable[[dict[str, Any]], bool]
    test: tuple[str, ...] = ()


TASKS = {
    "character-lm": Task(
        "causal-lm {data}/tinyshakespeare/input.txt.gz --unit character --max-length 64 --batch 12 --steps 2000"
        " --d-model 128 --heads 4 --layers 4 --feed-forward 512 --dropout 0 --norm-first --activation gelu"
        " --positions learned --share-embeddings --weight-decay 0.1",
        ("tinyshakespeare/input.txt.gz",),
        "validation loss <= 1.95 nats a character",
        lambda found: found["best_loss"] <= 1.95,
    ),
    "classification": Task(
        "classify {data}/sst2/train.tsv.gz --validation {data}/sst2/dev.tsv.gz --steps 600 --save-every 50"
        " --d-model 128 --heads 4 --layers 2 --feed-forward 256 --dropout 0.3 --vocabulary 4000 --norm-first"
        " --learning-rate 0.0005 --weight-decay 0.1",
        ("sst2/train.tsv.gz", "sst2/dev.tsv.gz"),
        "dev accuracy >= 75 %",
        lambda found: found["accuracy"] >= 0.75,
    ),
    "masked-lm": Task(
        "masked-lm {data}/multi30k/train.en.gz --validation {data}/multi30k/val.en.gz --steps 2000 --d-model 192"
        " --heads 4 --layers 4 --feed-forward 768 --norm-first --share-embeddings --learning-rate 0.001",
        ("multi30k/train.en.gz", "multi30k/val.en.gz"),
        "accuracy at masked tokens at least twice that of always guessing the most frequent token",
        lambda found: found["accuracy"] >= 2.0 * found["unigram_accuracy"],
    ),
    "translation": Task(
        "translate {data}/multi30k/train.en.gz {data}/multi30k/train.de.gz --validation {data}/multi30k/val.en.gz"
        f" {{data}}/multi30k/val.de.gz {TRANSLATION} --steps 4000 --tokens 2048 --precision bf16"
        " --learning-rate 0.001 --warmup 300 --smoothing 0.1 --vocabulary 8000",
        tuple(
            f"multi30k/{part}.{tongue}.gz" for part in ("train", "val", "test_2016_flickr") for tongue in ("en", "de")
        ),
        "sacreBLEU >= 30 on test_2016_flickr with 4 beams",
        lambda found: found["bleu"] >= 30.0,
        ("multi30k/test_2016_flickr.en.gz", "multi30k/test_2016_flickr.de.gz"),
    ),
}


class TaskError(Exception):
    """A command of the task failed; the message says which."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.tasks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", nargs="*", metavar="task", help=f"of {', '.join(TASKS)}; none means all")
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="folder of the texts")
    parser.add_argument("--out", type=Path, help="where the result files go")
    parser.add_argument("--work", type=Path, default=WORK, help="where the runs are")
    parser.add_argument("--fresh", action="store_true", help="train anew instead of continuing")
    parser.add_argument("--options", default="", help="for train, after the task's own, such as '--precision bf16'")
    options = parser.parse_args(arguments)
    _measured.ignore()
    for name in options.task:
        if name not in TASKS:
            parser.error(f"task must be one of {', '.join(TASKS)}, got {name!r}")
    passed = True
    for name in options.task or TASKS:
        absent = [file for file in TASKS[name].needs if not (options.data / file).is_file()]
        if absent:
            print(f"bench.tasks: {name} needs {options.data / absent[0]}", file=sys.stderr)
            return 1
        try:
            passed &= _measure(name, options)
        except TaskError as error:
            print(f"bench.tasks: {error}", file=sys.stderr)
            return 1
    return 0 if passed else 1


def _measure(name: str, options: argparse.Namespace) -> bool:
    task, folder, now = TASKS[name], options.work / name, record.environment()
    if options.fresh:
        shutil.rmtree(folder, ignore_errors=True)
    options.work.mkdir(parents=True, exist_ok=True)
    words = f"train {task.command} --out {{run}} {options.options}".split()
    found = json.loads(_run(words, options.data, folder).splitlines()[-1])
    rows = metrics.read(folder / "metrics.jsonl")
    found["seconds"] = spent(rows)
    best = [row for row in rows if row["step"] == found["best_step"] and "validation_accuracy" in row]
    found["accuracy"] = best[-1]["validation_accuracy"]
    if task.test:
        command = ["translate", "{run}", *(f"{{data}}/{file}" for file in task.test), "--beams", "4"]
        command.insert(3, "--reference")
        errors = io.StringIO()
        with contextlib.redirect_stderr(errors):
            _run(command, options.data, folder)
        found["bleu"] = float(re.findall(r"sacreBLEU ([\d.]+)", errors.getvalue())[-1])
    result = {
        "environment": now,
        "command": " ".join(words),
        "result": found,
        "target": task.target,
        "reached": task.reached(found),
    }
    out = (options.out or places.RESULTS / now["device"] / "tasks") / f"{name}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{name}: {task.target}: {'reached' if result['reached'] else 'NOT REACHED'}; {json.dumps(found)}; {out}")
    return result["reached"]


def _run(words: list[str], data: Path, folder: Path) -> str:
    """A command's standard output; {data} and {run} are filled in, and a run that is there is continued."""
    words = [word.format(data=data, run=folder) for word in words]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = cli.main([*words, *(["--resume"] if words[0] == "train" else [])])
    if code:
        raise TaskError(f"{' '.join(words)} ended with exit code {code}")
    return printed.getvalue()


def spent(rows: list[dict[str, Any]]) -> float:
    """Seconds of training, validation left out at the end, over all parts of a run that was interrupted."""
    seconds = [row["seconds"] for row in rows if "seconds" in row]
    parts = [now - before if now > before else now for before, now in zip([0.0, *seconds], seconds, strict=False)]
    return round(sum(parts), 3)


if __name__ == "__main__":
    sys.exit(main())
