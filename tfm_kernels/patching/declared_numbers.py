"""Whether a class computes what its declaration says, tried on two rows; what cannot be tried is believed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..nn.ffn import ACTIVATIONS
from . import guard
from .declared_norm import DeclaredNorm

_WIDE = (torch.float32, torch.float64)


def require_norm(op: str, cls: type[nn.Module], module: nn.Module, norm: DeclaredNorm) -> None:
    """Raises where the forward of ``cls`` is not the norm that ``op`` declared."""
    x = _rows_of(module, norm)
    if x is None:
        return
    got = _tried(x.device, lambda: cls.forward(module, x))
    wide = tuple(None if p is None else p.double() for p in norm.parameters(module))
    exactly = lambda: norm.of(x.double(), wide, norm.epsilons(module), "reference")  # noqa: E731
    if _differ(got, _tried(x.device, exactly)):
        says = "eps_outside says" if norm.rms else "unbiased says which variance, eps_outside"
        raise ValueError(
            f"{op}: {cls.__name__}.forward must give {norm.formula()}, got other numbers: {says} what is added to the "
            "root"
        )


def require_post_norm(cls: type[nn.Module], module: nn.Module, norm: str, known: DeclaredNorm) -> None:
    """Raises where a forward (x, sublayer) of ``cls`` is not norm(x + sublayer(x)), seen by a sublayer that gives 0."""
    inner = guard.child(module, norm)
    if guard.hooked(inner):
        return
    x = _rows_of(inner, known)
    if x is None:
        return
    wanted = _tried(x.device, lambda: inner(x))
    got = _tried(x.device, lambda: cls.forward(module, x, torch.zeros_like))
    if _differ(got, wanted):
        raise ValueError(
            f"declare_residual: {cls.__name__}.forward must give {norm}(x + dropout(sublayer(x))), got other numbers: "
            "a pre-norm wrapper, x + dropout(sublayer(norm(x))), needs no declaration"
        )


def _rows_of(module: nn.Module, norm: DeclaredNorm) -> Tensor | None:
    """Rows for a norm: in float32 and float64 the second is so small that what is added to it counts as it does."""
    weight, bias = norm.parameters(module)
    eps, outside = norm.epsilons(module)
    return _rows(weight if weight is not None else bias, max(outside, (eps or 0.0) ** 0.5))


def require_feed_forward(
    cls: type[nn.Module],
    module: nn.Module,
    names: tuple[str, str, str | None],
    activation: str,
    channels_first: bool,
    dropout: str | None,
) -> None:
    """Raises where the forward of ``cls`` is not second(activation(first(x)) [* gate(x)]) but for this dropout."""
    layers: list[Any] = [None if name is None else guard.child(module, name) for name in names]
    first, second, gate = layers
    if any(guard.hooked(layer) for layer in layers if layer):
        return
    weight = first.weight
    x = _rows(weight.detach().flatten(1)[0] if type(weight) is nn.Parameter and weight.numel() > 0 else None)
    if x is None:
        return
    x = 3 * x

    def rows_by(layer: Any, rows: Tensor) -> Tensor:
        return layer(rows.mT).mT if isinstance(layer, nn.Conv1d) else layer(rows)

    def written() -> Tensor:
        hidden = ACTIVATIONS[activation](rows_by(first, x))
        return rows_by(second, hidden if gate is None else hidden * rows_by(gate, x))

    def forward() -> Tensor:
        return cls.forward(module, x.mT).mT if channels_first else cls.forward(module, x)

    with _in_training(module, []):
        wanted, got = _tried(x.device, written), _tried(x.device, forward)
    if _differ(got, wanted):
        inner = f"{activation}({names[0]}(x))" + ("" if gate is None else f" * {names[2]}(x)")
        raise ValueError(
            f"declare_feed_forward: {cls.__name__}.forward must give {names[1]}({inner}), got other numbers: "
            f"activation names one of {', '.join(ACTIVATIONS)}"
        )
    dropping = None if dropout is None else module._modules.get(dropout)
    if (dropout is not None and dropping is None) or any(True for _ in module.buffers()):
        return  # that takes its probability from the module's own state, or training might change a buffer
    own = {dropping, *(inner for layer in layers if layer for inner in layer.modules())}
    with _in_training(module, [inner for inner in module.modules() if inner not in own]):
        got = _tried(x.device, forward)
    if _differ(got, wanted):
        raise ValueError(
            f"declare_feed_forward: {cls.__name__}.forward in training must drop elements by the declared dropout "
            f"alone, which is {dropout!r}, got some dropped elsewhere"
        )


@contextmanager
def _in_training(module: nn.Module, some: list[nn.Module]) -> Iterator[None]:
    """Has ``some`` of the modules inside of one train, and the others not."""
    before = {inner: inner.training for inner in module.modules()}
    try:
        for inner in before:
            inner.training = inner in some
        yield
    finally:
        for inner, training in before.items():
            inner.training = training


def _rows(like: Any, small: float = 1.0) -> Tensor | None:
    """Two rows for a module with this parameter: of ordinary size, and (but for 16 bits) ``small`` times that."""
    if type(like) not in (Tensor, nn.Parameter) or like.is_meta or not like.is_floating_point():
        return None
    if like.dim() != 1 or like.numel() < 2:
        return None
    row = torch.linspace(-1.7, 1.7, like.numel(), dtype=torch.float64)
    row = torch.where(torch.arange(like.numel()) % 2 == 0, row, -row)
    small = small if like.dtype in _WIDE and small else 1.0
    return torch.stack([row, row * small])[None].to(like)


def _tried(device: torch.device, run: Callable[[], Any]) -> Tensor | None:
    """What a forward gives, leaving random numbers as they were; None where it gives no tensor, or refuses."""
    try:
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            got = run()
    except Exception:  # a forward may want anything
        return None
    return got if isinstance(got, Tensor) and bool(got.isfinite().all()) else None


def _differ(got: Tensor | None, wanted: Tensor | None) -> bool:
    """Whether two trials gave other numbers; not where either gave none."""
    if got is None or wanted is None:
        return False
    if got.shape != wanted.shape:
        return True
    size = float(wanted.double().abs().max().clamp(min=1e-30))
    return float((got.double() - wanted.double()).abs().max()) > (1e-4 if got.dtype in _WIDE else 5e-2) * size
