"""``generate``: text that a causal language model continues, or a masked one completes."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from . import parser
from .parser import LARGEST, SEEDS, CommandError, legible, told, within


def add(commands: Any) -> None:
    """Declares the command."""
    command = parser.add(
        commands,
        "generate",
        _run,
        "continue a text, or fill in its <mask>s where the run is of a masked language model",
        'generate run --prompt "To be" --tokens 200 --temperature 0.8 --top-k 20',
        "generate run --tokens 50 --greedy",
        'generate masked-run --prompt "a man <mask> a dog"',
    )
    command.add_argument(
        "run_folder", type=Path, metavar="run", help="folder that `train causal-lm` or `train masked-lm` made"
    )
    command.add_argument(
        "--prompt",
        default="",
        help="how the text begins; default: at the start symbol. Characters that the run has never seen are left "
        "out, which is told",
    )
    command.add_argument("--tokens", type=int, default=200, help="to add, default 200")
    command.add_argument("--greedy", action="store_true", help="the most probable token instead of a drawn one")
    command.add_argument("--temperature", type=float, default=1.0, help="below 1 is safer, above 1 wilder; default 1")
    command.add_argument("--top-k", type=int, help="draw among the k most probable tokens")
    command.add_argument("--top-p", type=float, help="draw among the most probable tokens that share p together")
    command.add_argument("--seed", type=int, default=0, help="of what is drawn, default 0")


def _run(options: argparse.Namespace) -> int:
    within(options, tokens=(1, LARGEST), top_k=(1, LARGEST), seed=SEEDS)
    if not options.temperature > 0.0:
        raise CommandError(f"--temperature must be > 0, got {options.temperature}; --greedy takes the most probable")
    within(options, temperature=(None, None))
    if options.top_p is not None and not 0.0 < options.top_p <= 1.0:
        raise CommandError(f"--top-p must be in (0, 1], got {options.top_p}")
    legible("--prompt", options.prompt)
    with told():
        import torch

        from ..training.run_folder import opened

        trained = opened(options.run_folder, "causal-lm", "masked-lm")
        torch.manual_seed(options.seed)
        print(_continued(trained, options) if trained.task == "causal-lm" else _completed(trained, options.prompt))
    return 0


def _continued(trained: Any, options: argparse.Namespace) -> str:
    """The prompt and what follows it.

    A text that outgrows the model's longest sequence goes on from its last half: positions start anew there, and the
    model has seen windows that begin anywhere.
    """
    import torch

    from ..generation import generate
    from ..training.vocabulary import END, START

    how: dict[str, Any] = {}
    if not options.greedy:
        how = {"do_sample": True, "temperature": options.temperature, "top_k": options.top_k, "top_p": options.top_p}
    vocabulary, longest = trained.vocabularies["text"], trained.settings["model"]["max_length"]
    _tell_unknown(vocabulary, options.prompt)
    prompt = vocabulary.encode(options.prompt)
    text = prompt if prompt and not trained.settings.get("by_line") else [START, *prompt]
    wanted = len(text) + options.tokens
    while len(text) < wanted:
        window = text if len(text) < longest else text[-max(1, longest // 2) :]
        with torch.inference_mode():
            found = generate(
                trained.model,
                torch.tensor([window], device=trained.device),
                min(wanted - len(text), longest - len(window)),
                eos_id=END,
                **how,
            )[0].tolist()
        new = found[len(window) :]
        text = [*text, *new]
        if END in new or not new:
            break
    return vocabulary.decode(text)


def _tell_unknown(vocabulary: Any, prompt: str) -> None:
    """Says on stderr which characters of a prompt are unknown, if any."""
    from ..training.vocabulary import UNKNOWN

    found = "".join(one for one in dict.fromkeys(prompt) if UNKNOWN in vocabulary.encode(one))
    if found:
        print(f"the run's vocabulary lacks {found!r} of --prompt, which the text leaves out", file=sys.stderr)


def _completed(trained: Any, prompt: str) -> str:
    """The prompt with the most probable token at each <mask>, and a line of candidates for each."""
    import torch

    from ..training.vocabulary import END, MASK, SPECIALS, START

    vocabulary, longest = trained.vocabularies["text"], trained.settings["model"]["max_length"]
    first, *others = prompt.split(SPECIALS[MASK])
    if not others:
        raise CommandError(f"--prompt must hold {SPECIALS[MASK]} for a masked language model, got {prompt!r}")
    ids = [START, *vocabulary.encode(first)]
    for before, piece in zip([first, *others], others, strict=False):
        if vocabulary.kind == "byte-pair" and before.endswith(" "):  # a blank belongs to the word behind it
            ids = [*ids[:-1], MASK] if vocabulary.token(ids[-1]) == " " else [*ids, MASK]
        else:
            ids.append(MASK)
        ids += vocabulary.encode(piece)
    ids.append(END)
    if len(ids) > longest:
        raise CommandError(f"--prompt must have at most {longest} tokens, got {len(ids)}")
    _tell_unknown(vocabulary, "".join([first, *others]))
    with torch.inference_mode():
        scores = trained.model(torch.tensor([ids], device=trained.device))[0]
    lines, offset = [], len(SPECIALS)  # nothing hidden was ever a special token
    for at in [at for at, number in enumerate(ids) if number == MASK]:
        best = scores[at, offset:].softmax(-1).topk(min(5, vocabulary.size - offset))
        ids[at] = int(best.indices[0]) + offset
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        lines.append(", ".join(f"{vocabulary.token(number + offset)!r} {share:.3f}" for number, share in pairs))
    return "\n".join([vocabulary.decode(ids), *lines])
