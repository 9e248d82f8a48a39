"""Mistakes of norm kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from ..data import draw
from ..emulations import Emulation, Hook
from ..norm import kept
from .defect import (
    ALL,
    NARROW,
    Build,
    Defect,
    Inputs,
    in_16_bits,
    lost_in_last_tile,
    missing,
    neighbour,
    one,
    only_last_tile,
    planter,
    times,
    truncated,
)


def _inputs(dtype: torch.dtype, data: str = "randn", rows: int = 180, width: int = 200, **options) -> Inputs:
    """``residual=True`` adds one, ``bias=False`` leaves it out."""
    generator = torch.Generator().manual_seed(12)
    inputs: Inputs = {"x": draw(data, (rows, width), dtype, generator)}
    if options.pop("residual", False):
        inputs["residual"] = draw(data, (rows, width), dtype, generator)
    inputs["weight"] = draw("randn", (width,), dtype, generator)
    if options.pop("bias", True):
        inputs["bias"] = draw("randn", (width,), dtype, generator)
    if "dropout_p" in options:
        inputs["seed"] = torch.tensor(3)
    return {**inputs, **options}


def _with(**options) -> Build:
    return lambda dtype: _inputs(dtype, **options)


_tall = _with(rows=600, width=64)
_narrow = _with(width=24)
_sum = _with(residual=True, dropout_p=0.1)


def _infinite_where_dropped(dtype: torch.dtype) -> Inputs:
    """inf in elements that dropout takes away, every seventh row one."""
    inputs = _sum(dtype)
    keep = kept(inputs)
    assert keep is not None
    for row in range(0, keep.shape[0], 7):
        inputs["x"][row, keep[row].logical_not().nonzero()[0]] = torch.inf
    return inputs


def _one_pass(t: Tensor, run: Emulation) -> Tensor:
    z, mean = run.context["z"], run.context["mean"]
    return (z.square().mean(-1, keepdim=True) - mean.square()).clamp(min=0)


def _eps_outside(t: Tensor, run: Emulation) -> Tensor:
    return 1 / (run.context["variance"].sqrt() + run.context["eps"])


def _eps_inside(t: Tensor, run: Emulation) -> Tensor:
    return (run.context["variance"] + run.context["eps_outside"]).rsqrt()


def _no_eps(t: Tensor, run: Emulation) -> Tensor:
    return run.context["variance"].clamp(min=1e-30).rsqrt()


def _mean_of_z(t: Tensor, run: Emulation) -> Tensor:
    return run.context["z"].mean(-1, keepdim=True)


def _times_0(t: Tensor, run: Emulation) -> Tensor:
    """A dropped element is multiplied by 0, which an infinite one survives as NaN."""
    return t + 0 * run.context["x"]


def _plant(
    name: str,
    build: Build,
    step: str,
    hook: Hook,
    op: str = "layer_norm",
    dtypes: tuple[torch.dtype, ...] = ALL,
) -> Defect:
    return planter(op)(name, build, step, hook, dtypes)


NORM: tuple[Defect, ...] = (
    _plant("one-pass variance", _with(data="mean_1000"), "variance", _one_pass),
    _plant("eps outside the root", _narrow, "rstd", _eps_outside),
    _plant("eps inside the root", _with(width=24, eps=0.0, eps_outside=1e-2), "rstd", _eps_inside),
    _plant("eps outside without its gradient", _with(width=24, eps=0.0, eps_outside=0.1), "share", one),
    _plant("eps missing", _with(data="subnormals"), "rstd", _no_eps),
    _plant("unbiased in place of biased", _inputs, "degrees", lambda n, run: n - 1),
    _plant("biased in place of unbiased", _with(unbiased=True), "degrees", lambda n, run: n + 1),
    _plant("backward divides by N - 1", _narrow, "degrees_bwd", lambda n, run: n - 1),
    _plant("mean in 16 bits", _inputs, "mean", in_16_bits),
    _plant("mean of a constant row rounded", _with(data="constant_rows"), "mean", in_16_bits, dtypes=(torch.float32,)),
    _plant("rstd in 16 bits", _inputs, "rstd", in_16_bits),
    _plant("xhat in 16 bits", _inputs, "xhat", in_16_bits),
    _plant("xhat of the backward in 16 bits", _inputs, "xhat_bwd", in_16_bits),
    _plant("y truncates", _inputs, "y", truncated, dtypes=NARROW),
    _plant("y +1 %", _inputs, "y", times(1.01)),
    _plant("y +0.1 %", _inputs, "y", times(1.001)),
    _plant("dx without its first mean", _inputs, "mean_g", times(0.0)),
    _plant("dx without its second mean", _inputs, "mean_gx", times(0.0)),
    _plant("dx +1 %", _inputs, "dx", times(1.01)),
    _plant("dweight of the last tile alone", _inputs, "dweight_part", only_last_tile),
    _plant("dweight without the last tile", _inputs, "dweight_part", lost_in_last_tile),
    _plant("dweight accumulated in 16 bits", _tall, "dweight_acc", in_16_bits),
    _plant("dbias of the last tile alone", _inputs, "dbias_part", only_last_tile),
    _plant("dbias without the last tile", _inputs, "dbias_part", lost_in_last_tile),
    _plant("dbias accumulated in 16 bits", _tall, "dbias_acc", in_16_bits),
    _plant("mean subtracted", _with(bias=False), "mean", _mean_of_z, "rms_norm"),
    _plant("dropout scale missing", _sum, "grow", one, "add_layer_norm"),
    _plant("dropped elements times 0", _infinite_where_dropped, "z", _times_0, "add_layer_norm"),
    _plant("dropout differs in the backward", _sum, "keep_bwd", neighbour, "add_layer_norm"),
    _plant("dropout forgotten in the backward", _sum, "keep_bwd", one, "add_layer_norm"),
    _plant("gradient of z ignored", _sum, "dz", missing, "add_layer_norm"),
    _plant("y of a z not yet rounded", _sum, "z_read", lambda t, run: run.context["exact"], "add_layer_norm", NARROW),
    _plant("z truncates", _sum, "z", truncated, "add_layer_norm", NARROW),
)
