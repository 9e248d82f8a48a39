"""The feed-forward block of a Transformer layer with weights of 8 bits, for inference.

Where ``dynamic``, rows are rounded to int8 before both products, which are products of integers and exact. With n(z)
the integers and d(z) the step of a row z, INT8_LINEAR.2 of ops/int8_linear.py, or z itself and 1 where not ``dynamic``:

    p = (n(x) w1^T) d(x) scale1 + b1        (M, F)                                            (INT8_FFN.1)
    g = (n(x) gate^T) d(x) gate_scale       (M, F), or 1 without a gate                       (INT8_FFN.2)
    h = act(p) g                                                                              (INT8_FFN.3)
    y = (n(h) w2^T) d(h) scale2 + b2        (M, Eo)                                           (INT8_FFN.4)

p, g and h are float32, float64 for float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import _autograd, _backend, _check, _library, _measured
from .._library import ACTIVATIONS
from ..aten import int8_ffn as aten
from ..reference import int8_ffn as reference


@dataclass(frozen=True)
class Call:
    """What the choice of a backend depends on."""

    device: str
    dtype: torch.dtype
    rows: int
    width: int
    hidden: int
    out: int
    activation: str
    gated: bool
    biased: bool
    dynamic: bool
    training: bool


def _triton(call: Call) -> str | None:
    rounded = None if call.dynamic else "has kernels for rows that are rounded alone (dynamic=True)"
    return _backend.no_float64(call) or rounded or _backend.no_gradients(call)


KERNELS = {"cpu": _backend.no_gradients, "triton": _triton}
SUPPORT = _backend.support("int8_ffn", KERNELS, directions=("fwd",))


def prefer(call: Call) -> tuple[str, ...]:
    """Backends in the order of automatic choice."""
    if call.device != "cpu":  # H200: 0.07 to 0.35 of aten's time, 0.75 ms of the host's and not 1.1
        return _backend.on_gpu("triton")
    return _backend.cpu_first(call.device)


def describe(
    x, w1, scale1, b1, w2, scale2, b2, *, activation="relu", gate=None, gate_scale=None, dynamic=False
) -> Call:
    """Checks the arguments of int8_ffn()."""
    weights = {"w1": w1, "scale1": scale1, "w2": w2, "scale2": scale2}
    optional = {"b1": b1, "b2": b2, "gate": gate, "gate_scale": gate_scale}
    for name, value in {"x": x, **weights, **optional}.items():
        _check.tensor("int8_ffn", name, value, optional=name in optional)
    _check.choice("int8_ffn", "activation", activation, ACTIVATIONS)
    if not isinstance(dynamic, bool):
        raise TypeError(f"int8_ffn: dynamic must be a bool, got {type(dynamic).__name__}")
    _check.floating("int8_ffn", x=x, b1=b1, b2=b2)
    _check.same("int8_ffn", x=x, b1=b1, b2=b2)
    _check.same_device("int8_ffn", x=x, **weights, **optional)
    _check.dense("int8_ffn", x=x, b1=b1, b2=b2)
    if x.dim() == 0:
        raise ValueError("int8_ffn: x must have shape (..., E), got ()")
    if (gate is None) != (gate_scale is None):
        absent, there = ("gate", "gate_scale") if gate is None else ("gate_scale", "gate")
        raise ValueError(f"int8_ffn: {absent} must be given with {there}, got None")
    _check.int8_weight("int8_ffn", "w1", w1, "scale1", scale1)
    _check.int8_weight("int8_ffn", "w2", w2, "scale2", scale2)
    (hidden, width), out = w1.shape, w2.shape[0]
    if gate is not None:
        _check.int8_weight("int8_ffn", "gate", gate, "gate_scale", gate_scale)
        _check.shape("int8_ffn", "gate", gate, (hidden, width), "w1", w1)
    _check.shape("int8_ffn", "w1", w1, (hidden, x.shape[-1]), "x", x)
    _check.shape("int8_ffn", "w2", w2, (out, hidden), "w1", w1)
    _check.shape("int8_ffn", "b1", b1, (hidden,), "w1", w1)
    _check.shape("int8_ffn", "b2", b2, (out,), "w2", w2)
    if dynamic:
        _check.int8_width("int8_ffn", "x", width)
        _check.int8_width("int8_ffn", "w2", hidden)
    training = _check.records_graph(x, scale1, b1, scale2, b2, gate_scale)
    biased = b1 is not None or b2 is not None
    rows = math.prod(x.shape[:-1])
    shape = rows, width, hidden, out
    return Call(x.device.type, x.dtype, *shape, activation, gate is not None, biased, dynamic, training)


def bucket(call: Call) -> tuple[str, str]:
    """The device, and what a measured time depends on."""
    return call.device, _measured.bucket(
        call.dtype, rows=_measured.rounded(call.rows), width=call.width, hidden=call.hidden, out=call.out,
        activation=call.activation, gated=call.gated, dynamic=call.dynamic, training=call.training,
    )  # fmt: skip


def _stand_in(call: Call) -> _backend.StandIn:
    given: dict[str, Any] = {"dtype": call.dtype, "device": call.device}

    def weight(out: int, width: int) -> tuple[Tensor, Tensor]:
        integers = torch.randint(-127, 128, (out, width), dtype=torch.int8, device=call.device)
        return integers, torch.full((out,), 0.01, device=call.device)

    x = torch.randn(call.rows, call.width, **given)
    first, second = weight(call.hidden, call.width), weight(call.out, call.hidden)
    gate, steps = weight(call.hidden, call.width) if call.gated else (None, None)
    b1, b2 = (torch.zeros(size, **given) if call.biased else None for size in (call.hidden, call.out))
    options: dict[str, Any] = {
        "activation": call.activation, "gate": gate, "gate_scale": steps, "dynamic": call.dynamic,
    }  # fmt: skip
    leaves = [leaf for leaf in (x, b1, b2) if leaf is not None]
    return _backend.StandIn(
        lambda backend: (int8_ffn(x, *first, b1, *second, b2, **options, backend=backend),),
        [leaf.requires_grad_() for leaf in leaves] if call.training else [],
    )


OP = _backend.register(_backend.Op("int8_ffn", SUPPORT, prefer, describe, bucket, _stand_in))
_CHOICES = _backend.Choices()  # (backend, Call)
_FWD = _library.declare(
    "int8_ffn_fwd",
    "(Tensor x, Tensor w1, Tensor scale1, Tensor? b1, Tensor w2, Tensor scale2, Tensor? b2, Tensor? gate, "
    "Tensor? gate_scale, int activation, bool dynamic) -> Tensor",
    lambda x, w1, scale1, b1, w2, *rest: x.new_empty((x.shape[0], w2.shape[0])),
    KERNELS,
)


def int8_ffn(
    x: Tensor,
    w1: Tensor,
    scale1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    scale2: Tensor,
    b2: Tensor | None,
    *,
    activation: str = "relu",
    gate: Tensor | None = None,
    gate_scale: Tensor | None = None,
    dynamic: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Runs each row of ``x`` through linear, activation, optional gate and linear, with weights of int8.

    y = int8(act(int8(x) w1^T + b1) [* (int8(x) gate^T)]) w2^T + b2            (INT8_FFN.1 to .4)

    Args:
        x: (..., E), float16 | bfloat16 | float32 | float64. Any strides. E and F <= 131,072 where ``dynamic``.
        w1: (F, E), int8.
        scale1: (F,), float32: the size of a step of each row of ``w1``.
        b1: (F,), dtype of ``x``, or None for no bias.
        w2: (Eo, F), int8.
        scale2: (Eo,), float32.
        b2: (Eo,), dtype of ``x``, or None for no bias.
        activation: "relu" | "gelu" (by erf) | "gelu_tanh" | "silu".
        gate: (F, E), int8, of the gated family: its product multiplies the activation. None for no gate.
        gate_scale: (F,), float32, with a gate.
        dynamic: rounds rows of x and of the hidden activation to int8, for products of integers. False multiplies
            them as they are: for a few rows, where the weights' way from memory is the cost.
        backend: "reference" | "aten" | "cpu" | "triton", or None to choose automatically.

    Returns:
        (..., Eo), dtype and device of ``x``, contiguous.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: shapes, dtypes or devices disagree (the message names argument, expected, got).
        BackendError: ``backend`` was named and cannot run this call; "cpu" and "triton" compute no gradients, "triton"
            has kernels for ``dynamic`` alone.

    Numerics: the hidden activation is float32 (float64 for float64), y is rounded once. Deterministic. Where
        ``dynamic`` the products are exact, the hidden activation's last bit may decide an integer, and a row that holds
        NaN or an infinity gives NaN; else sums are in float32 (float64). Gradients on reference and aten pass the
        roundings as if they were not there.
    Cost: 4 M E F operations (6 with a gate); M = product of the leading dimensions. On cpu many rows go by tiles of 64,
        which need no memory that grows with M beyond x and y; fewer than 128 a thread, and all where not ``dynamic``,
        keep the hidden activation. triton keeps it too: 5 bytes an element, written once and read once.
    Source: Dettmers et al., "LLM.int8()" (2022), section 2.1, for both products of ``ops.ffn``.

    Example:
        >>> w, steps = torch.ones(3, 3, dtype=torch.int8), torch.ones(3)
        >>> int8_ffn(torch.tensor([[1.0, 2.0, -5.0]]), w, steps, None, w, steps, torch.ones(3))
        tensor([[1., 1., 1.]])
    """
    key = _library.signature(backend, x, w1, scale1, b1, w2, scale2, b2, activation, gate, gate_scale, dynamic)
    choice = _CHOICES.get(key)
    if choice is None:
        options = {"activation": activation, "gate": gate, "gate_scale": gate_scale, "dynamic": dynamic}
        call = describe(x, w1, scale1, b1, w2, scale2, b2, **options)
        choice = _CHOICES.keep(key, (_backend.select(OP, call, backend), call))
    name, call = choice
    rows = x if x.dim() == 2 else x.reshape(call.rows, call.width)
    weights = w1, scale1, b1, w2, scale2, b2
    if name in _FWD:
        index = ACTIVATIONS.index(activation)
        y = _autograd.below_autograd(_FWD[name], rows, *weights, gate, gate_scale, index, dynamic)
        return _autograd.shaped_like(y, x)
    if name == "aten":
        differentiable = call.training or _library.transformed()
        y = aten.int8_ffn(rows, *weights, activation, gate, gate_scale, dynamic, differentiable)
    else:
        y = reference.int8_ffn(rows, *weights, activation, gate, gate_scale, dynamic)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], call.out)
