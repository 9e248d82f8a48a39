"""Whether a class computes what its declaration says, tried on a few rows.

Weights that no copy can be made of (on the meta device, sharded), and layers with a forward of their own, are believed.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..nn.ffn import ACTIVATIONS
from . import guard
from .declaration import calling, dropped, parameters, probability
from .declared_norm import DeclaredNorm
from .effects import require_pure
from .found import Found, require_gradients
from .specimen import attempt, differ, fresh, require_dropouts, result, specimen, tried

_WIDE = (torch.float32, torch.float64)
_WIDTH = 16  # of rows for norms without parameters
_SQUARE = 1024  # the longest rows of which there are as many as they are long
_LOUD = 64.0  # rows this much as large show what keeps the largest number that it has seen
_LEAST = 1e-7  # what is added to a root and smaller is not looked at: some take the larger of both instead


def require_norm(op: str, cls: type[nn.Module], module: nn.Module, norm: DeclaredNorm) -> str | Found | None:
    """Raises where the forward of ``cls`` is not the norm that ``op`` declared; part of a sentence: it refuses rows.

    What it found beyond that; None where it is believed.
    """
    copy = specimen(module)
    rows = None if copy is None else _rows_of(copy, norm)
    if copy is None or rows is None:
        return None
    rows, reason = _require_norm(op, cls, copy, norm, rows)
    if reason is None and not all(each.dtype in _WIDE for each in copy.parameters()):
        wide = specimen(module, wide=True)  # 16 bits show no small differences
        _, reason = _require_norm(op, cls, wide, norm, _rows_of(wide, norm))
    if reason is not None:
        return reason
    forward, found = functools.partial(_forward_of_one(cls), copy), Found()

    def runs(narrow: bool) -> tuple[Callable[[], Any], Callable[[], Any]]:
        x = rows.bfloat16() if narrow else rows
        return lambda: forward(x), lambda: x

    found.look_at_dtypes(copy, runs)
    return found


def _require_norm(
    op: str, cls: type[nn.Module], copy: nn.Module, norm: DeclaredNorm, rows: Any
) -> tuple[Tensor, str | None]:
    forward = functools.partial(_forward_of_one(cls), copy)

    def require(x: Tensor) -> str | None:
        require_pure(copy, [lambda: forward(x.clone()), lambda: forward(_LOUD * x)])
        got, refused = result(op, cls, copy, forward, x)
        if got is None:
            return refused
        wide = tuple(None if p is None else p.double() for p in norm.parameters(copy))
        if got.dtype != x.dtype:
            raise ValueError(f"{op}: {cls.__name__}.forward must give its input's {x.dtype}, got {got.dtype}")
        wanted, _ = attempt(copy, lambda: norm.of(x.double(), wide, norm.epsilons(copy), "reference"))
        if not differ(got, wanted):
            if x.dtype in _WIDE and x.shape[-1] >= _WIDTH:  # of few features hardly any gradient is left
                _require_gradients_of_norm(op, cls, copy, norm, x[..., :1, :])
            return None
        what = "other numbers"
        seen = x.abs().amax(-1) > 0
        if got.shape == wanted.shape and not differ(got[seen], wanted[seen]):
            what = "numbers for a row of zeros, which this gives none"
        says = "eps_outside says" if norm.rms else "unbiased says which variance, eps_outside"
        raise ValueError(
            f"{op}: {cls.__name__}.forward must give {norm.formula()}, got {what}: {says} what is added to the root"
        )

    return _in_some_shape(rows, require)


def _require_gradients_of_norm(op: str, cls: type[nn.Module], copy: nn.Module, norm: DeclaredNorm, x: Tensor) -> None:
    """Of a row of ordinary numbers: those of smaller ones are so large that they would hide it."""
    x, forward = x.clone(), functools.partial(_forward_of_one(cls), copy)
    written = lambda: norm.of(x, norm.parameters(copy), norm.epsilons(copy), "reference")  # noqa: E731
    require_gradients(op, cls, copy, [x], (lambda: forward(x.clone()), written))


def require_post_norm(
    cls: type[nn.Module], module: nn.Module, names: tuple[str, str | None, str | None], known: DeclaredNorm
) -> str | None:
    """Raises where a forward of ``cls`` is not norm(x + dropout(sublayer(x))).

    The sublayer is a child, or the forward's second argument, or what that argument is the result of.
    """
    op, (norm, dropout, sublayer) = "declare_residual", names
    if guard.hooked(guard.child(module, norm)):
        return None
    copy = specimen(module, wide=True)
    rows = None if copy is None else _rows_of(guard.child(copy, norm), known)
    if copy is None or rows is None:
        return None
    inner = guard.child(copy, norm)
    called = [inner] if sublayer is None else [inner, guard.child(copy, sublayer)]
    drawn = torch.randn(2, *rows.shape, generator=torch.Generator("cpu").manual_seed(0), device="cpu").to(rows)
    x, other = drawn.unbind()
    layer: Any = (lambda t: 0.5 * t.roll(1, -1) + other) if sublayer is None else called[1]
    others = [] if sublayer is None else [None] * (_required(cls) - 1)  # a mask or two that the sublayer takes as well
    calls: tuple[Callable[[Tensor], tuple[Any, ...]], ...] = (lambda t: (t, *others),)
    if sublayer is None:
        calls = (lambda t: (t, layer), lambda t: (t, layer(t)))
    written = lambda: inner(x + dropped(copy, dropout, layer(x, *others)))  # noqa: E731
    if sublayer is not None:
        given, refused = attempt(copy, lambda: layer(x, *others))
        if refused is None and not isinstance(given, Tensor):
            return f"its {sublayer} gives a {type(given).__name__}, not a tensor"
    reason = None
    for call in calls:
        run = lambda t, call=call: cls.forward(copy, *fresh(call(t)))  # noqa: E731
        forward = functools.partial(run, x)
        require_pure(copy, [forward, functools.partial(run, _LOUD * x)], called)
        wanted = tried(copy, written)
        got, reason = result(op, cls, copy, functools.partial(cls.forward, copy), *call(x))
        if got is None:
            continue
        if differ(got, wanted):
            raise ValueError(
                f"{op}: {cls.__name__}.forward must give {norm}(x + dropout(sublayer(x))), got other numbers: a "
                "pre-norm wrapper, x + dropout(sublayer(norm(x))), needs no declaration, and others have none"
            )
        require_gradients(op, cls, copy, [x], (forward, written))
        inside = [part for each in called for part in each.modules()]
        require_dropouts(op, cls, copy, (dropout,), inside, None, forward, written)
        return None
    return reason if sublayer is None else None  # a child may take more than x


def _required(cls: type[nn.Module]) -> int:
    """How many arguments a forward must be given."""
    taken = list(inspect.signature(cls.forward).parameters.values())[1:]
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(each.default is each.empty and each.kind in kinds for each in taken)


def require_feed_forward(
    cls: type[nn.Module],
    module: nn.Module,
    names: tuple[str, str, str | None, str | None],
    activation: str,
    swapped: bool,
    channels_first: bool,
    drops: tuple[str | None, str | None],
) -> str | Found | None:
    """Raises where the forward of ``cls`` is not second(activation(first(x)) [* gate(x)]) but for these dropouts.

    What it found beyond that; part of a sentence where the forward is to be left; None where it is believed.
    """
    op, copy = "declare_feed_forward", specimen(module, wide=True)
    layers: list[Any] = [None if name is None or copy is None else guard.child(copy, name) for name in names]
    first, second, gate, norm = layers
    if copy is None or any("forward" in layer.__dict__ for layer in layers if layer) or first.weight.numel() == 0:
        return None
    weight = first.weight.flatten(1)[0]
    if weight.numel() < 2:
        return None
    drawn = torch.randn(2, 3, weight.numel(), generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    rows = drawn.to(weight.device, weight.dtype if weight.is_floating_point() else torch.float32)  # of 8 bits

    def rows_by(layer: Any, rows: Tensor) -> Tensor:
        return layer(rows.mT).mT if isinstance(layer, nn.Conv1d) else layer(rows)

    def written(x: Tensor, activation: str = activation, swapped: bool = swapped) -> Tensor:
        x = x if norm is None else norm(x)
        factors = rows_by(first, x).chunk(2 if gate is first else 1, dim=-1)
        factors += () if gate is None or gate is first else (rows_by(gate, x),)
        activated, *others = factors[:: -1 if swapped else 1]
        hidden = ACTIVATIONS[activation](activated)
        hidden = hidden * others[0] if others else hidden
        hidden = nn.functional.dropout(hidden, probability(copy, drops[0]))
        return dropped(copy, drops[1], rows_by(second, hidden))

    def forward(x: Tensor) -> Any:
        got = _forward_of_one(cls)(copy, x.mT if channels_first else x)
        return got.mT if channels_first and isinstance(got, Tensor) else got

    inside = [inner for layer in layers if layer is not None for inner in layer.modules()]

    def hint(x: Tensor, got: Tensor) -> str:
        for name, turned in itertools.product(ACTIVATIONS, (False, True) if gate is not None else (False,)):
            other, wrong = attempt(copy, lambda name=name, turned=turned: written(x, name, swapped != turned))  # type: ignore[misc]
            if wrong is None and not differ(got, other):
                order = f", first={names[2]!r} and gate={names[0]!r}"
                if gate is first:
                    order = f" and activated={'first' if swapped else 'second'!r}"
                return f"those of activation={name!r}{order if turned else ''}"
        named = f"activation (one of {', '.join(ACTIVATIONS)}), gate, norm and the order of the layers say which"
        return f"{named}, and activated which half" if gate is first else named

    def require(x: Tensor) -> str | None:
        run, declared = lambda: forward(x.clone()), lambda: written(x)
        require_pure(copy, [run, lambda: forward(_LOUD * x)], [] if norm is None else [norm])
        got, refused = result(op, cls, copy, forward, x)
        if got is None:
            return refused
        wanted, wrong = attempt(copy, declared)
        if wrong is not None or differ(got, wanted):
            x_in = "x" if norm is None else "norm(x)"
            inner = f"{activation}({names[0]}({x_in}))" + ("" if gate is None else f" * {names[2]}({x_in})")
            if gate is first:
                product = f"a * {activation}(b)" if swapped else f"{activation}(a) * b"
                inner = f"{product}, a and b = {names[0]}({x_in}).chunk(2, -1)"
            numbers = "other numbers" if wrong is None else f"shapes that give none ({wrong})"
            raise ValueError(
                f"{op}: {cls.__name__}.forward must give {names[1]}({inner}), got {numbers}: {hint(x, got)}"
            )
        if x.dtype in _WIDE:
            require_gradients(op, cls, copy, [x], (run, declared))
        require_dropouts(op, cls, copy, drops, inside, second, run, declared)
        return None

    def runs(narrow: bool) -> tuple[Callable[[], Any], Callable[[], Any]]:
        x = rows.bfloat16() if narrow else rows
        return lambda: forward(x), lambda: written(x)

    rows, found = 3 * rows, Found()
    rows, reason = (rows, require(rows)) if channels_first else _in_some_shape(rows, require)
    if reason is None:
        found.look_at_dtypes(copy, runs)
    return reason or found


def _forward_of_one(cls: type[nn.Module]) -> Callable[..., Any]:
    return calling(cls, *parameters(cls)[:1])


def _in_some_shape(rows: Tensor, require: Callable[[Tensor], str | None]) -> tuple[Tensor, str | None]:
    """The rows (1, T, N) or, where ``require`` refuses these, as another shape that ends in N; why none is taken.

    A forward that takes another axis than the last for the features is found where that is as long.
    """
    reason = require(rows)
    if reason is None:
        return rows, None
    width = rows.shape[-1]
    shapes = [rows[:, None], rows[0]]
    if width <= _SQUARE:
        many = rows[:, torch.arange(width, device=rows.device) % rows.shape[1]]
        shapes = [many, many[:, :, None], *shapes]
    answers = [require(each) for each in shapes]
    return (shapes[answers.index(None)], None) if None in answers else (rows, reason)


def _rows_of(copy: nn.Module, norm: DeclaredNorm) -> Tensor | None:
    """Rows for a norm: in float32 and float64 the second so small that what is added to it counts as it does; zeros."""
    weight, bias = norm.parameters(copy)
    eps, outside = norm.epsilons(copy)
    like = weight if weight is not None else bias
    small = max(outside, (eps or 0.0) ** 0.5)
    rows = _rows(torch.ones(_WIDTH, device="cpu") if like is None else like, small if small > _LEAST else 1.0)
    return None if rows is None else torch.cat([rows, torch.zeros_like(rows[:, :1])], dim=1)


def _rows(like: Any, small: float = 1.0) -> Tensor | None:
    """Two rows for a module with this parameter: of ordinary size, and (but for 16 bits) ``small`` times that."""
    if not like.is_floating_point() or like.dim() != 1 or like.numel() < 2:
        return None
    row = torch.linspace(-1.7, 1.7, like.numel(), dtype=torch.float64, device="cpu")
    row = torch.where(torch.arange(like.numel(), device="cpu") % 2 == 0, row, -row)
    small = small if like.dtype in _WIDE and small else 1.0
    return torch.stack([row, row * small])[None].to(like.detach())
