"""No byte outside of a tensor, no race and no barrier that some threads miss: NVIDIA's compute-sanitizer."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

from bench import places
from tfm_kernels.bench.record import Results

from .part import RED, UNAVAILABLE, Item, Room
from .subject import GpuSubject

TOOLS = ("memcheck", "racecheck", "synccheck")
PROCESSES = 10  # each watches a program of its own, which loads torch and its kernels for longer than it runs them
_BROKEN = 9  # compute-sanitizer's exit code where it found something
_UNUSABLE = ("Device not supported", "No attachable process", "Failed to initialize", "not supported on this device")


def items(room: Room, results: Results) -> Iterator[Item]:
    runs = [(tool, subject) for tool in TOOLS for subject in room.subjects]
    list(room.built())  # all of them, or none yet
    for place, (tool, subject) in enumerate(runs):
        sharing = math.ceil((len(runs) - place) / PROCESSES)
        yield subject.item(f"{subject.stem} {tool}", partial(sanitize, tool, subject, room, sharing))


def sanitize(tool: str, subject: GpuSubject, room: Room, sharing: int = 1) -> dict[str, Any]:
    """The smallest call of each branch under compute-sanitizer, each tensor in an allocation of its own.

    Args:
        tool: one of TOOLS.
        subject: whose calls.
        room: the part's.
        sharing: how many such runs share the time that is left, this one counted in, one after another.
    """
    program = shutil.which("compute-sanitizer")
    if program is None:
        return {"state": UNAVAILABLE, "why": "compute-sanitizer is not found"}
    command = [program, "--tool", tool, "--error-exitcode", str(_BROKEN), sys.executable]
    command += ["-m", "bench.gpu.sanitized", subject.stem, subject.backend]
    limit = max(room.left() / sharing, 1.0)
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(command, cwd=places.ROOT, env=environment, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"state": UNAVAILABLE, "why": f"did not end within {limit:.0f} s, its share", "unfinished": True}
    words = done.stdout + done.stderr
    if done.returncode == 0 and "ran every branch" in words:
        return {}
    if _unusable(words):
        return {"state": UNAVAILABLE, "why": next(line for line in words.splitlines() if _unusable(line))[:300]}
    return {"state": RED, "why": words[-2000:]}


def _unusable(words: str) -> bool:
    """Whether compute-sanitizer says that it cannot run here."""
    return any(sign in words for sign in _UNUSABLE)
