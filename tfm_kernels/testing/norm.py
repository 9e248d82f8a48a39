"""The norm family's judge: float64 truth, bounds and the written-out eager formula of layer_norm, rms_norm and add_*.

z    = residual + dropout(x), rounded once to the storage type (plain norms: z = x)
y    = xhat * weight + bias, xhat = (z - mu) * rstd       RMSNorm: mu = 0 and no bias
dz   = rstd * (g - mean(g) - xhat * sum(g xhat) / (n share)), g = dy * weight; n = N, or N - 1 with unbiased=True
rstd = 1 / (root + eps_outside), root = sqrt(variance + eps); share = root * rstd, and no last term where it is 0
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .. import dropout
from .rounding import Expected, rounding, sum_bound, walk


def expect(op: str, inputs: Mapping[str, Any], outputs: Mapping[str, Tensor], douts: Mapping[str, Tensor | None]):
    """Name -> Expected for every output, and for every gradient where ``douts`` holds output gradients."""
    x, weight, bias = inputs["x"], inputs.get("weight"), inputs.get("bias")
    dtype = storage_of(inputs)
    r = rounding(dtype)
    expected: dict[str, Expected] = {}

    keep = kept(inputs)
    if "residual" in inputs:
        added = _drop(x.double(), keep, inputs)
        exact = inputs["residual"].double() + added
        # The scaled x is a float32 number before it is added (and so is the scale): it shows where the sum cancels.
        dropped = 0 if keep is None else 2 * r.sums * added.abs()
        own = rounding(x.dtype)
        between = own.unit * added.abs() + own.tiny  # PyTorch stores the scaled x in its own type
        expected["z"] = Expected(exact, r.unit * exact.abs() + r.tiny + dropped, dtype, between=between)
        z = outputs["z"].double()  # the rounded one, as the contract says
    else:
        z = x.double()

    width = x.shape[-1]
    centred = op.endswith("layer_norm")
    mu = z.mean(-1, keepdim=True) if centred else torch.zeros_like(z[..., :1])
    degrees = width - 1 if inputs.get("unbiased", False) else width
    root = ((z - mu).square().sum(-1, keepdim=True) / degrees + eps_of(op, inputs)).sqrt()
    rstd = 1 / (root + inputs.get("eps_outside", 0.0))
    xhat = (z - mu) * rstd
    kappa = 1 + mu.abs() * rstd
    w = torch.ones(width, dtype=torch.float64, device=x.device) if weight is None else weight.double()
    b = torch.zeros_like(w) if bias is None else bias.double()

    y = xhat * w + b
    statistics = 8 * r.sums * (kappa * w.abs() * (1 + xhat.abs()) + b.abs())
    # All elements of a row share the rounding of its statistics: few rows, few independent errors.
    count = z[..., 0].numel()
    few = 2 * r.sums if count < 16 else 0.0
    expected["y"] = Expected(y, r.unit * y.abs() + r.tiny + statistics, dtype, extra=few)

    dy, dz_out = douts.get("y"), douts.get("z")
    if dy is None and dz_out is None:
        return expected
    dy = torch.zeros_like(z) if dy is None else dy.double()
    g = dy * w
    share = root * rstd
    along = torch.where(share == 0, 0, (g * xhat).sum(-1, keepdim=True) / (degrees * share))
    dz = rstd * (g - (g.mean(-1, keepdim=True) if centred else 0) - xhat * along)
    # 1 - eps_outside * rstd is as near to share as 1 is to its neighbours
    along = torch.where(share == 0, 0, (g * xhat).abs().mean(-1, keepdim=True) / share.square())
    sizes = g.abs() + g.abs().mean(-1, keepdim=True) + (share + xhat.abs()) * along
    slack = 16 * r.sums * rstd * sizes * kappa
    between = r.unit * rstd * sizes  # PyTorch's backward rounds a row's statistics to the storage type
    summed = r.unit * dz.abs()
    if dz_out is not None:
        dz = dz + dz_out.double()
        summed = summed + r.unit * dz.abs()
        slack = slack + 2 * r.sums * dz_out.double().abs()
    if "residual" in inputs:
        # A tensor narrower than z is rounded twice: in z's type, then in its own.
        residual, zeros = inputs["residual"].dtype, None if keep is None else ~keep
        own = rounding(residual)
        bound = own.unit * dz.abs() + own.tiny + slack
        expected["dresidual"] = Expected(dz, bound, residual, extra=few, summed=summed, between=between)
        own = rounding(x.dtype)
        dx, slack = _drop(dz, keep, inputs), _drop(slack, keep, inputs) + 2 * r.sums * _drop(dz, keep, inputs).abs()
        bound, summed = own.unit * dx.abs() + own.tiny + slack, _drop(summed, keep, inputs)
        between = _drop(between, keep, inputs)
        expected["dx"] = Expected(dx, bound, x.dtype, zeros, extra=few, summed=summed, between=between)
    else:
        expected["dx"] = Expected(dz, r.unit * dz.abs() + r.tiny + slack, dtype, extra=few, between=between)

    over_rows = lambda t: t.reshape(count, width).sum(0)  # noqa: E731
    # PyTorch casts float32 parameters to the storage type, and the gradients of the cast ones back
    cast = lambda value, absolute: r.unit * (value.abs() + absolute) + r.tiny  # noqa: E731
    if weight is not None:
        # Tighter than u (|R| + A): norms round nothing to 16 bits on the way, so their sums have to be float32's.
        dw = over_rows(dy * xhat)
        absolute = over_rows((dy * xhat).abs())
        bound = sum_bound(dw, absolute, count, dtype, weight.dtype)
        bound = bound + 8 * r.sums * over_rows(dy.abs() * kappa * (1 + xhat.abs()))
        between = cast(dw, absolute)
        expected["dweight"] = Expected(dw, bound, weight.dtype, extra=few + walk(count), between=between)
    if bias is not None:
        db = over_rows(dy)
        absolute = over_rows(dy.abs())
        bound = sum_bound(db, absolute, count, dtype, bias.dtype)
        expected["dbias"] = Expected(db, bound, bias.dtype, extra=walk(count), between=cast(db, absolute))
    return expected


def eager(op: str, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """E: the formula written out in the inputs' own types; differentiable."""
    x, weight, bias = inputs["x"], inputs.get("weight"), inputs.get("bias")
    outputs = {}
    z = x
    if "residual" in inputs:
        z = outputs["z"] = inputs["residual"] + _drop(x, kept(inputs), inputs)
    degrees = z.shape[-1] - 1 if inputs.get("unbiased", False) else z.shape[-1]
    centred = z - z.mean(-1, keepdim=True) if op.endswith("layer_norm") else z
    variance = centred.square().sum(-1, keepdim=True) / degrees + eps_of(op, inputs)
    if outside := inputs.get("eps_outside", 0.0):
        zero = variance == 0  # where torch.std has a gradient, of 0, and sqrt none
        y = centred / (torch.where(zero, 0.0, torch.where(zero, 1.0, variance).sqrt()) + outside)
    else:
        y = centred * torch.rsqrt(variance)
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    outputs["y"] = y.to(z.dtype)
    return outputs


