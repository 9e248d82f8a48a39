"""Norms with two passes over a row, parameters' gradients by tiles of rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ... import dropout
from ..norm import eps_of, kept, storage_of
from .emulation import Emulation, Results


def norm(run: Emulation, op: str, inputs: Mapping[str, Any], douts: Mapping[str, Tensor | None]) -> Results:
    """A call of any of the four norms."""
    x, weight, bias = inputs["x"], inputs.get("weight"), inputs.get("bias")
    width, centred = x.shape[-1], op.endswith("layer_norm")
    keep = kept(inputs)
    grow = run.step("grow", dropout.keep_scale(inputs.get("dropout_p", 0.0)))
    drop = lambda t, mask: t if mask is None else torch.where(mask, t * grow, 0)  # noqa: E731
    outputs, z = {}, x
    storage = storage_of(inputs)
    run.dtype = storage
    if "residual" in inputs:
        exact = inputs["residual"].to(run.wide) + drop(x.to(run.wide), keep)
        run.context |= {"exact": exact, "x": x.to(run.wide)}
        z = outputs["z"] = run.store(exact, "z", storage)
    wide = run.context["z"] = run.step("z_read", z.to(run.wide))
    mean = run.context["mean"] = run.step(
        "mean", wide.mean(-1, keepdim=True) if centred else torch.zeros_like(wide[..., :1])
    )
    degrees = run.step("degrees", width - 1 if inputs.get("unbiased", False) else width)
    variance = run.context["variance"] = run.step("variance", (wide - mean).square().sum(-1, keepdim=True) / degrees)
    eps = run.context["eps"] = eps_of(op, inputs)
    outside = run.context["eps_outside"] = inputs.get("eps_outside", 0.0)
    rstd = run.step("rstd", 1 / ((variance + eps).sqrt() + outside))
    xhat = run.step("xhat", (wide - mean) * rstd)
    y = xhat if weight is None else xhat * weight.to(run.wide)
    y = y if bias is None else y + bias.to(run.wide)
    outputs = {"y": run.store(y, "y", storage), **outputs}

    dy, dz = douts.get("y"), run.step("dz", douts.get("z"))
    run.backward = True
    g32 = torch.zeros_like(wide) if dy is None else dy.to(run.wide)
    g = g32 if weight is None else g32 * weight.to(run.wide)
    xhat = run.step("xhat_bwd", (wide - mean) * rstd)
    first = g.mean(-1, keepdim=True) if centred else torch.zeros_like(g[..., :1])
    share = run.step("share", 1 - outside * rstd)
    second = (g * xhat).sum(-1, keepdim=True) / (run.step("degrees_bwd", degrees) * share)
    second = torch.where(share > 0, second, 0)
    total = rstd * (g - run.step("mean_g", first) - xhat * run.step("mean_gx", second))
    total = total if dz is None else total + dz.to(run.wide)
    grads: dict[str, Tensor | None] = {}
    if "residual" in inputs:
        grads["residual"] = run.store(total, "dresidual", inputs["residual"].dtype)
        total = drop(total, run.step("keep_bwd", keep))
    grads["x"] = run.store(total, "dx", x.dtype)
    for name, parameter, terms in (("weight", weight, g32 * xhat), ("bias", bias, g32)):
        if parameter is not None:
            flat = terms.reshape(-1, width)
            acc = flat.new_zeros(width)
            for sl in run.tiles(flat.shape[0]):
                acc = run.step(f"d{name}_acc", acc + run.step(f"d{name}_part", flat[sl].sum(0)))
            grads[name] = run.store(acc, f"d{name}", parameter.dtype)
    return outputs, grads
