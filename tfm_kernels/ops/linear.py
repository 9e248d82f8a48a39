"""A linear layer for few rows, such as the projections of a decoding step.

    y = x w^T + b                                                                            (LINEAR.1)

Gradients belong to a matrix library, and so do many rows but where vectors are short. What a product of few rows costs
is reading the weights; the cpu backend reads them once, in the order they lie.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import _autograd, _backend, _check, _library, _measured
from ..aten import linear as aten
from ..reference import linear as reference


@dataclass(frozen=True)
class Call:
    """What the choice of a backend depends on."""

    device: str
    dtype: torch.dtype
    rows: int
    width: int
    out: int
    biased: bool
    training: bool


KERNELS = {"cpu": _backend.no_gradients}
SUPPORT = _backend.support("linear", KERNELS, directions=("fwd",))

# Rows at which cpu is faster than aten. Times over aten's (256-256 to 1024-1024 and 512-2048, 2.6 GHz Xeon with AMX and
# AVX512_FP16): float32 1.1 to 1.4 at two rows, 0.5 to 1.2 at 4 to 12, 0.45 to 1.2 at 16 to 64, 0.8 to 1.3 at 96;
# float16 0.2 to 1.0, bfloat16 in tiles 0.3 to 0.8; from 384 rows 1.0 to 1.1 and, in tiles, 0.8 to 1.4.
_FEW, _ANY = range(1, 129), range(1, 1 << 62)
_XEON = {torch.float32: range(4, 65), torch.float16: _FEW, torch.bfloat16: _FEW}
# The same on Zen 3 (1 to 4096 rows, 128-128 to 768-3072 and 512-8000): float32 0.26 to 0.9 up to 384 rows, 0.67 to 1.0
# above (128-128 up to 1.07), at one row 0.94 to 1.07 where the weight is small, else 0.4 to 0.7; 16 bits, which PyTorch
# emulates there, 0.07 to 0.7.
_ZEN3 = {torch.float32: range(2, _ANY.stop), torch.float16: _ANY, torch.bfloat16: _ANY}
# On Zen 4 (1 to 4096 rows, the same weights), in parts of aten's time: float32 0.25 to 1.0 from 2 to 64 rows, 0.75 to
# 1.05 at 128 and 384; float16, which PyTorch emulates, 0.1 to 0.8; bfloat16 0.3 to 0.97, from 256 rows 0.8 to 1.2.
_ZEN4 = {torch.float32: range(2, 385), torch.float16: _ANY, torch.bfloat16: _FEW}
_FASTER = {_library.XEON: _XEON, _library.ZEN3: _ZEN3, _library.ZEN4: _ZEN4}
# Elements of the weight from which one row of float32 is faster: 1.1 at 2**16 on a Xeon, 0.7 to 0.95 above; 1.0 and 0.4
# to 0.7 on Zen 4.
_ONE_ROW_FROM = {_library.XEON: 1 << 17, _library.ZEN3: 1 << 16, _library.ZEN4: 1 << 16}


def prefer(call: Call) -> tuple[str, ...]:
    """Backends in the order of automatic choice."""
    rows = _FASTER[_library.nearest].get(call.dtype, range(0))
    few = rows.stop == _ANY.stop or _library.certain(call.rows < rows.stop)
    return _backend.cpu_first(call.device, (few and _library.certain(call.rows >= rows.start)) or _is_row_of_much(call))


def _is_row_of_much(call: Call) -> bool:
    much = call.dtype == torch.float32 and call.width * call.out >= _ONE_ROW_FROM[_library.nearest]
    return much and _library.certain(call.rows == 1)


def describe(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Call:
    """Checks the arguments of linear()."""
    tensors: dict[str, Tensor | None] = {"x": x, "weight": weight, "bias": bias}
    for name, value in tensors.items():
        _check.tensor("linear", name, value, optional=name == "bias")
    _check.floating("linear", **tensors)
    _check.same("linear", **tensors)
    _check.dense("linear", **tensors)
    if x.dim() == 0:
        raise ValueError("linear: x must have shape (..., K), got ()")
    if weight.dim() != 2:
        raise ValueError(f"linear: weight must have shape (N, K), got {tuple(weight.shape)}")
    out, width = weight.shape
    _check.shape("linear", "weight", weight, (out, x.shape[-1]), "x", x)
    _check.shape("linear", "bias", bias, (out,), "weight", weight)
    training = _check.records_graph(*tensors.values())
    return Call(x.device.type, x.dtype, math.prod(x.shape[:-1]), width, out, bias is not None, training)


def bucket(call: Call) -> tuple[str, str]:
    """The device, and what a measured time depends on."""
    rows = _measured.rounded(call.rows)
    return call.device, _measured.bucket(
        call.dtype, rows=rows, width=call.width, out=call.out, biased=call.biased, training=call.training
    )


def _stand_in(call: Call) -> _backend.StandIn:
    given: dict[str, Any] = {"dtype": call.dtype, "device": call.device}
    x, weight = torch.randn(call.rows, call.width, **given), torch.randn(call.out, call.width, **given)
    bias = torch.zeros(call.out, **given) if call.biased else None
    leaves = [leaf for leaf in (x, weight, bias) if leaf is not None]
    return _backend.StandIn(
        lambda backend: (linear(x, weight, bias, backend=backend),),
        [leaf.requires_grad_() for leaf in leaves] if call.training else [],
    )


OP = _backend.register(_backend.Op("linear", SUPPORT, prefer, describe, bucket, _stand_in))
_CHOICES = _backend.Choices()  # (backend, Call)
_FWD = _library.declare(
    "linear_fwd",
    "(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    lambda x, weight, bias: x.new_empty((x.shape[0], weight.shape[0])),
    KERNELS,
)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, backend: str | None = None) -> Tensor:
    """Runs each row of ``x`` through a linear layer.

    y = x weight^T + bias            (LINEAR.1)

    Args:
        x: (..., K), float16 | bfloat16 | float32 | float64. Any strides.
        weight: (N, K), dtype of ``x``, as in nn.Linear.
        bias: (N,), or None for no bias.
        backend: "reference" | "aten" | "cpu", or None to choose automatically.

    Returns:
        (..., N), dtype and device of ``x``.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: shapes, dtypes or devices disagree (the message names argument, expected, got).
        BackendError: ``backend`` was named and cannot run this call; "cpu" computes no gradients.

    Numerics: sums in float32 (float64 for float64), rounded once. Deterministic. Differentiable as often as one likes
        on reference and aten.
    Cost: 2 M K N FLOPs; M = product of the leading dimensions. The cpu backend reads the weights once for 32 rows;
        where there are more, once for 128.

    Example:
        >>> linear(torch.randn(2, 1, 8), torch.randn(3, 8)).shape
        torch.Size([2, 1, 3])
    """
    return _run(*_chosen(x, weight, bias, backend), x, weight, bias)


def kernel_for(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Callable[[Tensor, Tensor, Any], Tensor] | None:
    """The kernel of this package that ``linear`` runs on for such tensors, else None: for callers that know other ways.

    It takes tensors of the same signature (``_library.signature``) unchecked.

    Raises:
        TypeError, ValueError, BackendError: as ``linear``.
    """
    if not _backend.offers("linear"):
        return None
    name, call = _chosen(x, weight, bias, None)
    return functools.partial(_run, name, call) if name in _FWD else None


def _chosen(x: Tensor, weight: Tensor, bias: Tensor | None, backend: str | None) -> tuple[str, Call]:
    key = _library.signature(backend, x, weight, bias)
    choice = _CHOICES.get(key)
    if choice is None:
        call = describe(x, weight, bias)
        choice = _CHOICES.keep(key, (_backend.select(OP, call, backend), call))
    return choice


def _run(name: str, call: Call, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if name == "aten":
        return aten.linear(x, weight, bias)
    rows = x if x.dim() == 2 else x.reshape(call.rows, call.width)
    if name == "reference":
        y = reference.linear(rows, weight, bias)
        return y if x.dim() == 2 else y.view(*x.shape[:-1], call.out)
    return _autograd.shaped_like(_autograd.below_autograd(_FWD[name], rows, weight, bias), x)
