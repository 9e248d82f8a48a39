"""The file of results of one op: what it was measured on, and one record a group, written as they come."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import textwrap
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from .. import _library, _measured
from .._version import __version__

NOTICEABLE = 100e-6  # seconds; below that a call's fixed cost decides, told apart
PROTOCOL = 1  # raised whenever what is timed, or how, changes: numbers of two protocols are never compared
ROOT = Path(__file__).resolve().parent.parent.parent  # of the checkout; where the package was installed, it lies here
_PACKAGE = (("tfm_kernels", "*.py"), ("tfm_kernels", "_C*"))
_CHECKOUT = (("csrc", "*.*"), ("bench", "*.py"))
_MEASURED = ("tfm_kernels", "csrc", "bench", ":!bench/results")


def environment() -> dict[str, Any]:
    """Everything that a number depends on and that can be read."""
    return {
        "protocol": PROTOCOL,
        "device": "cpu",
        **machine(),
        "commit": git("rev-parse", "--short=12", "HEAD") if checkout() else f"version {__version__}",
        "dirty": checkout() and bool(git("status", "--porcelain", "--", *_MEASURED)),
        "sources": sources(_PACKAGE + _CHECKOUT if checkout() else _PACKAGE),
        "date": today(),
    }


def machine() -> dict[str, Any]:
    """The processor and what runs on it."""
    build = _library.cpu_extension.build_info() if _library.cpu_extension is not None else {}
    return {
        "cpu": _measured.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "compiler": build.get("compiler", "the C++ extension is not built"),
    }


def today() -> str:
    """The date and time, UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def checkout() -> bool:
    """Whether this is the project's own tree: a package installed below another project's has that one's commits."""
    return (ROOT / "csrc").is_dir() and (ROOT / "setup.py").is_file()


def git(*words: str) -> str:
    """What git says of this tree; "unknown" where there is no git or no repository."""
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def sources(where: Iterable[tuple[str, str]]) -> str:
    """A digest of the files that are measured, committed or not: results are only continued on the same ones.

    Args:
        where: (folder, pattern) of the files, from the tree's root.
    """
    digest = hashlib.sha256()
    for folder, pattern in where:
        for path in sorted((ROOT / folder).rglob(pattern)):
            digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


class Results:
    """One op's results on disk.

    Args:
        path: the JSON file; its folders are made.
        now: environment() of this run.
        fresh: start anew even where the file could be continued.
    """

    def __init__(self, path: Path, now: dict[str, Any], fresh: bool = False) -> None:
        self.path = path
        self._texts: dict[str, tuple[dict[str, Any], str]] = {}  # of groups: written with each of those to come
        self.data: dict[str, Any] = {"environment": now, "limits": {}, "groups": []}
        if not fresh and path.exists():
            found = json.loads(path.read_text())
            if {**found["environment"], "date": None} == {**now, "date": None}:
                self.data = found

    def has(self, key: str) -> bool:
        """Whether a group was measured to its end, by this or by an interrupted run of the same sources."""
        return any(group["key"] == key and not group.get("unfinished") for group in self.data["groups"])

    def add(self, group: dict[str, Any]) -> None:
        """Adds a group's record, in the place of an unfinished one, and writes the file."""
        self.put(group)
        self.write()

    def put(self, group: dict[str, Any]) -> None:
        """Adds a group's record; whoever puts several at once writes the file behind them."""
        self.data["groups"] = [*(kept for kept in self.data["groups"] if kept["key"] != group["key"]), group]

    def write(self) -> None:
        """Writes the whole file beside its name, then renames it: an interruption leaves the old one whole."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        text = json.dumps({**self.data, "groups": []}, indent=1)
        if self.data["groups"]:
            groups = ",\n".join(map(self._text, self.data["groups"]))
            text = text.replace('"groups": []', f'"groups": [\n{groups}\n ]', 1)
        partial.write_text(text + "\n")
        partial.replace(self.path)

    def _text(self, group: dict[str, Any]) -> str:
        """A group as it stands in the file; made once, or a file of 1,700 would cost a minute to fill."""
        found = self._texts.get(group["key"])
        if found is None or found[0] is not group:
            found = group, textwrap.indent(json.dumps(group, indent=1), "  ")
            self._texts[group["key"]] = found
        return found[1]


def best_torch(group: Mapping[str, Any], direction: str) -> Mapping[str, Any]:
    """The row of the fastest PyTorch path of a group: eager or, where it was tried, compiled."""
    candidates = [
        row for row in group["rows"] if row["direction"] == direction and row["implementation"].startswith("torch")
    ]
    return min(candidates, key=lambda row: row["median"])


def load(folder: Path) -> dict[str, dict[str, Any]]:
    """Op stem -> the results in a folder; empty where there are none."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
