"""int8_ffn beside the two linear layers and the activation of floats that a model which is not quantized runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..shapes import GRID, Int8Ffn
from ..subject import FORWARD, Eager, Subject, drawer
from . import ffn


def arguments(case: Int8Ffn, dtype: str, device: str = "cpu") -> dict[str, Any]:
    draw = drawer(case.rows * 10007 + case.width, dtype, device)

    def weight(out: int, width: int) -> tuple[Tensor, Tensor]:
        integers = draw(out, width, scale=40.0).round().clamp(-127, 127).to(torch.int8)
        return integers, torch.full((out,), width**-0.5 / 40, device=device)

    given: dict[str, Any] = {"x": draw(case.rows, case.width), "activation": case.activation, "dynamic": True}
    given["w1"], given["scale1"] = weight(case.hidden, case.width)
    given["w2"], given["scale2"] = weight(case.width, case.hidden)
    given["b1"], given["b2"] = draw(case.hidden, scale=0.1), draw(case.width, scale=0.1)
    if case.gated:
        given["gate"], given["gate_scale"] = weight(case.hidden, case.width)
    return given


def eager(case: Int8Ffn, given: Mapping[str, Any]) -> Eager:
    def floats(name: str, steps: str) -> Tensor:
        return (given[name] * given[steps].unsqueeze(1)).to(given["x"].dtype)

    block = {"x": given["x"], "w1": floats("w1", "scale1"), "b1": given["b1"], "w2": floats("w2", "scale2")}
    gate = {"gate": floats("gate", "gate_scale")} if case.gated else {}
    return ffn.eager(case, {**block, "b2": given["b2"], **gate})


def proof(case: Int8Ffn) -> Int8Ffn:
    return replace(case, rows=min(case.rows, 300), width=min(case.width, 96), hidden=min(case.hidden, 160))


def flops(case: Int8Ffn, direction: str) -> int:
    """Two matrix products, three with a gate; nothing is measured in training."""
    assert direction == FORWARD
    return (3 if case.gated else 2) * 2 * case.rows * case.width * case.hidden


def bytes_moved(case: Int8Ffn, itemsize: int, direction: str) -> int:
    """x in, the weights, a byte each, and y out."""
    assert direction == FORWARD
    return 2 * case.rows * case.width * itemsize + (3 if case.gated else 2) * case.width * case.hidden


# eager does not round x and the hidden activation to int8: 1 to 2 % of the norm
SUBJECT = Subject("int8_ffn", GRID["int8_ffn"], arguments, eager, proof, flops, bytes_moved, lambda case: False)
