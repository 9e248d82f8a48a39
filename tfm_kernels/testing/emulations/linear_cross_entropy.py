"""Linear layer and cross entropy, a tile of classes at a time: online softmax forward, the logits again backward."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .emulation import Emulation, Results


def linear_cross_entropy(run: Emulation, inputs: Mapping[str, Any], douts: Mapping[str, Tensor | None]) -> Results:
    """A call, forward and backward."""
    shape, ignore = inputs["target"].shape, inputs.get("ignore_index", -100)
    target = inputs["target"].reshape(-1, 1)
    counted = target != ignore
    given, weight = run.read(inputs["x"]), run.read(inputs["weight"])
    bias = run.step("bias", run.up(inputs.get("bias")))
    rows, (classes, width) = target.shape[0], weight.shape
    x = torch.where(counted, given.reshape(rows, width), 0.0)
    smoothing = run.step("smoothing", inputs.get("label_smoothing", 0.0))
    target, numbers = run.step("target", target), torch.arange(classes)

    highest = torch.full((rows, 1), -torch.inf, dtype=run.wide)
    total, of_target, sums = (torch.zeros(rows, 1, dtype=run.wide) for _ in range(3))
    for tile in run.tiles(classes):
        z = _logits(run, x, weight, bias, tile)
        top = z.amax(1, keepdim=True)
        if run.lazy:
            top = torch.where(top > highest + 8 * math.log(2), top, highest)
        top = torch.maximum(top, highest)
        kept = run.step("kept", total * run.step("rescale", torch.exp(highest - top)))
        total = run.step("total", kept + run.step("part", torch.exp(z - top).sum(1, keepdim=True)))
        highest = top
        of_target = of_target + torch.where(target == numbers[tile], z, 0).sum(1, keepdim=True)
        sums = sums + run.step("sums_part", z.sum(1, keepdim=True))
    lse = run.step("lse", highest + total.log())
    mean = sums / run.step("classes", classes)
    loss = lse - run.step("share", 1 - smoothing) * of_target - smoothing * mean
    loss = torch.where(run.step("counted_loss", counted), loss, 0.0).view(shape)
    reduction = inputs.get("reduction", "mean")
    count = run.step("count", counted.sum()) if reduction == "mean" else 1
    loss = run.store(loss if reduction == "none" else loss.sum() / count, "loss", run.wide)
    dloss = douts.get("loss")
    if dloss is None:
        return {"loss": loss}, {}

    run.backward = True
    dloss = run.step("dloss", (dloss.to(run.wide) / count).reshape(-1, 1).expand(rows, 1))
    bias, even = run.step("bias_bwd", bias), run.step("even", smoothing / classes)
    dx, parts = torch.zeros(rows, width, dtype=run.wide), []
    for tile in run.tiles(classes):
        p = torch.exp(_logits(run, x, weight, bias, tile) - lse)
        onehot = (target == numbers[tile]).to(run.wide) * run.step("share_bwd", 1 - smoothing)
        dz = dloss * (run.step("p", p) - onehot - even)
        dz = run.step("dz", torch.where(run.step("counted_dz", counted), dz, 0.0))
        parts.append(dz if run.lazy else run.low(dz))
        dx = run.step("dx_acc", run.step("dx_kept", dx) + run.step("dx_part", parts[-1] @ weight[tile]))
    dz = torch.cat(parts, 1)
    dweight, dbias = torch.zeros_like(weight), dz.new_zeros(classes)
    for tile in run.tiles(rows):
        dweight = run.step("dweight_acc", dweight + run.step("dweight_part", dz[tile].T @ x[tile]))
        dbias = run.step("dbias_acc", dbias + run.step("dbias_part", dz[tile].sum(0)))
    grads = {"x": run.store(dx, "dx").view(inputs["x"].shape), "weight": run.store(dweight, "dweight")}
    if inputs.get("bias") is not None:
        grads["bias"] = run.store(dbias, "dbias")
    return {"loss": loss}, dict(grads)


def _logits(run: Emulation, x: Tensor, weight: Tensor, bias: Tensor | None, tile: slice) -> Tensor:
    z = run.step("z", x @ weight[tile].T)
    return z if bias is None else z + bias[tile]
