"""Whether a class computes what its declaration says, tried on a few rows; what cannot be tried is believed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..nn.ffn import ACTIVATIONS
from . import guard
from .declaration import dropped, probability
from .declared_norm import DeclaredNorm
from .specimen import attempt, differ, require_dropouts, specimen, tried

_WIDE = (torch.float32, torch.float64)
_WIDTH = 16  # of rows for norms without parameters


def require_norm(op: str, cls: type[nn.Module], module: nn.Module, norm: DeclaredNorm) -> None:
    """Raises where the forward of ``cls`` is not the norm that ``op`` declared."""
    copy = specimen(module)
    x = None if copy is None else _rows_of(copy, norm)
    if x is None:
        return
    got = tried(copy, lambda: cls.forward(copy, x))
    wide = tuple(None if p is None else p.double() for p in norm.parameters(copy))
    exactly = lambda: norm.of(x.double(), wide, norm.epsilons(copy), "reference")  # noqa: E731
    wanted = tried(copy, exactly)
    if got is not None and got.dtype != x.dtype:
        raise ValueError(f"{op}: {cls.__name__}.forward must give its input's {x.dtype}, got {got.dtype}")
    if differ(got, wanted):
        says = "eps_outside says" if norm.rms else "unbiased says which variance, eps_outside"
        raise ValueError(
            f"{op}: {cls.__name__}.forward must give {norm.formula()}, got other numbers: {says} what is added to the "
            "root"
        )


def require_post_norm(
    cls: type[nn.Module], module: nn.Module, names: tuple[str, str | None, str | None], known: DeclaredNorm
) -> None:
    """Raises where a forward of ``cls`` is not norm(x + dropout(sublayer(x))), sublayer an argument or a child."""
    norm, dropout, sublayer = names
    if guard.hooked(guard.child(module, norm)):
        return
    copy = specimen(module)
    x = None if copy is None else _rows_of(guard.child(copy, norm), known)
    if x is None:
        return
    inner = guard.child(copy, norm)
    called = [inner] if sublayer is None else [inner, guard.child(copy, sublayer)]
    layer: Any = (lambda t: 0.3 + 0.7 * t.flip(-1)) if sublayer is None else called[1]
    given = (x, layer) if sublayer is None else (x,)
    forward = lambda: cls.forward(copy, *given)  # noqa: E731
    written = lambda: inner(x + dropped(copy, dropout, layer(x)))  # noqa: E731
    if differ(tried(copy, forward), tried(copy, written)):
        raise ValueError(
            f"declare_residual: {cls.__name__}.forward must give {norm}(x + dropout(sublayer(x))), got other numbers: "
            "a pre-norm wrapper, x + dropout(sublayer(norm(x))), needs no declaration"
        )
    inside = [part for each in called for part in each.modules()]
    require_dropouts("declare_residual", cls, copy, (dropout,), inside, None, forward, written)


def require_feed_forward(
    cls: type[nn.Module],
    module: nn.Module,
    names: tuple[str, str, str | None, str | None],
    activation: str,
    channels_first: bool,
    drops: tuple[str | None, str | None],
) -> None:
    """Raises where the forward of ``cls`` is not second(activation(first(x)) [* gate(x)]) but for these dropouts."""
    copy = specimen(module, wide=True)
    layers: list[Any] = [None if name is None or copy is None else guard.child(copy, name) for name in names]
    first, second, gate, norm = layers
    if copy is None or any("forward" in layer.__dict__ for layer in layers if layer) or first.weight.numel() == 0:
        return
    x = _rows(first.weight.flatten(1)[0])
    if x is None:
        return
    x = 3 * x

    def rows_by(layer: Any, rows: Tensor) -> Tensor:
        return layer(rows.mT).mT if isinstance(layer, nn.Conv1d) else layer(rows)

    def written() -> Tensor:
        rows = x if norm is None else norm(x)
        halves = rows_by(first, rows).chunk(2 if gate is first else 1, dim=-1)
        hidden = ACTIVATIONS[activation](halves[0])
        if gate is not None:
            hidden = hidden * (halves[1] if gate is first else rows_by(gate, rows))
        hidden = nn.functional.dropout(hidden, probability(copy, drops[0]))
        return dropped(copy, drops[1], rows_by(second, hidden))

    def forward() -> Tensor:
        return cls.forward(copy, x.mT).mT if channels_first else cls.forward(copy, x)

    got = tried(copy, forward)
    wanted, wrong = attempt(copy, written)
    if got is not None and (wrong is not None or differ(got, wanted)):
        inner = f"{activation}({names[0]}(x))" + ("" if gate is None else f" * {names[2]}(x)")
        inner = inner if gate is not first else f"{activation}(a) * b, a and b = {names[0]}(x).chunk(2, -1)"
        numbers = "other numbers" if wrong is None else f"shapes that give none ({wrong})"
        raise ValueError(
            f"declare_feed_forward: {cls.__name__}.forward must give {names[1]}({inner}), got {numbers}: "
            f"activation names one of {', '.join(ACTIVATIONS)}"
        )
    inside = [inner for layer in layers if layer is not None for inner in layer.modules()]
    require_dropouts("declare_feed_forward", cls, copy, drops, inside, second, forward, written)


def _rows_of(copy: nn.Module, norm: DeclaredNorm) -> Tensor | None:
    """Rows for a norm: in float32 and float64 the second is so small that what is added to it counts as it does."""
    weight, bias = norm.parameters(copy)
    eps, outside = norm.epsilons(copy)
    like = weight if weight is not None else bias
    return _rows(torch.ones(_WIDTH, device="cpu") if like is None else like, max(outside, (eps or 0.0) ** 0.5))


def _rows(like: Any, small: float = 1.0) -> Tensor | None:
    """Two rows for a module with this parameter: of ordinary size, and (but for 16 bits) ``small`` times that."""
    if not like.is_floating_point() or like.dim() != 1 or like.numel() < 2:
        return None
    row = torch.linspace(-1.7, 1.7, like.numel(), dtype=torch.float64, device="cpu")
    row = torch.where(torch.arange(like.numel(), device="cpu") % 2 == 0, row, -row)
    small = small if like.dtype in _WIDE and small else 1.0
    return torch.stack([row, row * small])[None].to(like.detach())
