"""``translate``: each line of a text, by a model that ``train translate`` made."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from . import parser
from .parser import LARGEST, CommandError, new_file, shortened, told, within

TOKENS = 2048  # of a batch of sources, padding included
BEAMS = 1000  # each of them keeps a cache of its own
PENALTY = 50  # a power of the number of tokens, which has to stay below 1e308


def add(commands: Any) -> None:
    """Declares the command."""
    command = parser.add(
        commands,
        "translate",
        _run,
        "print the translation of each line, by beam search",
        "translate run test.en > test.out",
        "translate run test.en --beams 4 --reference test.de --out test.out",
    )
    command.add_argument("run_folder", type=Path, metavar="run", help="folder that `train translate` made")
    command.add_argument(
        "text",
        help="file of sentences, one a line; - is the standard input. What is longer than the run's --max-length is "
        "cut, and how many lines were is told",
    )
    command.add_argument(
        "--out",
        type=Path,
        help="write the translations to this new file instead of printing them; should "
        "the disk be full, they are printed after all",
    )
    command.add_argument("--beams", type=int, default=4, help="default 4; 1 is greedy")
    command.add_argument("--length-penalty", type=float, default=1.0, help="default 1; larger prefers longer ones")
    command.add_argument("--max-tokens", type=int, help="of a translation; default 1.5 times the longest source, + 10")
    command.add_argument("--reference", help="file of right translations: print sacreBLEU at the end")


def _run(options: argparse.Namespace) -> int:
    if options.beams < 1 or (options.max_tokens is not None and options.max_tokens < 1):
        raise CommandError(f"--beams and --max-tokens must be >= 1, got {options.beams} and {options.max_tokens}")
    within(options, beams=(1, BEAMS), max_tokens=(1, LARGEST), length_penalty=(-PENALTY, PENALTY))
    if options.beams == 1 and options.length_penalty != 1.0:
        raise CommandError(f"--length-penalty needs --beams of 2 or more, got {options.length_penalty} with --beams 1")
    with told():
        from ..training.run_folder import opened
        from ..training.text_file import read_lines

        lines = read_lines(options.text)
        references = None if options.reference is None else read_lines(options.reference)
        if references is not None and len(references) != len(lines):
            raise CommandError(
                f"{options.text} has {len(lines):,} lines but {options.reference} has {len(references):,}"
            )
        score = None if references is None else _bleu()
        with new_file("--out", options.out) as write:  # before the work, which may take hours
            found = _translations(opened(options.run_folder, "translate"), lines, options)
            write("".join(f"{line}\n" for line in found))
        if score is not None:
            print(f"sacreBLEU {score(found, [references]).score:.2f}", file=sys.stderr)
    return 0


def _translations(trained: Any, lines: list[str], options: argparse.Namespace) -> list[str]:
    """In the order of the lines; a blank one stays blank."""
    import torch

    from ..generation import generate
    from ..training.batches import TokenBatches
    from ..training.examples import padded
    from ..training.progress import Progress
    from ..training.vocabulary import END, START

    source, target = trained.vocabularies["source"], trained.vocabularies["target"]
    longest = trained.settings["model"]["max_length"]
    encoded = {at: source.encode(line) for at, line in enumerate(lines) if line}
    shortened(sum(len(ids) >= longest for ids in encoded.values()), longest - 1)
    rows = {at: [*ids[: longest - 1], END] for at, ids in encoded.items()}
    found = [""] * len(lines)
    if not rows:
        return found
    places = list(rows)
    lengths = [len(row) for row in rows.values()]
    batches = TokenBatches(lengths, max(TOKENS, max(lengths)), 0, shuffle=False).epoch(0)
    bar = Progress(len(batches), 0, sys.stderr.isatty())
    for number, batch in enumerate(batches, 1):
        chosen = [places[at] for at in batch]
        ids = padded([rows[at] for at in chosen]).to(trained.device)
        room = options.max_tokens or ids.shape[1] * 3 // 2 + 10
        with torch.inference_mode():
            guesses = generate(
                trained.model,
                ids,
                min(room, longest - 1),
                bos_id=START,
                eos_id=END,
                num_beams=options.beams,
                length_penalty=options.length_penalty,
            )
        for at, row in zip(chosen, guesses.tolist(), strict=True):
            found[at] = target.decode(row).strip().replace("\n", " ")
        bar.step(number, "")
    bar.close()
    return found


def _bleu() -> Any:
    """The library's function, asked for before the work."""
    try:
        from sacrebleu import corpus_bleu
    except ImportError as error:
        raise CommandError("--reference needs the package sacrebleu; `pip install sacrebleu` brings it") from error
    return corpus_bleu
