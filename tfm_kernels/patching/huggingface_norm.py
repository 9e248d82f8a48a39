"""Norms of transformers that whole families share, recognised by what their code says: alone, and with a sum before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from .._autocast import autocast_dtype
from . import block, guard, source
from .huggingface_parts import register_unary
from .known import Known
from .swap import found_class, options

_IN_FLOAT64 = "in float64 its own code takes the variance in float32"
_ANOTHER_DTYPE = "its weight has another dtype than its input"

# fingerprints of the methods of transformers 5.23 and 5.24 (source.py)
T5_NORM = {"forward": "b5a15c016629"}
LLAMA_NORM = {"forward": "f5c95295c0f8"}
GEMMA_NORM = {"forward": "6178835fbd02", "_norm": "020b369189b2"}
OLMO2_NORM = {"forward": "9bb6bb8e55cf"}
HELIUM_NORM = {"forward": "f8ed60cd782f"}
COHERE_NORM = {"forward": "54673c4e19eb"}
OLMO_NORM = {"forward": "25b9e30b629f"}
NEMOTRON_NORM = {"forward": "ee6e44eb46d4"}


def _why_not_wide(norm: Any, x: Tensor) -> str | None:
    weight = getattr(norm, "weight", x)
    return _IN_FLOAT64 if weight.dtype.itemsize == 8 or x.dtype.itemsize == 8 else None


def _why_not_alike(norm: Any, x: Tensor) -> str | None:
    return _ANOTHER_DTYPE if norm.weight.dtype != x.dtype else _why_not_wide(norm, x)


def _why_not_rounded_once(norm: Any, x: Tensor) -> str | None:
    """To the dtype of its input: that may be 16 bits beside a weight in float32, as under autocast."""
    return _why_not_wide(norm, x) if norm.weight.dtype == torch.float32 else _why_not_alike(norm, x)


def _why_not_nemotron(norm: Any, x: Tensor) -> str | None:
    if autocast_dtype(x.device) is not None:
        return "under autocast its own code takes its input in 16 bits"
    return _ANOTHER_DTYPE if norm.weight.dtype != x.dtype else None


def _scaled(norm: Any) -> tuple[Any, ...]:
    return norm.weight, None, norm.variance_epsilon


def _from_one(norm: Any) -> tuple[Any, ...]:
    """Of norms that keep their weight as the distance from 1."""
    weight, bias = (
        t if t is None or t.dtype == torch.float64 else t.float() for t in (norm.weight, getattr(norm, "bias", None))
    )
    return 1.0 + weight, bias, norm.eps  # type: ignore[operator]


@dataclass(frozen=True)
class _Kind:
    """How norms of one kind are those of ops.

    Attributes:
        rms: whether they leave the mean where it is.
        parts: parts(norm) gives weight, bias and eps, as ops take them.
        why_not: why_not(norm, x) tells what keeps a norm of ``x`` from it, or None.
    """

    rms: bool
    parts: Callable[[Any], tuple[Any, ...]]
    why_not: Callable[[Any, Tensor], str | None]


_TORCH = _Kind(False, lambda norm: (norm.weight, norm.bias, norm.eps), lambda norm, x: None)
_KINDS = {
    code["forward"]: kind
    for code, kind in (
        (T5_NORM, _Kind(True, _scaled, _why_not_alike)),
        (LLAMA_NORM, _Kind(True, _scaled, _why_not_alike)),
        (GEMMA_NORM, _Kind(True, _from_one, _why_not_wide)),
        (OLMO2_NORM, _Kind(True, _scaled, _why_not_rounded_once)),
        (HELIUM_NORM, _Kind(True, _scaled, _why_not_rounded_once)),
        (COHERE_NORM, _Kind(False, _scaled, _why_not_rounded_once)),
        (OLMO_NORM, _Kind(False, lambda norm: (None, None, 1e-5), _why_not_wide)),
        (NEMOTRON_NORM, _Kind(False, _from_one, _why_not_nemotron)),
    )
}


def _kind(norm: Any) -> _Kind:
    forward = found_class(norm).forward  # type: ignore[attr-defined]  # FSDP2 derives classes that inherit it
    return _TORCH if forward is nn.LayerNorm.forward else _KINDS[source.fingerprint(forward)]  # type: ignore[index]


_ALL = (
    T5_NORM, LLAMA_NORM, GEMMA_NORM, OLMO2_NORM, HELIUM_NORM, COHERE_NORM, OLMO_NORM, NEMOTRON_NORM,
)  # fmt: skip


def is_norm(module: nn.Module) -> bool:
    """Whether a module, fused or not, is a norm of a kind that this file knows."""
    return any(all(source.says(module, method, said) for method, said in code.items()) for code in _ALL)


def is_rms(known: Known, path: str) -> bool:
    """Whether the norm at ``path`` in known code is an RMS norm."""
    code: Any = known.code.get(f"{path}.forward")
    return path not in known.reads and _KINDS[code].rms


def _normed(self: Any, x: Tensor) -> Tensor | str:
    kind = _kind(self)
    reason = kind.why_not(self, x) or guard.why_not_kept(x)
    if reason is not None:
        return reason
    weight, bias, eps = kind.parts(self)
    if kind.rms:
        return ops.rms_norm(x, weight, eps, backend=options(self).backend)
    if weight is not None and weight.dim() > 1:  # Cohere's, of each head its own
        return (weight.float() * ops.layer_norm(x.float(), None, None, eps, backend=options(self).backend)).to(x.dtype)
    return ops.layer_norm(x, weight, bias, eps, backend=options(self).backend)


def why_not_sum_and_norm(norm: Any, residual: Tensor) -> str | None:
    """None where ``sum_and_norm`` may run, else why not; the class of ``norm`` is the caller's matter."""
    return _kind(norm).why_not(norm, residual)


def sum_and_norm(x: Tensor, residual: Tensor, norm: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """(y, z): z = residual + dropout(x), y = norm(z) for an nn.LayerNorm or a norm that this file knows."""
    kind = _kind(norm)
    if kind is _TORCH:
        return block.add_norm(x, residual, norm, **options)
    weight, bias, eps = kind.parts(norm)
    if kind.rms:
        return ops.add_rms_norm(x, residual, weight, eps, **options)
    return ops.add_layer_norm(x, residual, weight, bias, eps, **options)


def _register(family: str, code: Mapping[str, str]) -> None:
    what = "rms_norm" if _KINDS[code["forward"]].rms else "layer_norm"
    register_unary(f"{family}.norm", what, Known(code, {}), _normed)


_register("t5", T5_NORM)
_register("llama", LLAMA_NORM)
_register("olmo2", OLMO2_NORM)
_register("gemma", GEMMA_NORM)
_register("helium", HELIUM_NORM)
_register("cohere", COHERE_NORM)
_register("olmo", OLMO_NORM)
_register("nemotron", NEMOTRON_NORM)
