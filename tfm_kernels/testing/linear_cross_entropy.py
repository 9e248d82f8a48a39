"""The linear_cross_entropy judge: float64 truth, bounds and the written-out eager formula.

z = x w^T + b,  lse = log sum exp(z),  loss = lse - (1 - s) z_t - s mean(z)
dz = dloss (exp(z - lse) - (1 - s) [v = t] - s / V);  dx = dz w,  dw = dz^T x,  db = sum dz

Rows whose target is ignore_index have loss and dz exactly 0, whatever stands in them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .rounding import Expected, product_bound, reach, rounding, score_error, sum_bound, summing, walk


def expect(op: str, inputs: Mapping[str, Any], outputs: Mapping[str, Tensor], douts: Mapping[str, Tensor | None]):
    """Name -> Expected for loss, and for every gradient where ``douts`` holds that of the loss."""
    given, dtype, shape = inputs["x"], inputs["x"].dtype, inputs["target"].shape
    stored = _loss_dtype(dtype)
    r, wide = rounding(dtype), rounding(stored)
    weight, bias, target = inputs["weight"].double(), inputs.get("bias"), inputs["target"].reshape(-1, 1)
    (classes, width), rows = weight.shape, target.shape[0]
    smoothing, reduction = inputs.get("label_smoothing", 0.0), inputs.get("reduction", "mean")
    counted = target != inputs.get("ignore_index", -100)
    count, ignored = counted.sum(), ~counted
    target = torch.where(counted, target, 0)
    x = torch.where(counted, given.double().reshape(rows, width), 0.0)

    z = x @ weight.T if bias is None else x @ weight.T + bias.double()
    ez = score_error(r, x, weight, 0 if bias is None else bias.double().abs())  # the logits are never rounded to x's
    lse = z.logsumexp(1, keepdim=True)
    p = torch.exp(z - lse)
    # exp's own few units, and those of the difference in its argument; the tiles' maxima differ by no more than that.
    own = 4 * wide.unit * (1 + (z - lse).abs())
    # Errors of logits reach lse as softmax weighs them; a sum of V exponentials has V independent roundings.
    e_lse = (p * (ez + own)).sum(1, True) + wide.unit * (classes**0.5 + 2 * lse.abs())

    z_t, ez_t = z.gather(1, target), ez.gather(1, target)
    z_mean = z.mean(1, keepdim=True)
    loss = lse - (1 - smoothing) * z_t - smoothing * z_mean
    e_mean = ez.mean(1, True) + summing(z_mean, z.abs().mean(1, True), classes, wide)
    # lse, the target's share and the mean cancel: each difference rounds at their size.
    e_loss = e_lse + (1 - smoothing) * ez_t + smoothing * e_mean
    e_loss = e_loss + 2 * wide.unit * (lse.abs() + (1 - smoothing) * z_t.abs() + smoothing * z_mean.abs())
    loss, e_loss = torch.where(counted, loss, 0.0), torch.where(counted, e_loss, 0.0)
    if reduction == "none":
        bound = e_loss + wide.unit * loss.abs() + wide.tiny
        # PyTorch subtracts the maximum first and rounds at the size of the loss, not at that of the logits.
        sizes = torch.stack([lse, (1 - smoothing) * z_t, smoothing * z_mean]) * counted
        extra = wide.unit * float(sizes.norm() / loss.norm().clamp(min=1e-300))
        expected = {"loss": Expected(loss.view(shape), bound.view(shape), stored, ignored.view(shape), extra)}
    else:
        total = loss.sum()
        bound = e_loss.sum() + sum_bound(total, loss.abs().sum(), rows, stored, stored)
        if reduction == "mean":
            total, bound = total / count, (bound + wide.unit * total.abs()) / count
        expected = {"loss": Expected(total, bound, stored)}
    dloss = douts.get("loss")
    if dloss is None:
        return expected

    dloss = dloss.double().reshape(-1, 1).expand(rows, 1)
    dloss = torch.where(counted, dloss / count if reduction == "mean" else dloss, 0.0)
    share = torch.zeros_like(z).scatter_(1, target, 1 - smoothing)
    dz = dloss * (p - share - smoothing / classes)
    terms = dloss.abs() * (p + share + smoothing / classes)
    # What is wrong with softmax, capped because it lies in [0, 1]; 1 - s, s / V, two differences, 1 / count and dloss
    # round at the size of the terms, which may cancel.
    e_p = (p * torch.expm1((ez + e_lse + own).clamp(max=40)) + wide.tiny).clamp(max=1)
    e_dz = dloss.abs() * e_p + 4 * wide.unit * terms
    dz_a = reach(dz, dtype)  # dz is rounded once to x's type between the products
    # MKL sums single rows in another way; where the terms cancel, as for one class, E's error is chance.
    fair = int(count) >= 4 and int(count) * min(width, classes) >= 64
    fair = fair and bool(16 * dz.norm() > terms.norm())
    kept = wide.unit * float((dloss * p * lse).norm() / dz.norm().clamp(min=1e-300))  # lse is stored, PyTorch's is not
    ones = counted.double()

    def gradient(
        name: str, value: Tensor, absolute: Tensor, error: Tensor, units: Tensor, others: Tensor | float, length: int
    ) -> None:
        form = inputs[name].shape
        bound = product_bound(value, absolute, units, length, dtype, dtype, others) + error
        extra = kept + (walk(rows) if name == "bias" else 0.0)
        zeros = ignored.expand_as(x).reshape(form) if name == "x" else None
        expected[f"d{name}"] = Expected(value.view(form), bound.view(form), dtype, zeros, extra, fair)

    wa, xa = weight.abs(), x.abs()
    # A target's term is as large as hundreds of the others; those of rows that repeat are equal, and each may round
    # the sum that it is added to the same way.
    step_x, step_w = (r.sums * _equal_rows(t) for t in (x[counted[:, 0]], weight))
    error = e_dz @ wa + step_w * dz.abs().amax(1, True) * _largest(weight)
    gradient("x", dz @ weight, dz_a @ wa, error, ones * wa.sum(0), dz_a.sum(1, True), classes)
    error = e_dz.T @ xa + step_x * _largest(dz)[:, None] * _largest(x)
    gradient("weight", dz.T @ x, dz_a.T @ xa, error, xa.sum(0), dz_a.sum(0)[:, None], rows)
    if bias is not None:
        error = e_dz.sum(0) + step_x * _largest(dz)
        gradient("bias", dz.sum(0), dz_a.sum(0), error, ones.sum(), 0.0, rows)
    return expected


def eager(op: str, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """E: the layer in the inputs' own type and the loss in float32, as users write it and autocast runs it."""
    x, target = inputs["x"], inputs["target"]
    logits = F.linear(x.reshape(target.numel(), x.shape[-1]), inputs["weight"], inputs.get("bias"))
    options = {name: inputs[name] for name in ("ignore_index", "label_smoothing", "reduction") if name in inputs}
    loss = F.cross_entropy(logits.to(_loss_dtype(x.dtype)), target.reshape(-1), **options)
    return {"loss": loss.view(target.shape) if loss.dim() else loss}


def _equal_rows(t: Tensor) -> int:
    """How often the commonest row occurs."""
    return int(torch.unique(t, dim=0, return_counts=True)[1].max()) if t.numel() else t.shape[0]


def _largest(t: Tensor) -> Tensor:
    """The largest absolute number of each column; 0 of no rows."""
    return F.pad(t.abs(), (0, 0, 0, 1)).amax(0)


def _loss_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
