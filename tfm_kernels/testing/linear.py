"""The linear judge: float64 truth, bounds and the written-out eager formula.

y = x w^T + b;  dx = dy w,  dw = dy^T x,  db = sum dy
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from .rounding import Expected, rounding, sum_bound, walk


def expect(op: str, inputs: Mapping[str, Any], outputs: Mapping[str, Tensor], douts: Mapping[str, Tensor | None]):
    """Name -> Expected for y, and for every gradient where ``douts`` holds dy."""
    given, dtype = inputs["x"], inputs["x"].dtype
    weight, bias = inputs["weight"].double(), inputs.get("bias")
    x = given.double().reshape(-1, given.shape[-1])
    nothing = x.new_zeros(())
    leading, (out, width), rows = given.shape[:-1], weight.shape, x.shape[0]
    flushed = rounding(dtype).flushed
    # MKL sums single rows in another way
    fair = rows >= 4 and rows * min(out, width) >= 64

    def product(a: Tensor, b: Tensor, length: int, extra: Tensor = nothing) -> tuple[Tensor, Tensor]:
        """a b^T + extra, and its bound."""
        value, absolute = a @ b.T + extra, a.abs() @ b.abs().T + extra.abs()
        others = flushed * (a.abs().sum(1, keepdim=True) + b.abs().sum(1))
        return value, sum_bound(value, absolute, length, dtype, dtype) + others

    y, bound = product(x, weight, width, nothing if bias is None else bias.double())
    expected = {"y": Expected(y.view(*leading, out), bound.view(*leading, out), dtype, fair=fair)}
    dy = douts.get("y")
    if dy is None:
        return expected
    dy = dy.double().reshape(rows, out)
    value, bound = product(dy, weight.T, out)
    expected["dx"] = Expected(value.view(given.shape), bound.view(given.shape), dtype, fair=fair)
    expected["dweight"] = Expected(*product(dy.T, x.T, rows), dtype, fair=fair)
    if bias is not None:
        db = dy.sum(0)
        expected["dbias"] = Expected(db, sum_bound(db, dy.abs().sum(0), rows, dtype, dtype), dtype, extra=walk(rows))
    return expected


def eager(op: str, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """E: the formula written out in the inputs' own type; differentiable."""
    return {"y": F.linear(inputs["x"], inputs["weight"], inputs.get("bias"))}
