"""ffn beside F.linear, an activation, F.dropout and F.linear."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from ..shapes import GRID, Ffn
from ..subject import BACKWARD, BOTH, FORWARD, Eager, Subject, drawer

_ACTIVATE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda hidden: F.gelu(hidden, approximate="tanh"),
    "silu": F.silu,
}


def arguments(case: Ffn, dtype: str, device: str = "cpu") -> dict[str, Any]:
    draw = drawer(case.rows * 10007 + case.width, dtype, device)
    given: dict[str, Any] = {
        "x": draw(case.rows, case.width),
        "w1": draw(case.hidden, case.width, scale=case.width**-0.5),
        "b1": None if case.gated else draw(case.hidden, scale=0.1),  # gated blocks have no biases
        "w2": draw(case.width, case.hidden, scale=case.hidden**-0.5),
        "b2": None if case.gated else draw(case.width, scale=0.1),
        "activation": case.activation,
    }
    if case.gated:
        given["gate"] = draw(case.hidden, case.width, scale=case.width**-0.5)
    if case.dropout_p:
        given["dropout_p"] = case.dropout_p
    return given


def eager(case: Ffn, given: Mapping[str, Any]) -> Eager:
    """What a model's feed-forward block runs."""
    activate, p = _ACTIVATE[case.activation], case.dropout_p

    def block(x, w1, w2, b1=None, b2=None, gate=None):
        hidden = activate(F.linear(x, w1, b1))
        if gate is not None:
            hidden = hidden * F.linear(x, gate)
        if p:
            hidden = F.dropout(hidden, p)
        return F.linear(hidden, w2, b2)

    return block, {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}


def proof(case: Ffn) -> Ffn:
    return replace(case, rows=min(case.rows, 192))


def flops(case: Ffn, direction: str) -> int:
    """Two matrix products (three with a gate) forward, twice as many backward."""
    products = 2 * case.rows * case.width * case.hidden * (3 if case.gated else 2)
    return products * {FORWARD: 1, BACKWARD: 2, BOTH: 3}[direction]


def bytes_moved(case: Ffn, itemsize: int, direction: str) -> int:
    """Forward x and the weights in, y out; backward dy, x and the weights in, dx and the weights' gradients out.

    The (M, F) hidden activation is not counted: it need not leave the cache, and the backward may compute it again.
    """
    weights, rows = case.width * case.hidden * (3 if case.gated else 2), case.rows * case.width
    forward, backward = 2 * rows + weights, 3 * rows + 2 * weights
    return {FORWARD: forward, BACKWARD: backward, BOTH: forward + backward}[direction] * itemsize


SUBJECT = Subject("ffn", GRID["ffn"], arguments, eager, proof, flops, bytes_moved, lambda case: not case.dropout_p)
