"""No byte outside of a tensor: guards around every tensor, offsets beyond 2**31, and NVIDIA's compute-sanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from bench import record
from bench.record import Results
from tfm_kernels.testing import run

from .part import RED, UNAVAILABLE, Item, Room
from .repeats import assert_same

GUARD = 4096  # bytes on either side; at least a multiple of 16, so that a tensor lies as aligned as without
FILLS = (0x00, 0xFF)  # 0xFF..FF is NaN in every floating type, and -1
TOOLS = ("memcheck", "racecheck", "synccheck")
_BROKEN = 9  # compute-sanitizer's exit code where it found something
_UNUSABLE = ("Device not supported", "No attachable process", "Failed to initialize", "not supported on this device")


def items(room: Room, results: Results) -> Iterator[Item]:
    for subject in room.built():
        for name, (op, inputs) in subject.branches(room.device).items():
            yield Item(
                f"{subject.backend} {name} between guards", partial(guarded_call, op, inputs, subject.backend), op
            )
        for name, check in subject.large.items():
            yield Item(f"{subject.backend} {name}", partial(_large, check, room.device), name.split()[0])
    stems = dict.fromkeys(subject.stem for subject in room.subjects)
    pairs = [(tool, stem) for tool in TOOLS for stem in stems]
    for place, (tool, stem) in enumerate(pairs):
        yield Item(f"{tool} {stem}", partial(sanitize, tool, stem, room, len(pairs) - place))


def guarded_call(op: str, inputs: Mapping[str, Any], backend: str) -> dict[str, Any]:
    """Runs a call between guards of either fill: the guards must stay, and what lies in them must not show."""
    plain = run(op, inputs, backend)
    for fill in FILLS:
        with guards(fill) as guard:
            given = {name: guard(t) if isinstance(t, Tensor) else t for name, t in inputs.items()}
            douts = {name: None if t is None else guard(t) for name, t in plain.douts.items()}
            found = run(op, given, backend, douts=douts)
        assert_same(plain, found, f"what lies beside the tensors shows in it (guards of {fill:#x})")
    return {}


@contextmanager
def guards(fill: int) -> Iterator[Any]:
    """Yields t -> copy of t between guards; inside, torch.empty and torch.zeros give guarded tensors too.

    Raises:
        AssertionError: at the end, where a guard was written to.
    """
    kept: list[tuple[Tensor, int]] = []
    empty = torch.empty

    def new(*shape: Any, **options: Any) -> Tensor:
        like = empty(*shape, **{**options, "device": "meta"})
        size = like.numel() * like.element_size()
        buffer = empty(size + 2 * GUARD, dtype=torch.uint8, device=options.get("device", "cpu")).fill_(fill)
        kept.append((buffer, size))
        return buffer[GUARD : GUARD + size].view(like.dtype).view(like.shape)

    def guard(t: Tensor) -> Tensor:
        return new(t.shape, dtype=t.dtype, device=t.device).copy_(t)

    zeros = lambda *shape, **options: new(*shape, **options).zero_()  # noqa: E731
    with mock.patch.object(torch, "empty", new), mock.patch.object(torch, "zeros", zeros):
        yield guard
    for buffer, size in kept:
        outside = torch.cat([buffer[:GUARD], buffer[GUARD + size :]])
        assert bool((outside == fill).all()), f"a guard of a tensor of {size} bytes was written to"


def _large(check: Any, device: str) -> dict[str, Any]:
    check(device)
    torch.cuda.empty_cache()
    return {}


def sanitize(tool: str, stem: str, room: Room, sharing: int = 1) -> dict[str, Any]:
    """The smallest call of each branch under compute-sanitizer, each tensor in an allocation of its own.

    Args:
        tool: one of TOOLS.
        stem: the op's.
        room: the part's.
        sharing: how many such runs share the time that is left, this one counted in.
    """
    program = shutil.which("compute-sanitizer")
    if program is None:
        return {"state": UNAVAILABLE, "why": "compute-sanitizer is not found"}
    command = [program, "--tool", tool, "--error-exitcode", str(_BROKEN), sys.executable]
    command += ["-m", "bench.gpu.sanitized", stem]
    limit = max(room.left() / sharing, 1.0)
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(command, cwd=record.ROOT, env=environment, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"state": UNAVAILABLE, "why": f"did not end within the {limit:.0f} s that were left"}
    words = done.stdout + done.stderr
    if done.returncode == 0 and "ran every branch" in words:
        return {}
    if _unusable(words):
        return {"state": UNAVAILABLE, "why": next(line for line in words.splitlines() if _unusable(line))[:300]}
    return {"state": RED, "why": words[-2000:]}


def _unusable(words: str) -> bool:
    """Whether compute-sanitizer says that it cannot run here."""
    return any(sign in words for sign in _UNUSABLE)
