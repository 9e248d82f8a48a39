"""The command line, ``python -m tfm_kernels <command>``: exit code 0, or 1 with one sentence that says why."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from .diagnosis import doctor


class CommandError(Exception):
    """Bad input; the message is the one sentence that the user reads."""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence and exits with 1; argparse alone would print the usage and exit with 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(1, f"{self.prog}: {message}; `{self.prog} --help` shows an example\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: as on the command line, without the program's name; None takes sys.argv's.

    Returns:
        The exit code: 0, or 1 where the input is bad or the command's verdict is a failure.
    """
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except CommandError as error:
        print(f"{options.prog}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{options.prog}: stopped by the keyboard", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m tfm_kernels",
        description="Fused Transformer layers for PyTorch, and the proof that the numbers still hold.",
        epilog="example:  python -m tfm_kernels doctor",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(metavar="command", required=True)
    _add(commands, "doctor", _doctor, "say what is built, what is missing, and how to mend it", "doctor")
    return parser


def _add(commands, name: str, run, summary: str, *examples: str) -> argparse.ArgumentParser:
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


def _doctor(options: argparse.Namespace) -> int:
    print(doctor())
    return 0
