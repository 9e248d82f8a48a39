"""How commands are declared and how they fail: in one sentence, with exit code 1."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

LARGEST = 2**31 - 1  # of a number that counts something
SEEDS = (-(2**63), 2**64 - 1)  # that torch.manual_seed takes


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


def within(options: argparse.Namespace, **bounds: tuple[float | None, float | None]) -> None:
    """Refuses numbers outside their bounds; a number that was left out passes.

    Args:
        options: of the command.
        bounds: option -> the least and the largest value, each None for none; what is not finite is always refused.
    """
    for name, (least, largest) in bounds.items():
        value, option = getattr(options, name), f"--{name.replace('_', '-')}"
        if value is None:
            continue
        if least is not None and not value >= least:
            raise CommandError(f"{option} must be >= {least}, got {value}")
        if isinstance(value, float) and not math.isfinite(value):
            raise CommandError(f"{option} must be a finite number, got {value}")
        if largest is not None and value > largest:
            raise CommandError(f"{option} must be <= {largest}, got {value}")


def legible(name: str, text: str | None) -> None:
    """Refuses words of the command line whose bytes are not UTF-8; None passes."""
    try:
        (text or "").encode()
    except UnicodeEncodeError as error:
        byte = ord(error.object[error.start]) & 0xFF  # Python hides it in a surrogate
        raise CommandError(f"{name} must be UTF-8 text, got byte 0x{byte:02x} in {text!r}") from error


def shortened(count: int, tokens: int) -> None:
    """Says on stderr how many lines were cut, if any."""
    if count:
        were = "line of more than {} tokens was" if count == 1 else "lines of more than {} tokens were"
        print(f"{count:,} {were.format(f'{tokens:,}')} cut", file=sys.stderr)


@contextmanager
def new_file(option: str, path: Path | None) -> Iterator[Callable[[str], Any]]:
    """A new file, opened before the work whose result it is for; what writes all of it, or prints where path is None.

    Where the work fails, the file is not there. Where the file cannot take its text, as on a full disk, it is not there
    either, and the text is printed.

    Raises:
        CommandError: the file is there already, or cannot be made or written.
    """
    if path is None:
        yield sys.stdout.write
        return
    try:
        file = path.open("x", encoding="utf-8")
    except FileExistsError as error:
        raise CommandError(f"{path} exists; {option} must be a new file") from error
    except OSError as error:
        raise CommandError(f"{path} cannot be written ({error.strerror})") from error

    def write(text: str) -> None:
        try:
            with file:
                file.write(text)
        except OSError as error:
            sys.stdout.write(text)
            words = f"{path} cannot be written ({error.strerror}); what was to be in it is printed instead"
            raise CommandError(words) from error

    try:
        with file:
            yield write
    except BaseException:
        path.unlink(missing_ok=True)
        raise


@contextmanager
def told() -> Iterator[None]:
    """Within it, errors of input, of a disk that is full or may not be written, and of the library are the command's.

    ``python -X dev -m tfm_kernels ...`` lets the library's errors through, with their traceback.
    """
    from ..training import InputError

    try:
        yield
    except InputError as error:
        raise CommandError(str(error)) from error
    except BrokenPipeError:
        raise
    except OSError as error:
        raise CommandError(f"{error.filename or 'a file'} cannot be used ({error.strerror or error})") from error
    except (ValueError, RuntimeError, OverflowError, MemoryError) as error:
        if sys.flags.dev_mode:
            raise
        sentence = in_one_line(error)
        raise CommandError(sentence.removeprefix("ValueError: ")) from error  # the library's sentences name their op


def stages(program: str) -> Callable[[str], None]:
    """Tells stages on stderr: one line that is written over on a terminal, the main stages elsewhere; "" ends it."""

    def tell(stage: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{program}: {stage}" if stage else "\r\033[K", end="", file=sys.stderr, flush=True)
        elif stage and not stage.startswith("module") and not stage.endswith("% done"):
            print(f"{program}: {stage}", file=sys.stderr, flush=True)

    return tell


def in_one_line(error: BaseException) -> str:
    """An error in one line."""
    text = (str(error).strip().splitlines() or ["no message"])[0]
    return f"{type(error).__name__}: {text}"
