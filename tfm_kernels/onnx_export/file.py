"""The file: beside its name until it has proven itself, then under it."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .._durable import sync

LARGEST = 2**31 - 2**26  # bytes of weights in one file: protobuf ends at 2 GiB, and the graph needs room


@contextmanager
def replaced(path: Path) -> Iterator[Callable[[Any], Path]]:
    """A function that writes a model and gives the file; at the block's end that takes the name ``path``.

    Where the block raises, what lay at ``path`` lies there still, and nothing else does.

    Raises:
        OSError: it cannot be written; ``filename`` is ``path``.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(21, os.strerror(21))
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    file = folder / path.name
    try:
        yield lambda model: _write(model, file, path)
        try:
            for part in sorted(folder.iterdir(), key=lambda part: part == file):  # the weights before the graph
                sync(part)
                os.replace(part, path.with_name(part.name))
            sync(path.parent)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write(model: Any, file: Path, path: Path) -> Path:
    import onnx_ir

    weights = sum(each.const_value.nbytes for each in model.graph.initializers.values() if each.const_value is not None)
    # a name of its own: until the graph is replaced, an older one goes on reading its own weights
    aside = f"{file.name}.{secrets.token_hex(4)}.data" if weights > LARGEST else None
    try:
        onnx_ir.save(model, file, external_data=aside)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    return file
