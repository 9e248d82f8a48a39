"""The int8_linear judge: float64 truth, bounds and the written-out eager formula.

y = (x q^T) s + b;  dx = (dy s) q,  ds = sum dy (x q^T),  db = sum dy; where dynamic with what rounding leaves of x
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .rounding import Expected, rounding, sum_bound, walk


def expect(op: str, inputs: Mapping[str, Any], outputs: Mapping[str, Tensor], douts: Mapping[str, Tensor | None]):
    """Name -> Expected for y, and for every gradient where ``douts`` holds dy."""
    given, dtype = inputs["x"], inputs["x"].dtype
    q, s, bias = inputs["weight"].double(), inputs["scale"].double(), inputs.get("bias")
    leading, (out, width) = given.shape[:-1], q.shape
    x = given.reshape(-1, width)
    x = rounded(x) if inputs.get("dynamic", False) else x.double()
    rows, r = x.shape[0], rounding(dtype)
    fair = rows >= 4 and rows * min(out, width) >= 64 and not inputs.get("dynamic", False)  # exact, E's is not
    shift = x.new_zeros(()) if bias is None else bias.double()

    product, absolute = x @ q.T, x.abs() @ q.abs().T
    y = product * s + shift
    bound = sum_bound(y, absolute * s.abs() + shift.abs(), width, dtype, dtype)
    bound = bound + 4 * r.sums * (product * s).abs() + r.flushed * q.abs().sum(1) * s.abs()
    between = 2 * r.unit * (absolute * s.abs() + shift.abs())  # the weights, as PyTorch's functions read them
    shape = *leading, out
    # one sum after the other is right, but a BLAS need not add so (walk())
    y, bound, between = y.view(shape), bound.view(shape), between.view(shape)
    expected = {"y": Expected(y, bound, dtype, extra=walk(width), fair=fair, between=between)}
    dy = douts.get("y")
    if dy is None:
        return expected
    dy = dy.double().reshape(rows, out)
    # in between PyTorch's functions round dy s and x q^T to the storage type
    scaled, sums = dy * s, dy * product
    dx, terms = scaled @ q, scaled.abs() @ q.abs()
    bound = sum_bound(dx, terms, out, dtype, dtype) + 2 * r.unit * terms
    expected["dx"] = Expected(dx.view(given.shape), bound.view(given.shape), dtype, fair=False)
    ds, terms = sums.sum(0), (dy.abs() * absolute).sum(0)
    bound = sum_bound(ds, terms, rows * width, dtype, torch.float32) + 4 * r.unit * terms
    expected["dscale"] = Expected(ds, bound, torch.float32, fair=False)
    if bias is not None:
        db = dy.sum(0)
        expected["dbias"] = Expected(db, sum_bound(db, dy.abs().sum(0), rows, dtype, dtype), dtype, fair=False)
    return expected


def rounded(x: Tensor) -> Tensor:
    """The integers that are made of each row, times its step; NaN in a row that is not finite."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if x.shape[1] == 0:
        return x.double()
    largest = x.abs().max(1, keepdim=True).values
    value = (x * (torch.full_like(largest, 127) / largest)).round().double() * (largest.double() / 127)
    value[largest.squeeze(1) < 2.0**-119] = 0.0
    value[~x.isfinite().all(1)] = torch.nan
    return value


def eager(op: str, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """E: the formula written out in the inputs' own type; differentiable."""
    x, weight, scale = inputs["x"], inputs["weight"], inputs["scale"]
    if inputs.get("dynamic", False):
        rows = x.reshape(-1, x.shape[-1])
        x = x + (rounded(rows.detach()).view(x.shape).to(x.dtype) - x).detach()
    y = x @ (weight.to(torch.promote_types(x.dtype, torch.float32)) * scale[:, None]).to(x.dtype).T
    return {"y": y if inputs.get("bias") is None else y + inputs["bias"]}
