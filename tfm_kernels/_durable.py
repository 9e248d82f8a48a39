"""Files and folders that are there whole or not at all, whatever kills the process or the machine."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


def write_bytes(path: Path, data: bytes) -> None:
    """Writes a file beside its name, brings it to the disk, and renames it."""
    partial = path.with_name(path.name + ".partial")
    with _or_nothing(path, partial):
        partial.write_bytes(data)
        sync(partial)
        os.replace(partial, path)
    sync(path.parent)


def write_json(path: Path, data: Any) -> None:
    """``write_bytes`` of a value as JSON; a ValueError, and no file, where it holds an infinity or a NaN."""
    write_bytes(path, (json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode())


def write_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Lets ``fill`` write a folder beside its name, brings all of it to the disk, and renames it.

    Args:
        path: the folder's name, which is not taken yet.
        fill: writes files into the folder it is given.

    Raises:
        OSError: the name is taken, or the disk is full; what was there before is untouched.
    """
    partial = path.with_name(path.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    with _or_nothing(path, partial):
        partial.mkdir(parents=True)
        fill(partial)
        for file in partial.rglob("*"):
            sync(file)
        sync(partial)
        os.rename(partial, path)
    sync(path.parent)


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Within it an OSError names the path, which that of a full disk does not do by itself."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


@contextmanager
def _or_nothing(path: Path, partial: Path) -> Iterator[None]:
    """Names ``path`` in an OSError, and gives back the room of what is half-written."""
    try:
        with named(path):
            yield
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        with suppress(OSError):
            partial.unlink()
        raise


def sync(path: Path) -> None:
    """Brings a file's or a folder's content to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
