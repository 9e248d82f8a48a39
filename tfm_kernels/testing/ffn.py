"""The ffn judge: float64 truth, bounds and the written-out eager formula.

a = x w1^T + b1,  c = x gate^T + b_g,  h = act(a) c keep / (1 - p),  y = h w2^T + b2
dh = dy w2 keep / (1 - p),  da = dh act'(a) c,  dc = dh act(a)
dx = da w1 + dc gate,  dw1 = da^T x,  db1 = sum da,  dgate = dc^T x,  db_g = sum dc,  dw2 = dy^T h,  db2 = sum dy
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import dropout
from .rounding import Expected, product_bound, reach, rounding, score_error, sum_bound, walk

_ROOT = math.sqrt(2 / math.pi)


def _relu(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return a.clamp(min=0), (a > 0).double(), torch.zeros_like(a)


def _gelu(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    area, density = torch.special.ndtr(a), torch.exp(-a * a / 2) / math.sqrt(2 * math.pi)
    return a * area, area + a * density, (2 - a * a) * density


def _gelu_tanh(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    inner, slope, bend = _ROOT * (a + 0.044715 * a**3), _ROOT * (1 + 0.134145 * a * a), _ROOT * 0.26829 * a
    t = torch.tanh(inner)
    sech2 = 1 - t * t
    first = 0.5 * (1 + t) + 0.5 * a * sech2 * slope
    return 0.5 * a * (1 + t), first, sech2 * (slope + 0.5 * a * (bend - 2 * t * slope * slope))


def _silu(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    s = torch.sigmoid(a)
    return a * s, s * (1 + a * (1 - s)), s * (1 - s) * (2 + a * (1 - 2 * s))


# name -> act(a), act'(a), act''(a) in float64
ACTIVATIONS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]] = {
    "relu": _relu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": _silu,
}


def expect(op: str, inputs: Mapping[str, Any], outputs: Mapping[str, Tensor], douts: Mapping[str, Tensor | None]):
    """Name -> Expected for y, and for every gradient where ``douts`` holds dy."""
    dtype, leading = inputs["x"].dtype, inputs["x"].shape[:-1]
    r = rounding(dtype)
    x, w1, w2 = (inputs[name].double() for name in ("x", "w1", "w2"))
    b1, b2, gate = (None if inputs.get(name) is None else inputs[name].double() for name in ("b1", "b2", "gate"))
    x = x.reshape(leading.numel(), x.shape[-1])
    xa, hidden, rows = x.abs(), w1.shape[0], x.shape[0]
    b1, b_gate = halves(b1, hidden)

    a = x @ w1.T if b1 is None else x @ w1.T + b1
    act, slope, bend = ACTIVATIONS[inputs.get("activation", "relu")](a)
    # The error of a float32 sum in front of the activation (e), and what rounding a to the storage type would add (u a:
    # the two-GEMM form stores it for the backward).
    ea = score_error(r, x, w1, 0 if b1 is None else b1.abs())
    c, ec = torch.ones_like(a), torch.zeros_like(a)
    if gate is not None:
        c = x @ gate.T if b_gate is None else x @ gate.T + b_gate
        ec = score_error(r, x, gate, 0 if b_gate is None else b_gate.abs())
    factor = factor_of(inputs, rows, hidden, x.device)
    # The functions' own error: 0.5 (1 + erf) and its like are exact to a few units of 1, not of their result.
    own = 0 if inputs.get("activation", "relu") == "relu" else 4 * r.sums * a.abs()
    act_e = slope.abs() * ea + own + bend.abs() * ea * ea
    h = factor * act * c
    h_e = factor * (act_e * c.abs() + act.abs() * ec + act_e * ec)
    w2a = w2.abs()

    y = h @ w2.T if b2 is None else h @ w2.T + b2
    h_a = reach(h, dtype)
    bound = product_bound(y, h_a @ w2a.T, factor @ w2a.T, hidden, dtype, dtype, h_a.sum(1, True)) + h_e @ w2a.T
    # An outer product of few rows repeats the rounding of a few numbers, and MKL sums single rows in another way.
    fair = rows >= 4 and rows * min(w1.shape[1], *w2.shape) >= 64
    expected = {"y": Expected(y.view(*leading, w2.shape[0]), bound.view(*leading, w2.shape[0]), dtype, fair=fair)}
    dy = douts.get("y")
    if dy is None:
        return expected

    dy = dy.double().reshape(rows, w2.shape[0])
    dya = dy.abs()
    dh = factor * (dy @ w2)
    dh_a = factor * (dya @ w2a)
    dh_e = 2 * w2.shape[0] ** 0.5 * r.sums * dh_a + r.flushed * factor * (dya.sum(1, True) + w2a.sum(0))
    flushed = r.tiny if r.narrow else 0.0  # what rounding to fp16 may take from a tiny a
    if inputs.get("activation", "relu") == "relu":
        slope_e = (a.abs() <= 1.1 * ea + flushed).double()  # the kink: rounding may choose either side
        slope_u = torch.zeros_like(a)
    else:
        slope_e = bend.abs() * (ea + flushed) + 4 * r.sums * (1 + a.abs()) * (1 + slope.abs())
        slope_u = bend.abs() * a.abs()
    kept = r.unit if r.narrow else 0.0
    da, dc = dh * slope * c, dh * act
    da_e = dh_a * slope_e * c.abs() + dh_e * slope.abs() * c.abs() + dh.abs() * slope.abs() * ec
    da_a = reach(da, dtype) + dh.abs() * slope_u * c.abs() + (0 if gate is None else da.abs())
    dc_e = dh.abs() * act_e + dh_e * act.abs()
    dc_a = reach(dc, dtype) + dh.abs() * slope.abs() * a.abs()
    ones = factor

    def product(
        name: str, value: Tensor, absolute: Tensor, error: Tensor, units: Tensor, others: Tensor | float, length: int
    ) -> None:
        tensor = inputs[name]
        bound = product_bound(value, absolute, units, length, dtype, tensor.dtype, others) + error
        value, bound, extra = value.view(tensor.shape), bound.view(tensor.shape), walk(rows) if name == "b1" else 0.0
        expected[f"d{name}"] = Expected(value, bound, tensor.dtype, extra=extra, fair=fair)

    dx, dx_a, dx_e, dx_1 = da @ w1, da_a @ w1.abs(), da_e @ w1.abs(), ones @ w1.abs()
    dx_others = da_a.sum(1, True)
    if gate is not None:
        dx, dx_a, dx_e = dx + dc @ gate, dx_a + dc_a @ gate.abs(), dx_e + dc_e @ gate.abs()
        dx_1 = dx_1 + ones @ gate.abs()
        dx_others = dx_others + dc_a.sum(1, True)
        product("gate", dc.T @ x, dc_a.T @ xa, dc_e.T @ xa, ones.T @ xa, dc_a.sum(0)[:, None], rows)
    product("x", dx, dx_a, dx_e, dx_1, dx_others, max(hidden, w2.shape[0]))
    product("w1", da.T @ x, da_a.T @ xa, da_e.T @ xa, ones.T @ xa, da_a.sum(0)[:, None], max(rows, w2.shape[0]))
    if b1 is not None:
        terms = [(da, da_a, da_e, ones)] + ([] if b_gate is None else [(dc, dc_a, dc_e, ones)])
        value, *bounds = (torch.cat([t.sum(0) for t in part]) for part in zip(*terms, strict=True))
        product("b1", value, bounds[0], bounds[1], bounds[2], 0.0, max(rows, w2.shape[0]))
    h_1 = ones
    if kept:
        h_1 = ones * (1 + slope.abs() * c.abs() + act.abs())
        h_a = h_a + factor * (slope.abs() * a.abs() * c.abs() + (0 if gate is None else act.abs() * c.abs()))
    product("w2", dy.T @ h, dya.T @ h_a, dya.T @ h_e, dya.T @ h_1, h_a.sum(0), rows)
    if b2 is not None:
        db2 = dy.sum(0)
        bound = sum_bound(db2, dya.sum(0), rows, dtype, inputs["b2"].dtype)
        expected["db2"] = Expected(db2, bound, inputs["b2"].dtype, extra=walk(rows))
    return expected


def eager(op: str, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """E: the formula written out in the inputs' own type; differentiable."""
    x, gate = inputs["x"], inputs.get("gate")
    b1, b_gate = halves(inputs.get("b1"), inputs["w1"].shape[0])
    a = F.linear(x, inputs["w1"], b1)
    name = inputs.get("activation", "relu")
    h = F.gelu(a, approximate="tanh") if name == "gelu_tanh" else getattr(F, name)(a)
    if gate is not None:
        h = h * F.linear(x, gate, b_gate)
    p = inputs.get("dropout_p", 0.0)
    if p > 0.0:
        keep = factor_of(inputs, h.numel() // max(h.shape[-1], 1), h.shape[-1], h.device).view(h.shape)
        h = h * keep.to(h.dtype)
    return {"y": F.linear(h, inputs["w2"], inputs.get("b2"))}


def halves(b1: Tensor | None, hidden: int) -> tuple[Tensor | None, Tensor | None]:
    """b1 and b_g, either None where it is not there."""
    return (b1, None) if b1 is None or b1.shape[0] == hidden else (b1[:hidden], b1[hidden:])


def factor_of(inputs: Mapping[str, Any], rows: int, hidden: int, device: torch.device) -> Tensor:
    """keep / (1 - p) of the hidden activation, (M, F) float64; ones without dropout."""
    p = inputs.get("dropout_p", 0.0)
    if p == 0.0:
        return torch.ones(rows, hidden, dtype=torch.float64, device=device)
    numbers = inputs.get("dropout_rows")
    numbers = torch.arange(rows, device=device) if numbers is None else numbers
    return dropout.keep_mask(inputs["seed"], p, numbers, hidden).double() * dropout.keep_scale(p)
