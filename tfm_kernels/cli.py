"""The command line, ``python -m tfm_kernels <command>``: exit code 0, or 1 with one sentence that says why."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from .commands import attention_maps, bench, classify, doctor, export, generate, prove, quantize, train, translate, tune
from .commands.parser import CommandError, Parser

COMMANDS = (doctor, prove, bench, tune, train, translate, generate, classify, quantize, export, attention_maps)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: as on the command line, without the program's name; None takes sys.argv's.

    Returns:
        The exit code: 0, or 1 where the input is bad or the command's verdict is a failure.
    """
    options = _parser().parse_args(arguments)
    try:
        code = options.run(options)
        _flush()
        return code
    except CommandError as error:
        why = str(error)
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        why = ""
    except OSError as error:
        why = f"{error.filename or 'the output'} cannot be used ({error.strerror or error})"
    except KeyboardInterrupt:
        why = "stopped by the keyboard"
    if why:
        print(f"{options.prog}: {why}", file=sys.stderr)
    try:
        _flush()
    except OSError:  # or Python would try again at its end, and print a traceback
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def _flush() -> None:
    """Writes what was printed, so that a full disk or a closed pipe shows here."""
    if sys.stdout is not None:
        sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m tfm_kernels",
        description="Fused Transformer layers for PyTorch, and the proof that the numbers still hold.",
        epilog="example:  python -m tfm_kernels doctor",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(metavar="command", required=True)
    for command in COMMANDS:
        command.add(commands)
    return parser
