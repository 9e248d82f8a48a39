"""How commands are declared and how they fail: in one sentence, with exit code 1."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn


class CommandError(Exception):
    """Bad input; the message is the one sentence that the user reads."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence and exits with 1; argparse alone would print the usage and exit with 2."""

    def error(self, message: str) -> NoReturn:
        """Ends the program."""
        self.exit(1, f"{self.prog}: {message}; `{self.prog} --help` shows an example\n")


def add(commands: Any, name: str, run: Any, summary: str, *examples: str) -> argparse.ArgumentParser:
    """Adds a command, its help with examples.

    Args:
        commands: what ``add_subparsers`` returned.
        name: of the command.
        run: takes the options and returns the exit code; None for a command of commands.
        summary: one sentence without its full stop.
        examples: command lines without ``python -m tfm_kernels``.
    """
    lines = "\n".join(f"  python -m tfm_kernels {example}" for example in examples)
    parser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=f"example{'s' * (len(examples) > 1)}:\n{lines}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run, prog=parser.prog)
    return parser


@contextmanager
def told() -> Iterator[None]:
    """Within it, errors of input, and of a disk that is full or may not be written, become the command's."""
    from ..training import InputError

    try:
        yield
    except InputError as error:
        raise CommandError(str(error)) from error
    except BrokenPipeError:
        raise
    except OSError as error:
        raise CommandError(f"{error.filename or 'a file'} cannot be used ({error.strerror or error})") from error


def in_one_line(error: BaseException) -> str:
    """An error in one line."""
    text = (str(error).strip().splitlines() or ["no message"])[0]
    return f"{type(error).__name__}: {text}"