def storage_of(inputs: Mapping[str, Any]) -> torch.dtype:
    """The type of z and y."""
    x, residual = inputs["x"], inputs.get("residual")
    return x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)


def eps_of(op: str, inputs: Mapping[str, Any]) -> float:
    """The eps of a call, torch's default where it gives none."""
    eps = inputs.get("eps", None if op.endswith("rms_norm") else 1e-5)
    if eps is None:  # torch's default: that of the type it computes in
        return torch.finfo(torch.float64 if storage_of(inputs) == torch.float64 else torch.float32).eps
    return eps


def kept(inputs: Mapping[str, Any]) -> Tensor | None:
    """Which elements of x dropout keeps, or None without dropout."""
    x, p = inputs["x"], inputs.get("dropout_p", 0.0)
    if p == 0.0:
        return None
    rows = inputs.get("dropout_rows")
    if rows is None:
        rows = torch.arange(x.numel() // max(x.shape[-1], 1), device=x.device)
    return dropout.keep_mask(inputs["seed"], p, rows.reshape(-1), x.shape[-1]).view(x.shape)


def _drop(x: Tensor, keep: Tensor | None, inputs: Mapping[str, Any]) -> Tensor:
    return x if keep is None else torch.where(keep, x * dropout.keep_scale(inputs["dropout_p"]), 0)
