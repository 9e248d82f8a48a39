"""The arguments of an ffn call, checked; what the choice of a backend reads of them, and how it falls."""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import _backend, _check, _library, _measured
from .._library import ACTIVATIONS

_16_BITS = (torch.float16, torch.bfloat16)


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
    dropout_p: float
    training: bool
    gate_biased: bool = False
    turned: bool = False  # a weight lies (in, out), as transformers' Conv1D has it: cpu copies it in every call


# Without gradients cpu is faster than aten or as fast, in parts of its time (2.6 GHz Xeon, 384-1536 to 1024-4096):
# float32 0.85 to 0.97 at one row, 0.5 to 0.8 from 4, but for three (1.05 to 1.1); float16 0.3 to 0.8; bfloat16 0.35 to
# 0.95 in the processor's tiles and 0.2 to 0.8 without. On Zen 3 (128-512 to 768-3072) float32 0.27 to 0.9, 16 bits 0.1
# to 0.5 (one row of bfloat16 up to 1.0). On Zen 4 (the same) float32 0.2 to 0.85, float16 0.15 to 0.75, bfloat16 0.25
# to 0.97, but 0.4 to 1.2 at these.
_ATEN_INFERS: dict[tuple[str, torch.dtype], Container[int]] = {
    (_library.XEON, torch.float32): (3,),
    (_library.ZEN4, torch.bfloat16): range(17, 21),
}
# float64, which is there to check gradients, has no tiles: from this many rows 0.3 to 0.8, in training 0.2 to 0.7.
_FLOAT64_FEW = 17
# In training, without dropout. float32, few rows: 1 to 64 rows of 128-512 to 768-3072 take cpu 0.4 to 1.06 of aten's
# time on a Xeon, 0.2 to 0.85 on Zen 3, 0.45 to 0.85 on Zen 4, with its AVX2 too. Many rows are bound by the same
# products: 0.93 to 1.0 of aten's time on a Xeon (384-1536 to 768-3072, 512 to 4096 rows), 0.74 to 0.97 on Zen 3 and 0.7
# to 0.9 on Zen 4. 16 bits, where PyTorch emulates them: 0.02 to 0.7 on Zen 3, 0.01 to 0.65 on Zen 4.
_ATEN_TRAINS: dict[tuple[str, torch.dtype], Container[int]] = {(_library.XEON, dtype): range(4) for dtype in _16_BITS}
# The same where the processor multiplies 16 bits itself: tiles of bfloat16, AVX512_FP16. On a Xeon with both cpu takes
# 0.35 to 0.98 of aten's time up to 256 rows, 0.6 to 0.95 of 512 wide and more at any number (2048 rows up to 1.08) and
# 0.65 to 1.0 from 4096 rows; 128-512 to 384-1536 between these 0.8 to 1.16. Zen 4, 128-512 to 768-3072: 0.4 to 0.98 up
# to 32 rows, 0.6 to 1.0 at 64 and 128, 0.85 to 1.09 up to 2048.
_ATEN_TRAINS_IN_16_BITS = {
    _library.XEON: range(512, 4096), _library.ZEN3: range(8192), _library.ZEN4: range(129, 8192)
}  # fmt: skip
_WIDE = {_library.XEON: 512}
# Where the hidden activation is half as wide as x or less, as in adapters, leaving it out of memory saves little (Xeon
# with AMX, 768-16 to 768-384, 1024-64 and 1024-256): float32 from 64 rows on 0.95 to 1.75, in training 1.0 to 2.3, 16
# bits from 256 rows on 0.95 to 1.6 and 1.0 to 2.1; 256-64 and 256-128 0.8 to 1.1 and 0.8 to 1.3. On Zen 3 (768-64,
# 768-384, 256-64) float32 0.6 to 1.09, in training 0.6 to 0.98 up to 128 rows and 0.95 to 1.25 from 256.
_NARROW_FROM = {torch.float32: 64, torch.float16: 256, torch.bfloat16: 256}
_ZEN3_NARROW_FROM = {**_NARROW_FROM, torch.float32: 256}
# Below this many rows copying weights that lie (in, out) takes longer than the copies save: with GPT-2's sizes on Zen 3
# and float32 1 row took 17 times as long as aten, 32 rows 3, 128 rows 1.1 and 256 rows 0.8.
_TURNED_FROM = 256


def prefer(call: Call) -> tuple[str, ...]:
    """Backends in the order of automatic choice."""
    if call.device != "cpu":
        # H200, 16 bits: 1.1 to 1.3 of the time of cuBLAS and a pass for the activation; but aten draws dropout in plain
        # torch, which takes 30 times as long. csrc/cuda takes 2.4 of Triton's time, but 0.1 ms of the host's, not 0.3
        if call.gate_biased or call.dropout_p == 0.0 or call.dtype not in _16_BITS:  # the first no GPU has proven
            return _backend.on_gpu()
        large = _library.certain(call.rows * call.width * call.hidden >= 1 << 33)
        return _backend.on_gpu("triton" if large else "cuda")
    # aten draws dropout in plain torch; a compiled graph must not depend on the number of rows
    copies = call.turned and _multiplies_natively(call.dtype)
    if call.dropout_p == 0.0 and (copies if torch.compiler.is_compiling() else _aten_is_faster(call)):
        return ("aten", "cpu", "reference")
    return ("cpu", "aten", "reference")


