"""Whether a class computes what its declaration says, tried on a few rows; what cannot be tried is believed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..nn.ffn import ACTIVATIONS
from . import guard
from .declaration import probability
from .declared_norm import DeclaredNorm

_WIDE = (torch.float32, torch.float64)


def require_norm(op: str, cls: type[nn.Module], module: nn.Module, norm: DeclaredNorm) -> None:
    """Raises where the forward of ``cls`` is not the norm that ``op`` declared."""
    x = _rows_of(module, norm)
    if x is None:
        return
    got = tried(module, lambda: cls.forward(module, x))
    wide = tuple(None if p is None else p.double() for p in norm.parameters(module))
    exactly = lambda: norm.of(x.double(), wide, norm.epsilons(module), "reference")  # noqa: E731
    if differ(got, tried(module, exactly)):
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
    wanted = tried(module, lambda: inner(x))
    got = tried(module, lambda: cls.forward(module, x, torch.zeros_like))
    if differ(got, wanted):
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
    names: tuple[str, str, str | None, str | None],
    activation: str,
    channels_first: bool,
    drops: tuple[str | None, ...],
) -> None:
    """Raises where the forward of ``cls`` is not second(activation(first(x)) [* gate(x)]) but for these dropouts."""
    layers: list[Any] = [None if name is None else guard.child(module, name) for name in names]
    first, second, gate, norm = layers
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
        rows = x if norm is None else norm(x)
        hidden = ACTIVATIONS[activation](rows_by(first, rows))
        hidden = hidden if gate is None else hidden * rows_by(gate, rows)
        y = rows_by(second, F.dropout(hidden, probability(module, drops[0])))
        return F.dropout(y, probability(module, drops[1]))

    def forward() -> Tensor:
        return cls.forward(module, x.mT).mT if channels_first else cls.forward(module, x)

    with in_training(module, []):
        wanted, got = tried(module, written), tried(module, forward)
    if differ(got, wanted):
        inner = f"{activation}({names[0]}(x))" + ("" if gate is None else f" * {names[2]}(x)")
        raise ValueError(
            f"declare_feed_forward: {cls.__name__}.forward must give {names[1]}({inner}), got other numbers: "
            f"activation names one of {', '.join(ACTIVATIONS)}"
        )
    inside = [inner for layer in layers if layer for inner in layer.modules()]
    require_dropouts("declare_feed_forward", cls, module, drops, inside, forward, written)


def require_dropouts(
    op: str,
    cls: type[nn.Module],
    module: nn.Module,
    drops: tuple[str | None, ...],
    inside: list[nn.Module],
    forward: Callable[[], Any],
    written: Callable[[], Any],
) -> None:
    """Raises where ``forward`` in training does not drop what ``written`` does, by each of ``drops`` and no other.

    What is ``inside`` of the layers is theirs to apply. The declared ones drop nothing, and in turn everything.
    """
    held = {name: guard.attribute(module, name) for name in drops if name is not None}
    if any(not isinstance(each, nn.Module) and name not in module.__dict__ for name, each in held.items()):
        return  # a property, or a number that a config holds: not the module's to change
    training = [inner for inner in module.modules() if inner not in inside]
    for chosen in (None, *held):
        with in_training(module, training):
            for name, each in held.items():
                if not isinstance(each, nn.Module):
                    setattr(module, name, float(name == chosen))
                elif not isinstance(each, nn.Identity):
                    each.p = float(name == chosen)  # type: ignore[assignment]
            if not differ(tried(module, forward), tried(module, written)):
                continue
        if chosen is None:
            names = " and ".join(map(repr, held)) or "no dropout"
            what = f"elements by {names} alone, as declared, got some dropped elsewhere"
        else:
            what = f"by {chosen!r} what is declared, got others dropped"
        raise ValueError(f"{op}: {cls.__name__}.forward in training must drop {what}")


@contextmanager
def in_training(module: nn.Module, some: list[nn.Module]) -> Iterator[None]:
    """Has ``some`` of the modules inside of one train, and the others not; puts back what forwards meanwhile change."""
    before = {inner: (dict(inner.__dict__), dict(inner._buffers)) for inner in module.modules()}
    values = [(buffer, buffer.clone()) for buffer in module.buffers() if not buffer.is_meta]
    try:
        for inner in before:
            inner.training = inner in some
        yield
    finally:
        for inner, (attributes, buffers) in before.items():
            inner.__dict__.clear()
            inner.__dict__.update(attributes)
            inner._buffers.clear()
            inner._buffers.update(buffers)
        with torch.no_grad():
            for buffer, value in values:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


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


def attempt(module: nn.Module, run: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """What a forward gives, or why it does not, leaving random numbers as they were."""
    devices = {parameter.device for parameter in module.parameters() if parameter.device.type == "cuda"}
    try:
        with torch.no_grad(), torch.random.fork_rng(devices):
            return run(), None
    except Exception as error:  # a forward may want anything
        return None, error


def tried(module: nn.Module, run: Callable[[], Any]) -> Tensor | None:
    """What a forward gives; None where it gives no tensor, or refuses."""
    got, _ = attempt(module, run)
    return got if isinstance(got, Tensor) and bool(got.isfinite().all()) else None


def differ(got: Tensor | None, wanted: Tensor | None) -> bool:
    """Whether two trials gave other numbers; not where either gave none."""
    if got is None or wanted is None:
        return False
    if got.shape != wanted.shape:
        return True
    size = float(wanted.double().abs().max().clamp(min=1e-30))
    return float((got.double() - wanted.double()).abs().max()) > (1e-4 if got.dtype in _WIDE else 5e-2) * size
