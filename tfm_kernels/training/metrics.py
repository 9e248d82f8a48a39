"""What a run measured, one JSON object a line, and the picture of it."""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .._durable import named, write_bytes
from .text_file import InputError


class Metrics:
    """A file of lines ``{"step": ..., ...}``, appended to as a run goes on.

    Args:
        path: of the file.
        step: lines of later steps, and a last line that was cut off, are removed: the run computes them again.
    """

    def __init__(self, path: Path, step: int) -> None:
        self._path = path
        kept = [row for row in read(path) if row["step"] <= step]
        write_bytes(path, "".join(map(_line, kept)).encode())
        self._file = path.open("a", encoding="utf-8")

    def add(self, row: dict[str, Any]) -> None:
        """Appends a line; it is in the file when the call returns."""
        with named(self._path):
            self._file.write(_line(row))
            self._file.flush()

    def sync(self) -> None:
        """Brings all lines to the disk, which has to come before the checkpoint that counts on them."""
        with named(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file."""
        with named(self._path):
            self._file.close()


def _line(row: dict[str, Any]) -> str:
    return json.dumps(finite(row), allow_nan=False) + "\n"


def finite(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with None for infinities and NaN, which JSON has no words for."""
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}


def read(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file of metrics; none where there is no file.

    Raises:
        InputError: the file cannot be read, or a line is not one that ``Metrics`` wrote.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read ({error})") from error
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:  # the process was killed while it wrote this line
            break
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise InputError(f"{path} must have an object with a step in each line, got line {number}: {line[:60]!r}")
        rows.append(row)
    return rows


def draw(rows: list[dict[str, Any]], path: Path) -> bool:
    """Writes the loss curves as a PNG. False, and no file, where matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="step", ylabel="loss a token, nats")
    for key, label, style in (("loss", "training", "-"), ("validation_loss", "validation", "o-")):
        points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label, linewidth=1, markersize=3)
    axes.grid(alpha=0.3)
    if axes.lines:  # a run of few updates may have no loss at all
        axes.legend()
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=120)
    write_bytes(path, image.getvalue())
    return True
