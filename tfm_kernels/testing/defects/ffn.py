"""Mistakes of ffn kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from ..data import draw
from ..emulations import Emulation, Hook, activation
from .defect import (
    NARROW,
    Build,
    Defect,
    Inputs,
    in_16_bits,
    in_tf32,
    lost_in_last_tile,
    missing,
    neighbour,
    only_last_tile,
    planter,
    times,
    truncated,
)


def _inputs(dtype: torch.dtype, rows: int = 130, width: int = 64, hidden: int = 200, **options) -> Inputs:
    """``gate=True`` adds one, ``"biased"`` one with a bias."""
    generator = torch.Generator().manual_seed(13)
    weight = lambda o, i: (torch.randn(o, i, generator=generator) / i**0.5).to(dtype)  # noqa: E731
    inputs: Inputs = {
        "x": draw("randn", (rows, width), dtype, generator),
        "w1": weight(hidden, width),
        "b1": draw("randn", (hidden,), dtype, generator),
        "w2": weight(width, hidden),
        "b2": draw("randn", (width,), dtype, generator),
    }
    gate = options.pop("gate", False)
    if gate:
        inputs["gate"] = weight(hidden, width)
    if gate == "biased":
        inputs["b1"] = torch.cat((inputs["b1"], draw("randn", (hidden,), dtype, generator)))
    if "dropout_p" in options:
        inputs["seed"] = torch.tensor(3)
    return {**inputs, **options}


def _with(**options) -> Build:
    return lambda dtype: _inputs(dtype, **options)


def _around_minus_3(name: str) -> Build:
    """Where erf's and tanh's gelu differ by a tenth of the result; elsewhere 16 bits cannot tell them apart."""

    def build(dtype: torch.dtype) -> Inputs:
        inputs = _inputs(dtype, activation=name)
        return {**inputs, "x": inputs["x"] * 0.25, "b1": torch.full_like(inputs["b1"], -3), "b2": None}

    return build


_tall = _with(rows=600)
_gelu = _with(activation="gelu")
_gelu_tall = _with(activation="gelu", rows=600)
_dropped = _with(activation="gelu", dropout_p=0.1)
_far = lambda dtype: _inputs(dtype, activation="silu", b1=torch.full((200,), 90.0, dtype=dtype))  # noqa: E731
_gated = _with(activation="silu", gate=True)
_gate_biased = _with(activation="silu", gate="biased")


def _named(name: str) -> Hook:
    return lambda value, run: name


def _dropout_first(t: Tensor, run: Emulation) -> Tensor:
    a, c, factor, name = (run.context[key] for key in ("a", "c", "factor", "activation"))
    return activation(name, a * factor) * c


def _without_dropout(t: Tensor, run: Emulation) -> Tensor:
    return activation(run.context["activation"], run.context["a"])


def _overflowing_silu(t: Tensor, run: Emulation) -> Tensor:
    """a e^a / (1 + e^a), whose e^a is inf for a beyond 88."""
    a = run.context["a"]
    return a * a.exp() / (1 + a.exp()) * run.context["c"]


def _sloped(t: Tensor, run: Emulation) -> Tensor:
    return t * (run.context["a"] > 0)


def _unscaled(t: Tensor, run: Emulation) -> Tensor:
    return (t > 0).to(t.dtype)


_plant = planter("ffn")

FFN: tuple[Defect, ...] = (
    _plant("gelu by tanh in place of erf", _around_minus_3("gelu"), "activation", _named("gelu_tanh")),
    _plant("gelu by erf in place of tanh", _around_minus_3("gelu_tanh"), "activation", _named("gelu")),
    _plant("silu's slope by gelu", _with(activation="silu"), "activation_bwd", _named("gelu")),
    _plant("silu by an exp that overflows", _far, "h", _overflowing_silu),
    _plant("slope taken at the output", _gelu, "a_bwd", lambda t, run: activation("gelu", t)),
    _plant("relu passes gradients of negative inputs", _inputs, "a_bwd", lambda t, run: t.abs()),
    _plant("b1 missing", _inputs, "b1", missing),
    _plant("b2 missing", _inputs, "b2", missing),
    _plant("gate's bias missing", _gate_biased, "b_gate", missing),
    _plant("gradient of the gate's bias times the activation's slope", _gate_biased, "db_gate", _sloped),
    _plant("gate's part of dx missing", _gated, "dx_gate", times(0.0)),
    _plant("dgate without the activation", _gated, "dc_activation", lambda t, run: torch.ones_like(t)),
    _plant("dropout before the activation", _dropped, "h", _dropout_first),
    _plant("dropout scale missing", _dropped, "factor", _unscaled),
    _plant("dropout differs in the backward", _dropped, "factor_bwd", neighbour),
    _plant("dw2 of an activation without dropout", _dropped, "h_bwd", _without_dropout),
    _plant("last tile of the hidden axis lost", _inputs, "y_part", lost_in_last_tile),
    _plant("y accumulated in 16 bits", _with(hidden=1000), "acc", in_16_bits),
    _plant("y truncates", _tall, "y", truncated, NARROW),
    _plant("hidden activation truncates", _gelu_tall, "low", truncated, NARROW),
    _plant("y +1 %", _gelu_tall, "y", times(1.01)),
    _plant("y +0.1 %", _gelu_tall, "y", times(1.001)),
    _plant("dw1 +1 %", _gelu_tall, "dw1", times(1.01)),
    _plant("db1 of the last tile alone", _inputs, "db1_part", only_last_tile),
    _plant("db1 without the last tile", _inputs, "db1_part", lost_in_last_tile),
    _plant("db2 without the last tile", _inputs, "db2_part", lost_in_last_tile),
    _plant("db2 accumulated in 16 bits", _tall, "db2_acc", in_16_bits),
    _plant("dh in tf32", _inputs, "dh", in_tf32, (torch.float32,)),
)
