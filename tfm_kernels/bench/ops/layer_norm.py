"""layer_norm, add_layer_norm, rms_norm and add_rms_norm beside F.layer_norm, F.rms_norm and F.dropout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from ..shapes import GRID, Norm
from ..subject import BACKWARD, BOTH, FORWARD, Eager, Subject, drawer


def arguments(case: Norm, dtype: str, device: str = "cpu") -> dict[str, Any]:
    draw = drawer(case.rows * 10007 + case.features, dtype, device)
    given: dict[str, Any] = {"x": draw(case.rows, case.features)}
    if case.op.startswith("add_"):
        given["residual"] = draw(case.rows, case.features)
    given["weight"] = 1 + 0.1 * draw(case.features)
    if case.op.endswith("layer_norm"):
        given["bias"] = 0.1 * draw(case.features)
    if case.dropout_p:
        given["dropout_p"] = case.dropout_p
    return given


def eager(case: Norm, given: Mapping[str, Any]) -> Eager:
    """What nn.TransformerEncoderLayer runs: dropout, sum and norm as separate calls."""
    shape, p = (case.features,), case.dropout_p
    norm: Callable[..., Any] = F.layer_norm
    if case.op.endswith("rms_norm"):
        norm = lambda x, shape, weight, bias: F.rms_norm(x, shape, weight)  # noqa: E731

    def alone(x, weight, bias=None):
        return norm(x, shape, weight, bias)

    def add(x, residual, weight, bias=None):
        z = residual + (F.dropout(x, p) if p else x)
        return norm(z, shape, weight, bias), z

    leaves = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    return (add if "residual" in given else alone), leaves


def proof(case: Norm) -> Norm:
    return replace(case, rows=min(case.rows, 512))


def flops(case: Norm, direction: str) -> int:
    """About eight operations an element forward and twelve backward; never what limits a norm."""
    return case.rows * case.features * {FORWARD: 8, BACKWARD: 12, BOTH: 20}[direction]


def bytes_moved(case: Norm, itemsize: int, direction: str) -> int:
    """Forward x (and residual) in, y (and z) out; backward dy, x or z (and dz) in, dx (and dresidual) out."""
    fused = case.op.startswith("add_")
    forward = 4 if fused else 2
    backward = (4 + bool(case.dropout_p)) if fused else 3  # without dropout dx serves as dresidual
    passes = {FORWARD: forward, BACKWARD: backward, BOTH: forward + backward}[direction]
    return passes * case.rows * case.features * itemsize


SUBJECT = Subject(
    "layer_norm", GRID["layer_norm"], arguments, eager, proof, flops, bytes_moved, lambda case: not case.dropout_p
)
