"""int8_linear beside F.linear with the same weights as floats, which is what a model that is not quantized runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from ..shapes import GRID, Int8Linear
from ..subject import FORWARD, Eager, Subject, drawer


def arguments(case: Int8Linear, dtype: str, device: str = "cpu") -> dict[str, Any]:
    draw = drawer(case.rows * 10007 + case.width, dtype, device)
    weight = draw(case.out, case.width, scale=40.0).round().clamp(-127, 127).to(torch.int8)
    scale = torch.full((case.out,), case.width**-0.5 / 40, device=device)
    x, bias = draw(case.rows, case.width), draw(case.out, scale=0.1)
    return {"x": x, "weight": weight, "scale": scale, "bias": bias, "dynamic": case.dynamic}


def eager(case: Int8Linear, given: Mapping[str, Any]) -> Eager:
    weight = (given["weight"] * given["scale"].unsqueeze(1)).to(given["x"].dtype)
    return F.linear, {"input": given["x"], "weight": weight, "bias": given["bias"]}


def proof(case: Int8Linear) -> Int8Linear:
    return case


def flops(case: Int8Linear, direction: str) -> int:
    """One matrix product; nothing is measured in training."""
    assert direction == FORWARD
    return 2 * case.rows * case.width * case.out


def bytes_moved(case: Int8Linear, itemsize: int, direction: str) -> int:
    """x in, the weights, a byte each, and y out."""
    assert direction == FORWARD
    return case.rows * (case.width + case.out) * itemsize + case.width * case.out


# eager rounds the weights to the type of x and not x to int8: 1 % of the norm
SUBJECT = Subject("int8_linear", GRID["int8_linear"], arguments, eager, proof, flops, bytes_moved, lambda case: True)
