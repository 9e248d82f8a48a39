"""linear_cross_entropy beside F.linear and F.cross_entropy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from ..shapes import GRID, LinearCrossEntropy
from ..subject import BACKWARD, BOTH, FORWARD, Eager, Subject, drawer


def arguments(case: LinearCrossEntropy, dtype: str, device: str = "cpu") -> dict[str, Any]:
    draw = drawer(case.rows * 10007 + case.width, dtype, device)
    generator = torch.Generator().manual_seed(case.rows)
    target = torch.randint(case.classes, (case.rows,), generator=generator)
    target[torch.rand(case.rows, generator=generator) < case.ignored] = -100
    return {
        "x": draw(case.rows, case.width),
        "weight": draw(case.classes, case.width, scale=case.width**-0.5),
        "bias": draw(case.classes, scale=0.1),
        "target": target,
        "label_smoothing": case.label_smoothing,
    }


def eager(case: LinearCrossEntropy, given: Mapping[str, Any]) -> Eager:
    """What a language model runs, in its training loop or under autocast."""
    target, smoothing = given["target"], case.label_smoothing

    def loss(x, weight, bias):
        logits = F.linear(x, weight, bias)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(logits, target, label_smoothing=smoothing)

    return loss, {name: given[name] for name in ("x", "weight", "bias")}


def proof(case: LinearCrossEntropy) -> LinearCrossEntropy:
    return replace(case, rows=min(case.rows, 192), classes=min(case.classes, 2500))


def flops(case: LinearCrossEntropy, direction: str) -> int:
    """One matrix product forward, two backward (what computes the logits again does more), of the rows that count."""
    product = 2 * case.counted * case.width * case.classes
    return product * {FORWARD: 1, BACKWARD: 2, BOTH: 3}[direction]


def bytes_moved(case: LinearCrossEntropy, itemsize: int, direction: str) -> int:
    """Forward x and the weights in; backward x and the weights in, dx and dweight out. Logits need not leave caches."""
    weights, rows = case.width * case.classes, case.counted * case.width
    forward, backward = rows + weights, 2 * rows + 2 * weights
    return {FORWARD: forward, BACKWARD: backward, BOTH: forward + backward}[direction] * itemsize


SUBJECT = Subject(
    "linear_cross_entropy", GRID["linear_cross_entropy"], arguments, eager, proof, flops, bytes_moved, lambda case: True
)
