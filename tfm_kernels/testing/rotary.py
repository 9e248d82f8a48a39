"""The judge of rotary: float64 truth, bounds and the written-out eager formula.

y_i = x_i cos_ti - x_j sin_ti, y_j = x_j cos_tj + x_i sin_tj; dx by the same pairs, turned back;
dcos = sum of dy x and dsin = sum of +-dy x_other, over heads, and over rows that share them
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .rounding import Expected, rounding, sum_bound, walk


def expect(op: str, inputs: Mapping[str, Any], outputs: Mapping[str, Tensor], douts: Mapping[str, Tensor | None]):
    """Name -> Expected for y, and for every gradient where ``douts`` holds dy."""
    x, cos, sin = inputs["x"], inputs["cos"].double().unsqueeze(-3), inputs["sin"].double().unsqueeze(-3)
    other = _partner(x.shape[-1], cos.shape[-1], inputs.get("interleaved", False), x.device)
    ones = (*cos.shape[:-1], x.shape[-1] - cos.shape[-1])
    cos, sin = torch.cat((cos, cos.new_ones(ones)), -1), torch.cat((sin, sin.new_zeros(ones)), -1)
    sign = torch.where(other > torch.arange(x.shape[-1], device=x.device), -1.0, 1.0)  # of what the partner adds
    expected = {"y": _turned(x.double(), cos, sin * sign, other, x.dtype)}
    dy = douts.get("y")
    if dy is not None:
        dy = dy.double()
        expected["dx"] = _turned(dy, cos, (sin * sign)[..., other], other, x.dtype)
        expected["dcos"] = _factor(dy * x.double(), inputs["cos"])
        expected["dsin"] = _factor(dy * x.double()[..., other] * sign, inputs["sin"])
    return expected


def _factor(terms: Tensor, factor: Tensor) -> Expected:
    """The gradient of a factor: the sum of ``terms`` over the heads, and the rows where all have one table."""
    terms = terms[..., : factor.shape[-1]]
    dims = (0, 1) if factor.dim() == 2 or factor.shape[0] == 1 else (1,)
    count = math.prod(terms.shape[i] for i in dims)
    over = lambda t: t.sum(dims).view(factor.shape)  # noqa: E731
    value, absolute = over(terms), over(terms.abs())
    bound = sum_bound(value, absolute, count, factor.dtype, factor.dtype)
    unit = rounding(factor.dtype).unit
    return Expected(value, bound, factor.dtype, extra=walk(count), between=unit * absolute)


def _partner(width: int, turned: int, interleaved: bool, device: torch.device) -> Tensor:
    """The other feature of each one's pair; beyond the turned ones each is its own."""
    columns = torch.arange(width, device=device)
    pairs = columns ^ 1 if interleaved else (columns + turned // 2) % max(turned, 1)
    return torch.where(columns < turned, pairs, columns)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, other: Tensor, dtype: torch.dtype) -> Expected:
    r = rounding(dtype)
    left, right = x * cos, x[..., other] * sin
    sizes = left.abs() + right.abs()
    stays = other == torch.arange(x.shape[-1], device=x.device)
    value = torch.where(stays, x, left + right)
    bound = torch.where(stays, 0.0, r.unit * value.abs() + 2 * r.sums * sizes + 3 * r.tiny)
    return Expected(value, bound, dtype, between=r.unit * (sizes + value.abs()) + 2 * r.tiny)


def eager(op: str, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """E: the formula written out in the inputs' own types; differentiable."""
    x, cos, sin = inputs["x"], inputs["cos"].unsqueeze(-3), inputs["sin"].unsqueeze(-3)
    turned = cos.shape[-1]
    part = x[..., :turned]
    if inputs.get("interleaved", False):
        other = torch.stack((-part[..., 1::2], part[..., 0::2]), dim=-1).flatten(-2)
    else:
        other = torch.cat((-part[..., turned // 2 :], part[..., : turned // 2]), dim=-1)
    y = (part * cos + other * sin).to(x.dtype)
    return {"y": torch.cat((y, x[..., turned:]), dim=-1)}
