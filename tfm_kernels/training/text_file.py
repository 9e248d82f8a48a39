"""Users' text files, read whole and checked: what is wrong with one is told in one sentence."""

from __future__ import annotations

import gzip
import sys
import zlib
from pathlib import Path


class InputError(Exception):
    """The user's files or options do not fit; the message is the one sentence to show."""


def read_text(path: str | Path) -> str:
    """The text of a UTF-8 file, of one in a ``.gz``, or of the standard input (``-``); without a byte-order mark.

    Raises:
        InputError: the file cannot be read, is not UTF-8, or holds nothing but blanks.
    """
    try:
        raw = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        if Path(path).suffix == ".gz":
            raw = gzip.decompress(raw)
    except (OSError, EOFError, zlib.error) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InputError(f"{path} cannot be read ({why})") from error
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"{path} must be UTF-8 text, got byte 0x{raw[error.start]:02x} in line {line}; "
            f"`iconv -f latin1 -t utf-8` is one way to convert it"
        ) from error
    if not text.strip():
        raise InputError(f"{path} holds no text")
    return text.replace("\r\n", "\n")


def read_lines(path: str | Path) -> list[str]:
    r"""The lines of a text file; only ``\n`` ends one, because corpora hold other separators within sentences."""
    lines = [line.strip() for line in read_text(path).split("\n")]
    return lines[:-1] if not lines[-1] else lines


def read_sentences(path: str | Path) -> list[str]:
    """The lines of a text file that are not blank."""
    return [line for line in read_lines(path) if line]


def read_parallel(source: str | Path, target: str | Path) -> list[tuple[str, str]]:
    """Pairs of lines of two files; a pair with a blank half is left out.

    Raises:
        InputError: as ``read_text``, or the files differ in their number of lines, or no pair is left.
    """
    sources, targets = read_lines(source), read_lines(target)
    if len(sources) != len(targets):
        raise InputError(
            f"{source} has {len(sources):,} lines but {target} has {len(targets):,}; "
            f"line n of one must translate line n of the other"
        )
    pairs = [(one, other) for one, other in zip(sources, targets, strict=True) if one and other]
    if not pairs:
        raise InputError(f"{source} and {target} have no line in common that is not blank")
    return pairs


def read_labelled(path: str | Path) -> list[tuple[str, str]]:
    """(text, label) of every line ``text<TAB>label`` that is not blank.

    Raises:
        InputError: as ``read_text``, or a line has no tab, no text or no label.
    """
    rows = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip():
            text, _, label = (part.strip() for part in line.rpartition("\t"))
            if not (text and label):
                raise InputError(
                    f"{path} must have a text, a tab and a label in each line, got line {number}: {line[:60]!r}"
                )
            rows.append((text, label))
    return rows