def _aten_is_faster(call: Call) -> bool:
    if call.dtype == torch.float64:
        return call.training or call.rows >= _FLOAT64_FEW
    natively = _multiplies_natively(call.dtype)
    zen3 = _library.nearest == _library.ZEN3
    narrow_from = _ZEN3_NARROW_FROM if zen3 else _NARROW_FROM
    if natively and call.turned and call.rows < _TURNED_FROM:
        return True
    if natively and call.hidden * 2 <= call.width and call.rows >= narrow_from[call.dtype]:
        return call.training or (call.width >= 512 and not zen3)
    if not call.training:
        return call.rows in _ATEN_INFERS.get((_library.nearest, call.dtype), ())
    if natively and call.dtype in _16_BITS:
        wide = call.width >= _WIDE.get(_library.nearest, math.inf)
        return not wide and call.rows in _ATEN_TRAINS_IN_16_BITS[_library.nearest]
    return call.rows in _ATEN_TRAINS.get((_library.nearest, call.dtype), ())


def _multiplies_natively(dtype: torch.dtype) -> bool:
    """Whether the processor multiplies the type itself, so that PyTorch does not emulate its products."""
    if dtype in _16_BITS:
        return _library.bf16_tiles if dtype == torch.bfloat16 else _library.f16_products
    return True


def bucket(call: Call) -> tuple[str, str]:
    """The device, and what a measured time depends on."""
    return call.device, _measured.bucket(
        call.dtype, rows=_measured.rounded(call.rows), width=call.width, hidden=call.hidden, out=call.out,
        activation=call.activation, gated="biased" if call.gate_biased else call.gated, dropout=call.dropout_p > 0.0,
        training=call.training, turned=call.turned,
    )  # fmt: skip


def is_turned(*weights: Any) -> bool:
    """Whether one of these, if they are tensors, does not lie row by row."""
    for weight in weights:
        if isinstance(weight, Tensor) and weight.layout is torch.strided and not weight.is_contiguous():
            return True
    return False


def describe(
    x, w1, b1, w2, b2, *, activation="relu", gate=None, dropout_p=0.0, seed=None, dropout_rows=None, recompute=False
) -> Call:
    """Checks the arguments of ffn()."""
    tensors: dict[str, Tensor | None] = {"x": x, "w1": w1, "b1": b1, "w2": w2, "b2": b2, "gate": gate}
    for name, value in tensors.items():
        _check.tensor("ffn", name, value, optional=name in ("b1", "b2", "gate"))
    _check.tensor("ffn", "dropout_rows", dropout_rows, optional=True)
    _check.choice("ffn", "activation", activation, ACTIVATIONS)
    if not isinstance(recompute, bool):
        raise TypeError(f"ffn: recompute must be a bool, got {type(recompute).__name__}")
    _check.floating("ffn", **tensors)
    _check.same("ffn", **tensors)
    _check.dense("ffn", **tensors)
    if x.dim() == 0:
        raise ValueError("ffn: x must have shape (..., E), got ()")
    for name, weight, meaning in (("w1", w1, "(F, E)"), ("w2", w2, "(Eo, F)")):
        if weight.dim() != 2:
            raise ValueError(f"ffn: {name} must have shape {meaning}, got {tuple(weight.shape)}")
    (hidden, width), out, rows = w1.shape, w2.shape[0], math.prod(x.shape[:-1])
    _check.shape("ffn", "w1", w1, (hidden, x.shape[-1]), "x", x)
    _check.shape("ffn", "w2", w2, (out, hidden), "w1", w1)
    _check.shape("ffn", "gate", gate, (hidden, width), "w1", w1)
    gate_biased = gate is not None and b1 is not None and b1.shape != (hidden,)
    if not gate_biased:
        _check.shape("ffn", "b1", b1, (hidden,), "w1", w1)
    elif b1.shape != (2 * hidden,):
        raise ValueError(
            f"ffn: b1 must have shape {(hidden,)} to match w1 {tuple(w1.shape)}, or {(2 * hidden,)} with the bias of "
            f"the gate, got {tuple(b1.shape)}"
        )
    _check.shape("ffn", "b2", b2, (out,), "w2", w2)
    _check.probability("ffn", "dropout_p", dropout_p)
    if seed is not None:
        _check.seed("ffn", dropout_p, seed, x.device)
    if dropout_rows is not None:
        _check.dropout_rows("ffn", dropout_rows, rows)
        _check.same_device("ffn", x=x, dropout_rows=dropout_rows)
    training = _check.records_graph(*tensors.values())
    biased = b1 is not None or b2 is not None
    turned = is_turned(w1, w2, gate)
    return Call(
        x.device.type, x.dtype, rows, width, hidden, out, activation, gate is not None, biased, dropout_p, training,
        gate_biased, turned,
    )  # fmt: skip
