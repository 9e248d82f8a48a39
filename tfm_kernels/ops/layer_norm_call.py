"""The arguments of a layer_norm call, checked; what the choice of a backend reads of them, and how it falls."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from .. import _backend, _check, _library, _measured

_Limits = dict[tuple[bool, ...], int]
# (residual, training, 16 bits) -> elements from which cpu is faster than aten. A small call is decided by its fixed
# cost, a large one by the kernels. Times over those of aten called from here, with AVX-512 (2.1 GHz Xeon), at 1 x 384,
# 1 x 768, 16 x 384, 64 x 512 and 128 x 768: float32 0.87, 0.86, 0.78, 0.82 and 0.68, in training 1.05, 1.03, 1.00,
# 1.01 and 0.95; bfloat16 0.87, 0.87, 0.76, 0.68 and 0.52, in training 1.08, 1.03, 0.91, 0.79 and 0.59; with a residual
# 0.5 to 0.7, in training 0.6 to 1.0.
_XEON: _Limits = {
    **dict.fromkeys(itertools.product((False, True), repeat=3), 0),
    (False, True, False): 1 << 16, (False, True, True): 3 << 11,
}  # fmt: skip
# The same on Zen 3, 1 to 64 rows of 64 to 4096: float32 0.7 to 1.0, in training 0.98 to 1.08 (0.91 to 1.0 from 2**17
# elements); bfloat16 0.62 to 0.92, in training 0.79 to 1.08; with a residual 0.6 to 0.85, in training 0.8 to 0.97.
_ZEN3: _Limits = {
    **dict.fromkeys(_XEON, 0), (False, True, False): 1 << 17, (False, True, True): 1 << 12,
}  # fmt: skip
# And on Zen 4, against aten called from here: float32 0.94 at 1 x 384, in training 1.04 and 0.98; 16 bits 1.00 at 1
# x 384, in training 1.07 and 0.96; with a residual, at 1 x 384, 0.79 and 0.91.
_ZEN4: _Limits = {
    **dict.fromkeys(_XEON, 0), (False, True, False): 1 << 16, (False, True, True): 3 << 13,
}  # fmt: skip
_CPU_FROM = {_library.XEON: _XEON, _library.ZEN3: _ZEN3, _library.ZEN4: _ZEN4}


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
    eps_outside: bool
    dropout_p: float
    training: bool


def _aten(call: Call) -> str | None:
    if call.eps_outside:
        return "PyTorch's norms have no eps outside of the root"
    return "PyTorch's layer_norm has no N - 1 variance" if call.unbiased else None


def _gpu(call: Call) -> str | None:
    wide = f"needs at most 65536 features, got {call.features}" if call.features > 65536 else None
    return _backend.no_float64(call) or wide


KERNELS = {"cpu": _backend.can, "triton": _gpu, "cuda": _gpu}
SUPPORT = _backend.support("layer_norm", KERNELS, aten=_aten)


def unproven(backend: str, call: Call) -> str | None:
    """What no GPU has proven of a backend's kernels for the call."""
    if backend == "triton" and unproven_on_gpu(call):
        return "not proven on a GPU with gradients of so many features; name it explicitly"
    return None


def prefer(call: Call) -> tuple[str, ...]:
    """Backends in the order of automatic choice."""
    if call.device != "cpu":
        return _backend.on_gpu(*_on_gpu(call))
    # F.rms_norm is slower at every size, and aten draws dropout in plain torch; a compiled graph must not depend on M
    if not (call.rms or call.dropout_p > 0.0 or torch.compiler.is_compiling()):
        kind = call.residual, call.training, call.dtype.itemsize == 2
        if call.rows * call.features < _CPU_FROM[_library.nearest][kind]:
            return ("aten", "cpu", "reference")
    return ("cpu", "aten", "reference")


def _on_gpu(call: Call) -> tuple[str, ...]:
    """What is faster than aten on an H200, whose time is the host's up to some 2**25 elements.

    Triton takes 0.4 to 0.9 of aten's time on the device (0.05 with dropout, which aten draws in plain torch), but 160
    us of the host's. csrc/cuda takes 23 there, as aten does, and on the device 0.5 to 0.96 for rows of up to 1024
    features, 1.0 to 1.1 for RMSNorm. Of rows longer than 8192 the backward of csrc/cuda is slower, and Triton's has not
    been timed since it was (bench/GPU_NOTES.md).
    """
    if unproven_on_gpu(call):
        return ("cuda",) if call.dropout_p > 0.0 else ()
    if _library.certain(call.rows * call.features >= 1 << 25):
        return ("triton",)
    return ("cuda",) if call.dropout_p > 0.0 or (call.features <= 1024 and not call.rms) else ()


def unproven_on_gpu(call: Call) -> bool:
    """Whether Triton's backward sums over rows by the launch for long ones, which no GPU has run yet."""
    return call.training and call.features > (8192 if call.features % 8 == 0 else 4096)


def bucket(call: Call) -> tuple[str, str]:
    """The device, and what a measured time depends on."""
    return call.device, _measured.bucket(
        call.dtype, rows=_measured.rounded(call.rows), features=call.features, mixed=call.mixed,
        unbiased=call.unbiased, eps_outside=call.eps_outside, dropout=call.dropout_p > 0.0, training=call.training,
    )  # fmt: skip


def describe(
    op: str, x, residual, weight, bias, eps, eps_outside, dropout_p, seed, dropout_rows, unbiased, rms
) -> Call:
    """Checks the arguments that the four functions share."""
    _check.tensor(op, "x", x)
    for name, value in (("residual", residual), ("weight", weight), ("bias", bias)):
        _check.tensor(op, name, value, optional=True)
    _check.tensor(op, "dropout_rows", dropout_rows, optional=True)
    _check.floating(op, x=x, residual=residual, weight=weight, bias=bias)
    _check.dense(op, x=x, residual=residual, weight=weight, bias=bias)
    _check.same_device(op, x=x, residual=residual, weight=weight, bias=bias, dropout_rows=dropout_rows)
    _check.eps(op, eps)
    _check.eps(op, eps_outside, "eps_outside")
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
            allowed = " or ".join(dict.fromkeys((_check.dtype_name(dtype), "float32")))
            raise ValueError(f"{op}: {name} must be {allowed} to go with x, got {_check.dtype_name(value.dtype)}")
    rows = x.numel() // x.shape[-1]
    _check.dropout_rows(op, dropout_rows, rows)
    if seed is not None:
        _check.seed(op, dropout_p, seed, x.device)
    mixed = any(p is not None and p.dtype != dtype for p in (weight, bias))
    training = _check.records_graph(x, residual, weight, bias)
    return Call(
        x.device.type, dtype, rows, x.shape[-1], mixed, rms, residual is not None, unbiased, eps_outside > 0.0,
        dropout_p, training,
    )  # fmt: skip
