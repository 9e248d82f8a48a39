"""No byte outside of a tensor: guards around every tensor, and offsets beyond 2**31.

Guards lie around what Python allocates: all that a Triton kernel has, and a CUDA kernel's arguments. A CUDA kernel's
results come from its C++ binding, and who writes beside those is found by compute-sanitizer (the part sanitizers).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tfm_kernels import _library
from tfm_kernels.bench.record import Results
from tfm_kernels.testing import run

from .part import Item, Room
from .repeats import assert_same

GUARD = 4096  # bytes on either side; at least a multiple of 16, so that a tensor lies as aligned as without
FILLS = (0x00, 0xFF)  # 0xFF..FF is NaN in every floating type, and -1


def items(room: Room, results: Results) -> Iterator[Item]:
    for subject in room.built():
        for name, (op, inputs) in subject.branches(room.device).items():
            yield subject.item(f"{name} between guards", partial(guarded_call, op, inputs, subject.backend), op)
        for name, check in subject.large.items():
            yield subject.item(name, partial(_large, check, room.device), name.split()[0], heavy=True)


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
    """Yields t -> copy of t between guards; inside, what torch.empty, empty_like and zeros give is guarded too.

    Raises:
        AssertionError: at the end, where a guard was written to.
    """
    kept: list[tuple[Tensor, int]] = []
    empty, empty_like = torch.empty, torch.empty_like

    def put(like: Tensor, device: Any) -> Tensor:
        size = like.numel() * like.element_size()
        buffer = empty(size + 2 * GUARD, dtype=torch.uint8, device=device).fill_(fill)
        kept.append((buffer, size))
        return buffer[GUARD : GUARD + size].view(like.dtype).as_strided(like.shape, like.stride())

    def new(*shape: Any, **options: Any) -> Tensor:
        return put(empty(*shape, **{**options, "device": "meta"}), options.get("device", "cpu"))

    def new_like(t: Tensor, **options: Any) -> Tensor:
        return put(empty_like(t, **{**options, "device": "meta"}), options.get("device", t.device))

    def guard(t: Tensor) -> Tensor:
        return new(t.shape, dtype=t.dtype, device=t.device).copy_(t)

    zeros = lambda *shape, **options: new(*shape, **options).zero_()  # noqa: E731
    patches = {"empty": new, "empty_like": new_like, "zeros": zeros}
    with mock.patch.multiple(torch, **patches), _library.plans_anew():
        yield guard
    for buffer, size in kept:
        outside = torch.cat([buffer[:GUARD], buffer[GUARD + size :]])
        assert bool((outside == fill).all()), f"a guard of a tensor of {size} bytes was written to"


def _large(check: Any, device: str) -> dict[str, Any]:
    check(device)
    torch.cuda.empty_cache()
    return {}
