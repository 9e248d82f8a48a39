"""``generate``: text that a causal language model continues."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from . import parser
from .parser import CommandError, told


def add(commands: Any) -> None:
    """Declares the command."""
    command = parser.add(
        commands,
        "generate",
        _run,
        "continue a text",
        'generate run --prompt "To be" --tokens 200 --temperature 0.8 --top-k 20',
        "generate run --tokens 50 --greedy",
    )
    command.add_argument("run_folder", type=Path, metavar="run", help="folder that `train causal-lm` made")
    command.add_argument("--prompt", default="", help="how the text begins; default: at the start symbol")
    command.add_argument("--tokens", type=int, default=200, help="to add, default 200")
    command.add_argument("--greedy", action="store_true", help="the most probable token instead of a drawn one")
    command.add_argument("--temperature", type=float, default=1.0, help="below 1 is bolder, above 1 wilder; default 1")
    command.add_argument("--top-k", type=int, help="draw among the k most probable tokens")
    command.add_argument("--top-p", type=float, help="draw among the most probable tokens that share p together")
    command.add_argument("--seed", type=int, default=0, help="of what is drawn, default 0")


def _run(options: argparse.Namespace) -> int:
    if options.tokens < 1:
        raise CommandError(f"--tokens must be >= 1, got {options.tokens}")
    if not options.temperature > 0.0:
        raise CommandError(f"--temperature must be > 0, got {options.temperature}; --greedy takes the most probable")
    if options.top_k is not None and options.top_k < 1:
        raise CommandError(f"--top-k must be >= 1, got {options.top_k}")
    if options.top_p is not None and not 0.0 < options.top_p <= 1.0:
        raise CommandError(f"--top-p must be in (0, 1], got {options.top_p}")
    with told():
        import torch

        from ..training.run_folder import opened

        trained = opened(options.run_folder, "causal-lm")
        torch.manual_seed(options.seed)
        print(_continued(trained, options))
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
    prompt = vocabulary.encode(options.prompt)
    text = prompt if prompt and not trained.settings.get("by_line") else [START, *prompt]
    wanted = len(text) + options.tokens
    while len(text) < wanted:
        window = text if len(text) < longest else text[-max(1, longest // 2) :]
        with torch.inference_mode():
            found = generate(
                trained.model,
                torch.tensor([window]),
                min(wanted - len(text), longest - len(window)),
                eos_id=END,
                **how,
            )[0].tolist()
        new = found[len(window) :]
        text = [*text, *new]
        if END in new or not new:
            break
    return vocabulary.decode(text)
