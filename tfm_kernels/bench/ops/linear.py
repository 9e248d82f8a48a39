"""linear beside F.linear."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F

from ..shapes import GRID, Linear
from ..subject import FORWARD, Eager, Subject, drawer


def arguments(case: Linear, dtype: str, device: str = "cpu") -> dict[str, Any]:
    draw = drawer(case.rows * 10007 + case.width, dtype, device)
    weight = draw(case.out, case.width, scale=case.width**-0.5)
    return {"x": draw(case.rows, case.width), "weight": weight, "bias": draw(case.out, scale=0.1)}


def eager(case: Linear, given: Mapping[str, Any]) -> Eager:
    return F.linear, {"input": given["x"], "weight": given["weight"], "bias": given["bias"]}


def proof(case: Linear) -> Linear:
    return case


def flops(case: Linear, direction: str) -> int:
    """One matrix product; nothing is measured in training."""
    assert direction == FORWARD
    return 2 * case.rows * case.width * case.out


def bytes_moved(case: Linear, itemsize: int, direction: str) -> int:
    """x and the weights in, y out."""
    assert direction == FORWARD
    return (case.rows * (case.width + case.out) + case.width * case.out) * itemsize


SUBJECT = Subject("linear", GRID["linear"], arguments, eager, proof, flops, bytes_moved, lambda case: True)
