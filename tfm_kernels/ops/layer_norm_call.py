"""The arguments of a layer_norm call, checked; what the choice of a backend reads of them, and how it falls."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import _check, _library

# (residual, training, 16 bits) -> elements from which cpu is faster than aten. A small call is decided by its fixed
# cost. With more elements the kernels win, over F.layer_norm's own float32 backward only where outputs in large pages
# decide (16384 x 512: 23 ms against 30; 4096 x 1024: 6.6 against 6.3; 2.6 GHz Xeon).
_CPU_FROM = {
    (False, False, False): 1 << 18, (False, False, True): 1 << 16,
    (False, True, False): 1 << 23, (False, True, True): 1 << 17,
    (True, False, False): 1 << 16, (True, False, True): 1 << 15,
    (True, True, False): 1 << 19, (True, True, True): 1 << 17,
}  # fmt: skip
# With AVX2 the float32 backward wins as well (4096 x 1024: 2.9 ms against 3.6), and with a sum before it every call
# (1 x 768: 7.8 us against 8.1 forward, 112 against 116 with the backward; Zen 3).
_CPU_FROM_AVX2 = _CPU_FROM | {
    (False, False, False): 96 << 10, (False, True, False): 1 << 18, (True, False, False): 0, (True, True, False): 0,
}  # fmt: skip


@dataclass(frozen=True)
class Call:
    """What the choice of a backend depends on."""

    device: str
    dtype: torch.dtype
    rows: int
    features: int
    mixed: bool
    rms: bool
    residual: bool
    unbiased: bool
    dropout_p: float
    training: bool


def prefer(call: Call) -> tuple[str, ...]:
    """Backends in the order of automatic choice."""
    if call.device != "cpu":
        return ("aten", "reference")
    # F.rms_norm is slower at every size, and aten draws dropout in plain torch; a compiled graph must not depend on M
    if not (call.rms or call.dropout_p > 0.0 or torch.compiler.is_compiling()):
        cpu_from = _CPU_FROM_AVX2 if _library.avx2 else _CPU_FROM
        if call.rows * call.features < cpu_from[call.residual, call.training, call.dtype.itemsize == 2]:
            return ("aten", "cpu", "reference")
    return ("cpu", "aten", "reference")


def describe(op: str, x, residual, weight, bias, eps, dropout_p, seed, dropout_rows, unbiased, rms) -> Call:
    """Checks the arguments that the four functions share."""
    _check.tensor(op, "x", x)
    for name, value in (("residual", residual), ("weight", weight), ("bias", bias)):
        _check.tensor(op, name, value, optional=True)
    _check.tensor(op, "dropout_rows", dropout_rows, optional=True)
    _check.floating(op, x=x, residual=residual, weight=weight, bias=bias)
    _check.same_device(op, x=x, residual=residual, weight=weight, bias=bias, dropout_rows=dropout_rows)
    _check.eps(op, eps)
    if not isinstance(unbiased, bool):
        raise TypeError(f"{op}: unbiased must be a bool, got {type(unbiased).__name__}")
    least = 2 if unbiased else 1
    if x.dim() < 1 or x.shape[-1] < least:
        raise ValueError(f"{op}: x must have a last dimension of at least {least}, got shape {tuple(x.shape)}")
    _check.shape(op, "residual", residual, x.shape, "x", x)
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    for name, value in (("weight", weight), ("bias", bias)):
        _check.shape(op, name, value, x.shape[-1:], "x", x)
        if value is not None and value.dtype not in (dtype, torch.float32):
            raise ValueError(
                f"{op}: {name} must be {_check.dtype_name(dtype)} or float32 to go with x, got "
                f"{_check.dtype_name(value.dtype)}"
            )
    rows = x.numel() // x.shape[-1]
    _check.dropout_rows(op, dropout_rows, rows)
    mixed = any(p is not None and p.dtype != dtype for p in (weight, bias))
    training = _check.records_graph(x, residual, weight, bias)
    return Call(
        x.device.type, dtype, rows, x.shape[-1], mixed, rms, residual is not None, unbiased, dropout_p, training
    )
