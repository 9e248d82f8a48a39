"""A linear layer whose weights are integers of 8 bits, for inference.

    y = (x q^T) s + b                                                                   (INT8_LINEAR.1)

q holds the weights, an integer from -128 to 127 each, and s the size of one step, a number for every output feature.
With ``dynamic`` each row of x is rounded to integers as well, so that the product is one of integers and exact:

    a_i = max_k |x_ik|,   n_ik = round(x_ik * (127 / a_i)),   y_ij = (sum_k n_ik q_jk) (a_i / 127 s_j) + b_j
                                                                                        (INT8_LINEAR.2)

round() goes to the nearest, ties to even; all of it in float32, in float64 for float64, so that every backend finds the
same integers. A row whose a_i is below 2**-119 counts as zeros; one that holds NaN or an infinity gives NaN.

Source: Dettmers et al., "LLM.int8()" (2022), section 2.1, row-wise and column-wise absmax quantization.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import _autograd, _backend, _check, _library, _measured
from ..aten import int8_linear as aten
from ..reference import int8_linear as reference


@dataclass(frozen=True)
class Call:
    """What the choice of a backend depends on."""

    device: str
    dtype: torch.dtype
    rows: int
    width: int
    out: int
    biased: bool
    dynamic: bool
    training: bool


def _triton(call: Call) -> str | None:
    return _backend.no_float64(call) or _backend.no_gradients(call)


KERNELS = {"cpu": _backend.no_gradients, "triton": _triton}
SUPPORT = _backend.support("int8_linear", KERNELS, directions=("fwd",))


def prefer(call: Call) -> tuple[str, ...]:
    """Backends in the order of automatic choice."""
    if call.device != "cpu":  # H200: 0.07 to 0.3 of aten's time, but 250 us of the host's, not 90
        weights = call.width * call.out
        large = weights >= 1 << 25 or _library.certain(call.rows * weights >= 1 << 34)
        return _backend.on_gpu(*(("triton",) if large and call.dtype != torch.float32 else ()))
    return _backend.cpu_first(call.device)


def describe(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, *, dynamic: bool = False) -> Call:
    """Checks the arguments of int8_linear()."""
    tensors: dict[str, Tensor | None] = {"x": x, "weight": weight, "scale": scale, "bias": bias}
    for name, value in tensors.items():
        _check.tensor("int8_linear", name, value, optional=name == "bias")
    _check.floating("int8_linear", x=x, bias=bias)
    _check.same("int8_linear", x=x, bias=bias)
    _check.same_device("int8_linear", **tensors)
    _check.dense("int8_linear", x=x, bias=bias)
    if not isinstance(dynamic, bool):
        raise TypeError(f"int8_linear: dynamic must be a bool, got {type(dynamic).__name__}")
    if x.dim() == 0:
        raise ValueError("int8_linear: x must have shape (..., K), got ()")
    _check.int8_weight("int8_linear", "weight", weight, "scale", scale)
    out, width = weight.shape
    _check.shape("int8_linear", "weight", weight, (out, x.shape[-1]), "x", x)
    _check.shape("int8_linear", "bias", bias, (out,), "weight", weight)
    if dynamic:
        _check.int8_width("int8_linear", "x", width)
    training = _check.records_graph(x, scale, bias)
    return Call(x.device.type, x.dtype, math.prod(x.shape[:-1]), width, out, bias is not None, dynamic, training)


def bucket(call: Call) -> tuple[str, str]:
    """The device, and what a measured time depends on."""
    rows = _measured.rounded(call.rows)
    return call.device, _measured.bucket(
        call.dtype,
        rows=rows, width=call.width, out=call.out, biased=call.biased, dynamic=call.dynamic, training=call.training,
    )  # fmt: skip


def _stand_in(call: Call) -> _backend.StandIn:
    given: dict[str, Any] = {"dtype": call.dtype, "device": call.device}
    x = torch.randn(call.rows, call.width, **given)
    weight = torch.randint(-127, 128, (call.out, call.width), dtype=torch.int8, device=call.device)
    scale = torch.full((call.out,), 0.01, device=call.device)
    bias = torch.zeros(call.out, **given) if call.biased else None
    leaves = [leaf for leaf in (x, bias) if leaf is not None]
    return _backend.StandIn(
        lambda backend: (int8_linear(x, weight, scale, bias, dynamic=call.dynamic, backend=backend),),
        [leaf.requires_grad_() for leaf in leaves] if call.training else [],
    )


OP = _backend.register(_backend.Op("int8_linear", SUPPORT, prefer, describe, bucket, _stand_in))
_CHOICES = _backend.Choices()  # (backend, Call)
products_of_int8 = aten.products_of_int8  # for graphs that run elsewhere
_FWD = _library.declare(
    "int8_linear_fwd",
    "(Tensor x, Tensor weight, Tensor scale, Tensor? bias, bool dynamic) -> Tensor",
    lambda x, weight, scale, bias, dynamic: x.new_empty((x.shape[0], weight.shape[0])),
    KERNELS,
)


def int8_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    dynamic: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Runs each row of ``x`` through a linear layer with int8 weights.

    y = (x weight^T) scale + bias                                        (INT8_LINEAR.1)

    Args:
        x: (..., K), float16 | bfloat16 | float32 | float64. Any strides. K <= 131,072 where ``dynamic``.
        weight: (N, K), int8.
        scale: (N,), float32: the size of a step of each row of ``weight``.
        bias: (N,), dtype of ``x``, or None for no bias.
        dynamic: rounds each row of ``x`` to int8 as well (INT8_LINEAR.2): the product of the integers is exact, and on
            processors with VNNI or AMX several times as fast as one of float32.
        backend: "reference" | "aten" | "cpu" | "triton", or None to choose automatically.

    Returns:
        (..., N), dtype and device of ``x``.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: shapes, dtypes or devices disagree (the message names argument, expected, got).
        BackendError: ``backend`` was named and cannot run this call; "cpu" and "triton" compute no gradients.

    Numerics: sums in float32 (float64 for float64), where ``dynamic`` of integers, exactly; y is rounded once.
        Deterministic. A row that holds NaN or an infinity gives NaN where ``dynamic``. Differentiable in x, scale and
        bias on reference and aten; the gradient passes the rounding of x as if it were not there (straight-through).
    Cost: 2 M K N operations; M = product of the leading dimensions. The weights take a byte each; the cpu backend reads
        them once for 32 rows (``dynamic``: 256), the triton backend for 16, 64, 128 or 256; both round x once. Where y
        is small, the triton backend also writes and reads sums of parts of k, 4 bytes an element each.

    Example:
        >>> weight, scale = torch.tensor([[127, -64]], dtype=torch.int8), torch.tensor([0.5])
        >>> int8_linear(torch.tensor([[1.0, 2.0]]), weight, scale)
        tensor([[-0.5000]])
    """
    return _run(*_chosen(x, weight, scale, bias, dynamic, backend), x, weight, scale, bias)


def _chosen(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dynamic: bool, backend: str | None
) -> tuple[str, Call]:
    key = _library.signature(backend, x, weight, scale, bias, dynamic)
    choice = _CHOICES.get(key)
    if choice is None:
        call = describe(x, weight, scale, bias, dynamic=dynamic)
        choice = _CHOICES.keep(key, (_backend.select(OP, call, backend), call))
    return choice


def _run(name: str, call: Call, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    rows = x if x.dim() == 2 else x.reshape(call.rows, call.width)
    if name in _FWD:
        y = _autograd.below_autograd(_FWD[name], rows, weight, scale, bias, call.dynamic)
        return _autograd.shaped_like(y, x)
    if name == "aten":
        y = aten.int8_linear(rows, weight, scale, bias, call.dynamic, call.training or _library.transformed())
    else:
        y = reference.int8_linear(rows, weight, scale, bias, call.dynamic)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], call.out)
