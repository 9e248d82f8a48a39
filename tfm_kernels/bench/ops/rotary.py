"""rotary beside the formula as models write it: two products, a copy with the halves exchanged, a sum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..shapes import GRID, Rotary
from ..subject import BACKWARD, BOTH, FORWARD, Eager, Subject, drawer


def arguments(case: Rotary, dtype: str, device: str = "cpu") -> dict[str, Any]:
    """Queries as a projection leaves them: a head's features side by side, the heads of a token after each other."""
    draw = drawer(case.length * 10007 + case.dim, dtype, device)
    x = draw(case.batch, case.length, case.heads, case.dim).transpose(1, 2)
    frequencies = 10000.0 ** (-torch.arange(0, case.dim, 2, device=device) / case.dim)
    angles = torch.outer(torch.arange(float(case.length), device=device), frequencies).repeat(1, 2)
    return {"x": x, "cos": angles.cos().to(x.dtype), "sin": angles.sin().to(x.dtype)}


def eager(case: Rotary, given: Mapping[str, Any]) -> Eager:
    cos, sin = given["cos"], given["sin"]

    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    return turned, {"x": given["x"]}


def proof(case: Rotary) -> Rotary:
    return case


def flops(case: Rotary, direction: str) -> int:
    """Two products and a sum for each feature; never what limits."""
    return 3 * case.elements * {FORWARD: 1, BACKWARD: 1, BOTH: 2}[direction]


def bytes_moved(case: Rotary, itemsize: int, direction: str) -> int:
    """Forward x in, y out; backward dy in, dx out; the factors, which all heads share, each time."""
    once = 2 * case.elements + 2 * case.length * case.dim
    return once * itemsize * {FORWARD: 1, BACKWARD: 1, BOTH: 2}[direction]


SUBJECT = Subject("rotary", GRID["rotary"], arguments, eager, proof, flops, bytes_moved, lambda case: True)
