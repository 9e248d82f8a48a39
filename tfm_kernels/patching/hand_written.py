"""Recipes for classes that users wrote by hand, declared by the names of their parts.

    tfk.patching.declare_attention(MultiHeadAttention, query="w_q", key="w_k", value="w_v", out="w_o", heads="heads")
    tfk.patching.declare_attention(CausalSelfAttention, qkv="c_attn", out="c_proj", heads="n_head", causal=True)
    tfk.patching.declare_feed_forward(PositionwiseFeedForward, first="fc1", second="fc2", dropout="dropout")
    tfk.patching.declare_layer_norm(LayerNorm, weight="gamma", bias="beta", eps="eps", unbiased=True)
    tfk.patching.declare_rms_norm(RMSNorm, weight="scale", eps=1e-6)
    tfk.patching.declare_residual(ResidualConnection, norm="norm", dropout="dropout", sublayer="sublayer")
    tfk.patch(model)

What does not fit one of these forms is written as a function, see ``recipe``. ``patch`` refuses a declaration that
names what its module does not have, or whose numbers are not those of its forward on a few rows, and where it was true
of another module of the class leaves this one as it is; ``tfk.prove`` tells whether one is right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .. import _check
from ..nn import Int8Linear
from . import block, declaration, declared_numbers, guard
from .declared_norm import DeclaredNorm
from .found import Found
from .registry import Recipe, from_forward, name_of, register_recipe
from .specimen import once
from .swap import options, original_class

_norms = {nn.LayerNorm: DeclaredNorm(), nn.RMSNorm: DeclaredNorm(bias=None, rms=True)}


def declare_feed_forward(
    cls: type[nn.Module],
    *,
    first: str,
    second: str,
    activation: str = "relu",
    dropout: str | None = None,
    out_dropout: str | None = None,
    norm: str | None = None,
    gate: str | None = None,
    activated: str = "first",
    channels_first: bool = False,
) -> Recipe:
    """Declare that a class is a feed-forward block: second(dropout(activation(first(x)))), with a gate times gate(x).

    ``patch`` tries it on a few rows, refuses a class that gives other numbers or gradients or drops some by another
    dropout, and leaves one as it is that takes no rows (..., E), keeps what it computes in an attribute or a buffer,
    writes its parameters, or draws by another generator than torch's.

    Args:
        cls: the class, matched exactly. Its forward takes x alone.
        first: name of the first nn.Linear, or nn.Conv1d of width 1.
        second: name of the second one.
        activation: "relu" | "gelu" | "gelu_tanh" | "silu".
        dropout: name of the nn.Dropout (or of a float) after the activation, or None.
        out_dropout: the same after ``second``, or None.
        norm: name of the child that x goes through first, or None.
        gate: name of the nn.Linear whose product multiplies the activation, or None. That of ``first`` again: one half
            of what it gives multiplies the activation of the other.
        activated: "first" | "second": which half that is, as ``act(a) * b`` (DINOv2) or ``a * act(b)`` (lucidrains'
            GEGLU) of ``a, b = first(x).chunk(2, -1)``.
        channels_first: whether the forward takes and gives (B, E, T), as convolutions do, instead of (B, T, E).

    Returns:
        The recipe, registered.

    Raises:
        TypeError: ``cls`` is no module class.
        ValueError: ``activation`` or ``activated`` is unknown, ``norm`` is given with ``channels_first``, or
            ``activated="second"`` without a ``gate`` that is ``first``.
    """
    declaration.module_class("declare_feed_forward", cls)
    _check.choice("declare_feed_forward", "activation", activation, ("relu", "gelu", "gelu_tanh", "silu"))
    _check.choice("declare_feed_forward", "activated", activated, ("first", "second"))
    if activated == "second" and gate != first:
        raise ValueError(
            f"declare_feed_forward: activated must be 'first' where gate is not first, {first!r}, got 'second': of two "
            "layers, first is the one that is activated"
        )
    if norm is not None and channels_first:
        raise ValueError(f"declare_feed_forward: norm must be None where channels_first=True, got {norm!r}")

    @_of_one(cls)
    def run(self: Any, x: Tensor) -> Any:
        layers: list[Any] = [guard.child(self, name) for name in (first, second)]
        gated = None if gate is None else guard.child(self, gate)
        if not all(_pointwise(layer) for layer in (*layers, gated) if layer is not None):
            return NotImplemented
        if not all(declaration.has_dropout(self, name) for name in (dropout, out_dropout)):
            return NotImplemented
        own = options(self)
        if not declaration.of_one_dtype((x,), (*layers, gated)) or (own.found is not None and own.found.leaves(x)):
            return NotImplemented
        told: dict[str, Any] = {"dropout_p": declaration.probability(self, dropout), "backend": own.backend}
        x = x if norm is None else guard.child(self, norm)(x)
        rows, swapped = x.mT if channels_first else x, activated == "second"
        y = block.feed_forward(rows, layers[0], layers[1], activation, gated, swapped=swapped, **told)
        return declaration.dropped(self, out_dropout, y.mT.contiguous() if channels_first else y)

    children, drops = {"first": first, "second": second, "gate": gate}, {"dropout": dropout, "out_dropout": out_dropout}
    covers = tuple(dict.fromkeys(name for name in children.values() if name is not None))
    calls = tuple(name for name in (norm, out_dropout) if name is not None)
    named = declaration.names("declare_feed_forward", {**children, "norm": norm}, drops)

    @once
    def check(module: nn.Module) -> str | Found | None:
        named(module)
        reason = declaration.why_not_dropped(module, dropout, out_dropout)
        if reason is not None or not all(_pointwise(guard.child(module, name)) for name in covers):
            return reason
        parts, drops = (first, second, gate, norm), (dropout, out_dropout)
        swapped = activated == "second"
        return declared_numbers.require_feed_forward(cls, module, parts, activation, swapped, channels_first, drops)

    name, reads = name_of(cls), (Int8Linear,)
    return register_recipe(from_forward(name, cls, run, "feed-forward", covers, check, calls, reads))


def declare_layer_norm(
    cls: type[nn.Module],
    *,
    weight: str | None = "weight",
    bias: str | None = "bias",
    eps: str | float = "eps",
    eps_outside: str | float = 0.0,
    unbiased: bool = False,
    unit_offset: bool = False,
) -> Recipe:
    """Declare that a class is LayerNorm over the last dimension.

    y = (x - mean) / (sqrt(var + eps) + eps_outside) * weight + bias

    One that divides by (std + eps), as that of The Annotated Transformer, has eps=0.0, eps_outside="eps" and, by
    ``x.std(-1)``, unbiased=True. ``patch`` tries it on a few rows and refuses a class that gives other numbers, and
    leaves one as it is that takes no rows (..., N). A call whose x has another dtype than the parameters runs the
    forward as it is written.

    Args:
        cls: the class, matched exactly. Its forward takes x alone.
        weight: name of the factor's parameter, or None.
        bias: name of the summand's parameter, or None.
        eps: name of the attribute that holds what is added to the variance, or the number.
        eps_outside: the same of what is added to its root.
        unbiased: whether the variance divides by N - 1, as ``x.var(-1)`` does.
        unit_offset: whether the factor is 1 + weight, as in Nemotron.

    Returns:
        The recipe, registered.

    Raises:
        TypeError: ``cls`` is no module class.
    """
    return _declare_norm(
        "declare_layer_norm", cls, DeclaredNorm(weight, bias, eps, eps_outside, unbiased, unit_offset=unit_offset)
    )


def declare_rms_norm(
    cls: type[nn.Module],
    *,
    weight: str | None = "weight",
    eps: str | float | None = "eps",
    eps_outside: str | float = 0.0,
    unit_offset: bool = False,
) -> Recipe:
    """Declare that a class is RMSNorm over the last dimension.

    y = x / (sqrt(mean(x**2) + eps) + eps_outside) * weight

    ``patch`` tries it on a few rows and refuses a class that gives other numbers, and leaves one as it is that takes no
    rows (..., N). A call whose x has another dtype than the weight runs the forward as it is written. One that divides
    by ``F.normalize`` has eps=0.0 and eps_outside=1e-12.

    Args:
        cls: the class, matched exactly. Its forward takes x alone.
        weight: name of the factor's parameter, or None.
        eps: name of the attribute that holds what is added to the mean square, or the number; None, also where the
            attribute holds it: that of F.rms_norm, which depends on the dtype.
        eps_outside: the same of what is added to its root.
        unit_offset: whether the factor is 1 + weight, as in Gemma.

    Returns:
        The recipe, registered.

    Raises:
        TypeError: ``cls`` is no module class.
    """
    return _declare_norm(
        "declare_rms_norm", cls, DeclaredNorm(weight, None, eps, eps_outside, rms=True, unit_offset=unit_offset)
    )


def _declare_norm(op: str, cls: type[nn.Module], norm: DeclaredNorm) -> Recipe:
    declaration.module_class(op, cls)

    @_of_one(cls)
    def run(self: Any, x: Tensor) -> Any:
        taken = norm.takes(self, x) and guard.why_not_kept(x) is None
        return norm.run(self, x, options(self).backend) if taken else NotImplemented

    named = declaration.names(op, {}, norm.names())

    @once
    def check(module: nn.Module) -> str | Found | None:
        named(module)
        for argument, name in (("eps", norm.eps), ("eps_outside", norm.eps_outside)):
            held = guard.attribute(module, name) if isinstance(name, str) else None
            if isinstance(held, Tensor) and held.requires_grad:
                raise ValueError(f"{op}: {argument} must name a number, got {name!r}, which is trained")
        return declared_numbers.require_norm(op, cls, module, norm)

    _norms[cls] = norm
    what = "rms_norm" if norm.rms else "layer_norm"
    return register_recipe(from_forward(name_of(cls), cls, run, what, check=check))


def declare_residual(
    cls: type[nn.Module], *, norm: str, dropout: str | None = None, sublayer: str | None = None
) -> Recipe:
    """Declare that a class is the residual wrapper of post-norm models: norm(x + dropout(sublayer(x, ...))).

    Also norm(x + dropout(y)) of what a sublayer gave, as AddNorm(x, y) of Dive into Deep Learning. A pre-norm wrapper,
    x + dropout(sublayer(norm(x))), has nothing to fuse beyond its norm. ``patch`` tries both on a few rows and refuses
    other numbers; a sublayer that is a child and takes more than x is believed.

    Args:
        cls: the class, matched exactly. Its forward takes x first.
        norm: name of the norm: nn.LayerNorm, nn.RMSNorm, or a class declared with ``declare_layer_norm`` or
            ``declare_rms_norm``.
        dropout: name of the nn.Dropout, or None.
        sublayer: name of the child that is the sublayer and takes all arguments of the forward; None where the
            sublayer is the forward's second argument, a callable that takes x or the tensor that the sublayer gave,
            and there is no third.

    Returns:
        The recipe, registered.

    Raises:
        TypeError: ``cls`` is no module class.
        ValueError: ``sublayer`` is None and the forward has no second argument.
    """
    declaration.module_class("declare_residual", cls)
    names = declaration.parameters(cls)[: 2 if sublayer is None else 1]
    if sublayer is None and len(names) < 2:
        raise ValueError(
            f"declare_residual: sublayer must name a child where {cls.__name__}.forward has no second argument, "
            f"got None; its arguments are {names}"
        )

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = declaration.bind(names, args, kwargs)
        if bound is None or sublayer is None and any(bound[1:]):
            return NotImplemented
        (x, *given), args, kwargs = bound
        inner = guard.child(self, norm)
        known = _norms.get(original_class(inner))
        if (
            known is None
            or guard.hooked(inner)
            or guard.spans_rows(inner)
            or not declaration.has_dropout(self, dropout)
        ):
            return NotImplemented
        if sublayer is not None:
            y = guard.child(self, sublayer)(x, *args, **kwargs)
        elif not callable(y := given[0]) and not isinstance(y, Tensor):
            return NotImplemented
        else:
            y = y if isinstance(y, Tensor) else y(x)
        if not isinstance(y, Tensor):  # a callable is not called again: it may keep what it was given
            return NotImplemented if sublayer is not None else cls.forward(self, x, lambda _: y)
        numbers = x.is_floating_point() and y.is_floating_point()
        if y.shape != x.shape or not numbers or not known.takes(inner, x, y):  # the sum broadcasts, or fails
            return inner(x + (y if dropout is None else guard.child(self, dropout)(y)))
        return known.run_of_sum(inner, y, x, declaration.probability(self, dropout), options(self).backend)

    covers = () if dropout is None else (dropout,)
    named = declaration.names("declare_residual", {"norm": norm, "dropout": dropout, "sublayer": sublayer})

    @once
    def check(module: nn.Module) -> str | None:
        named(module)
        inner = guard.child(module, norm)
        known = _norms.get(original_class(inner))
        if known is None or guard.spans_rows(inner):
            return f"its {norm} is {type(inner).__name__}, not a norm of the last axis that is known or declared"
        reason = declaration.why_not_dropped(module, dropout)
        if reason is None and original_class(inner) not in (nn.LayerNorm, nn.RMSNorm):
            reason = _why_not_norm(inner, norm, known)
        return reason or declared_numbers.require_post_norm(cls, module, (norm, dropout, sublayer), known)

    what = "dropout, sum and norm in one pass"
    return register_recipe(from_forward(name_of(cls), cls, run, what, covers, check))


def _why_not_norm(inner: nn.Module, name: str, known: DeclaredNorm) -> str | None:
    """None where a declared norm is what was declared of its class."""
    try:
        answer = declared_numbers.require_norm("its norm", original_class(inner), inner, known)
        return answer if isinstance(answer, str) else None
    except ValueError as error:
        return f"what was declared of its {name} is not true: {error}"


def _of_one(cls: type[nn.Module]) -> Callable[[Callable[[Any, Tensor], Any]], Callable[..., Any]]:
    """Decorator: makes run(module, x) take the calls of a forward of one argument, by position or by its name."""
    names = declaration.parameters(cls)[:1]

    def taking(run: Callable[[Any, Tensor], Any]) -> Callable[..., Any]:
        def called(self: Any, *args: Any, **kwargs: Any) -> Any:
            bound = declaration.bind(names, args, kwargs) if names else (args[:1], args[1:], kwargs)
            return NotImplemented if bound is None or not bound[0] or any(bound[1:]) else run(self, *bound[0])

        return called

    return taking


def _pointwise(layer: Any) -> bool:
    """Whether a layer acts on each position by itself: a linear one, or an nn.Conv1d of width 1."""
    if not isinstance(layer, nn.Conv1d):
        return isinstance(layer, (nn.Linear, Int8Linear))
    return layer.kernel_size == layer.stride == (1,) and layer.groups == 1 and layer.padding in ((0,), "same")
