"""The int8_ffn judge of the forward: float64 truth, and what may be one integer off.

Where dynamic, the hidden activation is rounded to integers, and its own rounding may decide those that lie half way
between two: the bound allows each of these a step, and no other. Where not, it is ffn's block in float32 (float64) of
the weights that the integers stand for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from . import ffn
from .ffn import ACTIVATIONS
from .int8_linear import rounded
from .rounding import Expected, rounding


def expect(op: str, inputs: Mapping[str, Any], outputs: Mapping[str, Tensor], douts: Mapping[str, Tensor | None]):
    """Name -> Expected for y."""
    if not inputs.get("dynamic", False):
        return _as_they_are(inputs, outputs)
    given, dtype = inputs["x"], inputs["x"].dtype
    r, leading = rounding(dtype), given.shape[:-1]
    name = inputs.get("activation", "relu")
    x = rounded(given.reshape(leading.numel(), given.shape[-1]))

    def product(weight: Tensor, scale: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """An exact product of integers times its steps, and its error.

        Here, as on reference and aten, it is one of numbers, whose sum rounds in float64.
        """
        q, steps = weight.double(), scale.double()
        value, summed = x @ q.T * steps, 2.0**-51 * (x.abs() @ q.abs().T * steps.abs())
        shifted = value if bias is None else value + bias.double()
        return shifted, r.sums * (4 * value.abs() + shifted.abs()) + 2.0**-126 + summed

    p, ep = product(inputs["w1"], inputs["scale1"], inputs.get("b1"))
    act, slope, bend = ACTIVATIONS[name](p)
    own = 0 if name == "relu" else 4 * r.sums * p.abs()
    h, eh = act, slope.abs() * ep + own + bend.abs() * ep * ep + r.sums * act.abs()
    if inputs.get("gate") is not None:
        g, eg = product(inputs["gate"], inputs["gate_scale"], None)
        h, eh = act * g, eh * g.abs() + act.abs() * eg + eh * eg + r.sums * (act * g).abs()

    largest, most = (t.abs().amax(1, keepdim=True) if h.shape[1] else t.new_zeros(t.shape[0], 1) for t in (h, eh))
    uncertain = most / largest.clamp(min=2.0**-119) + 4 * r.sums
    small = largest < 2.0**-119
    steps = torch.where(small, 0.0, h * 127 / largest)
    off = torch.where(small, 0.0, 127 / largest * eh) + uncertain * steps.abs()
    integers = steps.round()
    flips = ((steps - integers).abs() + off >= 0.5).double()
    step = torch.where(largest.isfinite(), largest / 127, torch.nan)

    w2, s2 = inputs["w2"].double(), inputs["scale2"].double()
    value = integers @ w2.T * step * s2
    b2 = inputs.get("b2")
    y = value if b2 is None else value + b2.double()
    bound = flips @ w2.abs().T * step * s2.abs() * (1 + uncertain) + (uncertain + 4 * r.sums) * value.abs()
    # a row that counts as zeros may be one of errors, rounded to steps of its own: as far in gelu's tail
    lost = torch.where(small, eh + most / 254, 0.0) @ w2.abs().T * s2.abs()
    bound = bound + lost + (r.unit + r.sums) * y.abs() + r.tiny
    out = *leading, w2.shape[0]
    # reference multiplies numbers, whose sums round in float64
    summed = 2.0**-51 * max(w2.shape[1], 1) ** 0.5 * (integers.abs() @ w2.abs().T * step * s2.abs())
    return {"y": Expected(y.view(out), bound.view(out), dtype, fair=False, summed=summed.view(out))}


def _as_they_are(inputs: Mapping[str, Any], outputs: Mapping[str, Tensor]) -> dict[str, Expected]:
    """Rows that are not rounded: y is rounded once, and each sum has the rounding of its step on top of ffn's."""
    x = inputs["x"]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    block = ffn.expect("ffn", {**inputs, "x": wide, **_weights(inputs)}, outputs, {})["y"]
    shortest = max(1, min(inputs["w1"].shape))
    r, bound = rounding(x.dtype), block.bound * (1 + shortest**-0.5)
    bound = bound + r.unit * block.value.abs() + r.tiny
    return {"y": Expected(block.value, bound, x.dtype, fair=block.fair)}


def _weights(inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """The numbers that the integers stand for, float64."""
    steps = {"w1": "scale1", "w2": "scale2", "gate": "gate_scale"}
    return {
        name: inputs[name].double() * inputs[scale].double()[:, None]
        for name, scale in steps.items()
        if inputs.get(name) is not None
    }


def eager(op: str, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """E: the block with the numbers that the integers stand for, rounded to the inputs' own type in between."""
    x = inputs["x"]
    if not inputs.get("dynamic", False):
        return ffn.eager("ffn", {**inputs, **{name: w.to(x.dtype) for name, w in _weights(inputs).items()}})

    def linear(x: Tensor, name: str, steps: str, bias: str) -> Tensor:
        rows = rounded(x.reshape(x.shape[:-1].numel(), x.shape[-1])).view(x.shape)
        y = rows @ (inputs[name].double() * inputs[steps].double()[:, None]).T
        return (y if inputs.get(bias) is None else y + inputs[bias].double()).to(x.dtype)

    hidden = linear(x, "w1", "scale1", "b1")
    hidden = ACTIVATIONS[inputs.get("activation", "relu")](hidden.double())[0].to(x.dtype)
    if inputs.get("gate") is not None:
        hidden = hidden * linear(x, "gate", "gate_scale", "")
    return {"y": linear(hidden, "w2", "scale2", "b2")}
