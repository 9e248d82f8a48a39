"""Recipes for classes that users wrote by hand, declared by the names of their parts.

    tfk.patching.declare_attention(MultiHeadAttention, query="w_q", key="w_k", value="w_v", out="w_o", heads="heads")
    tfk.patching.declare_feed_forward(PositionwiseFeedForward, first="fc1", second="fc2", dropout="dropout")
    tfk.patching.declare_layer_norm(LayerNorm, weight="gamma", bias="beta", eps="eps", unbiased=True)
    tfk.patching.declare_rms_norm(RMSNorm, weight="scale", eps=1e-6)
    tfk.patching.declare_residual(ResidualConnection, norm="norm", dropout="dropout", sublayer="sublayer")
    tfk.patch(model)

What does not fit one of these forms is written as a function, see ``recipe``. ``patch`` refuses a declaration that
names what its module does not have, or whose numbers are not those of its forward on two rows (norms, feed-forward
blocks, residuals); ``tfk.prove`` tells whether one is right.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .. import _check
from ..mask import Mask
from . import block, declared_numbers, guard
from .declared_norm import DeclaredNorm
from .registry import Recipe, from_forward, register_recipe
from .swap import options, original_class

_MASKS = ("keep", "hide", "add")
_AXES = ("batch", "heads")
_norms = {nn.LayerNorm: DeclaredNorm(), nn.RMSNorm: DeclaredNorm(bias=None, rms=True)}


def declare_attention(
    cls: type[nn.Module],
    *,
    query: str,
    key: str,
    value: str,
    out: str | None,
    heads: str | int,
    dropout: str | None = None,
    arguments: tuple[str, str, str, str | None] | None = None,
    mask: str = "keep",
    mask_axis: str | None = None,
    weights: bool = False,
) -> Recipe:
    """Declare that a class is multi-head attention: out(concat of heads softmax(q k^T / sqrt(D)) v).

    The projections are called as modules, so hooks and adapters on them keep working. A row that may see no key gives
    0 before ``out``, where code that fills with -1e9 gives the mean of hidden values. An attribute in which the forward
    keeps its weights for pictures, such as ``self.attn``, is not written: ``tfk.get_attention_maps`` gives the weights.

    Args:
        cls: the class, matched exactly.
        query: name of the child that projects queries, dotted where it lies deeper ("linears.0").
        key: name of the child that projects keys.
        value: name of the child that projects values.
        out: name of the child that projects the result, or None.
        heads: name of the attribute that holds the number of heads, or the number.
        dropout: name of the nn.Dropout (or of a float) that acts on the weights, or None.
        arguments: names of the forward's arguments that hold queries, keys, values and the mask; by default its first
            four. ("x", "x", "x", "mask") is self-attention.
        mask: "keep": positions where the mask is 0 are hidden; "hide": where it is not 0; "add": added to the scores.
            It broadcasts to (B, H, Tq, Tk) as in torch.
        mask_axis: what the first axis of a mask with three is: "batch" where the forward puts the heads in by
            ``mask.unsqueeze(1)``, as in The Annotated Transformer; "heads" where it lets the mask broadcast. None: a
            mask with three axes is refused unless the first has size 1.
        weights: whether the forward returns (result, weights).

    Returns:
        The recipe, registered.

    Raises:
        TypeError: ``cls`` is no module class.
        ValueError: ``mask`` or ``mask_axis`` is unknown, or the forward has no such argument.
    """
    _module_class("declare_attention", cls)
    _check.choice("declare_attention", "mask", mask, _MASKS)
    if mask_axis is not None:
        _check.choice("declare_attention", "mask_axis", mask_axis, _AXES)
    names = _parameters(cls)
    wanted = arguments or (*names[:3], names[3] if len(names) > 3 else None)
    for name in wanted:
        if name is not None and name not in names:
            raise ValueError(f"declare_attention: {cls.__name__}.forward must have an argument {name!r}, got {names}")
    places = [None if name is None else (names.index(name), name) for name in wanted]

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        q, k, v, given = (_argument(place, args, kwargs) for place in places)
        count = heads if isinstance(heads, int) else getattr(self, heads)
        projections = (guard.child(self, name) for name in (query, key, value))
        q, k, v = (block.split_heads(layer(t), count) for layer, t in zip(projections, (q, k, v), strict=True))
        told: Any = {"mask": _mask(given, mask, mask_axis), "dropout_p": _probability(self, dropout)}
        told["backend"] = options(self).backend
        maps = None
        if weights:
            result, maps = block.attend_with_weights(q, k, v, **told)
        else:
            result = block.attend(q, k, v, **told)
        result = block.merge_heads(result)
        result = result if out is None else guard.child(self, out)(result)
        return (result, maps) if weights else result

    children = {"query": query, "key": key, "value": value, "out": out}
    check = _names("declare_attention", children, {"heads": heads, "dropout": dropout})
    return register_recipe(from_forward(_name(cls), cls, run, "fused attention", check=check))


def declare_feed_forward(
    cls: type[nn.Module],
    *,
    first: str,
    second: str,
    activation: str = "relu",
    dropout: str | None = None,
    gate: str | None = None,
    channels_first: bool = False,
) -> Recipe:
    """Declare that a class is a feed-forward block: second(dropout(activation(first(x)))), with a gate times gate(x).

    ``patch`` tries it on two rows, and refuses a class that gives other numbers or drops some by another dropout.

    Args:
        cls: the class, matched exactly. Its forward takes x alone.
        first: name of the first nn.Linear, or nn.Conv1d of width 1.
        second: name of the second one.
        activation: "relu" | "gelu" | "gelu_tanh" | "silu".
        dropout: name of the nn.Dropout after the activation, or None.
        gate: name of the nn.Linear without bias whose product multiplies the activation, or None.
        channels_first: whether the forward takes and gives (B, E, T), as convolutions do, instead of (B, T, E).

    Returns:
        The recipe, registered.

    Raises:
        TypeError: ``cls`` is no module class.
        ValueError: ``activation`` is unknown.
    """
    _module_class("declare_feed_forward", cls)
    _check.choice("declare_feed_forward", "activation", activation, ("relu", "gelu", "gelu_tanh", "silu"))

    @_of_one(cls)
    def run(self: Any, x: Tensor) -> Any:
        layers: list[Any] = [guard.child(self, name) for name in (first, second)]
        gated = None if gate is None else guard.child(self, gate)
        if not all(map(_pointwise, layers)) or (gated is not None and gated.bias is not None):
            return NotImplemented
        told: dict[str, Any] = {"dropout_p": _probability(self, dropout), "backend": options(self).backend}
        if not channels_first:
            return block.feed_forward(x, layers[0], layers[1], activation, gated, **told)
        y = block.feed_forward(x.transpose(-1, -2), layers[0], layers[1], activation, gated, **told)
        return y.transpose(-1, -2).contiguous()

    children = {"first": first, "second": second, "gate": gate, "dropout": dropout}
    covers = tuple(name for name in children.values() if name is not None)
    named = _names("declare_feed_forward", children)

    def check(module: nn.Module) -> None:
        named(module)
        if _pointwise(guard.child(module, first)) and _pointwise(guard.child(module, second)):
            parts = (first, second, gate)
            declared_numbers.require_feed_forward(cls, module, parts, activation, channels_first, dropout)

    return register_recipe(from_forward(_name(cls), cls, run, "feed-forward", covers, check))


def declare_layer_norm(
    cls: type[nn.Module],
    *,
    weight: str | None = "weight",
    bias: str | None = "bias",
    eps: str | float = "eps",
    eps_outside: str | float = 0.0,
    unbiased: bool = False,
) -> Recipe:
    """Declare that a class is LayerNorm over the last dimension.

    y = (x - mean) / (sqrt(var + eps) + eps_outside) * weight + bias

    One that divides by (std + eps), as that of The Annotated Transformer, has eps=0.0, eps_outside="eps" and, by
    ``x.std(-1)``, unbiased=True. ``patch`` tries it on two rows and refuses a class that gives other numbers. A call
    whose x has another dtype than the parameters runs the forward as it is written.

    Args:
        cls: the class, matched exactly. Its forward takes x alone.
        weight: name of the factor's parameter, or None.
        bias: name of the summand's parameter, or None.
        eps: name of the attribute that holds what is added to the variance, or the number.
        eps_outside: the same of what is added to its root.
        unbiased: whether the variance divides by N - 1, as ``x.var(-1)`` does.

    Returns:
        The recipe, registered.

    Raises:
        TypeError: ``cls`` is no module class.
    """
    return _declare_norm("declare_layer_norm", cls, DeclaredNorm(weight, bias, eps, eps_outside, unbiased))


def declare_rms_norm(
    cls: type[nn.Module],
    *,
    weight: str | None = "weight",
    eps: str | float = "eps",
    eps_outside: str | float = 0.0,
) -> Recipe:
    """Declare that a class is RMSNorm over the last dimension.

    y = x / (sqrt(mean(x**2) + eps) + eps_outside) * weight

    ``patch`` tries it on two rows and refuses a class that gives other numbers, such as one that multiplies by
    (1 + weight). A call whose x has another dtype than the weight runs the forward as it is written.

    Args:
        cls: the class, matched exactly. Its forward takes x alone.
        weight: name of the factor's parameter, or None.
        eps: name of the attribute that holds what is added to the mean square, or the number.
        eps_outside: the same of what is added to its root.

    Returns:
        The recipe, registered.

    Raises:
        TypeError: ``cls`` is no module class.
    """
    return _declare_norm("declare_rms_norm", cls, DeclaredNorm(weight, None, eps, eps_outside, rms=True))


def _declare_norm(op: str, cls: type[nn.Module], norm: DeclaredNorm) -> Recipe:
    _module_class(op, cls)

    @_of_one(cls)
    def run(self: Any, x: Tensor) -> Any:
        return norm.run(self, x, options(self).backend) if norm.takes(self, x) else NotImplemented

    named = _names(op, {}, norm.names())

    def check(module: nn.Module) -> None:
        named(module)
        declared_numbers.require_norm(op, cls, module, norm)

    _norms[cls] = norm
    return register_recipe(from_forward(_name(cls), cls, run, "rms_norm" if norm.rms else "layer_norm", check=check))


def declare_residual(
    cls: type[nn.Module], *, norm: str, dropout: str | None = None, sublayer: str | None = None
) -> Recipe:
    """Declare that a class is the residual wrapper of post-norm models: norm(x + dropout(sublayer(x, ...))).

    A pre-norm wrapper, x + dropout(sublayer(norm(x))), has nothing to fuse beyond its norm. ``patch`` refuses one where
    the sublayer is an argument; where it is a child, ``tfk.prove`` tells.

    Args:
        cls: the class, matched exactly. Its forward takes x first.
        norm: name of the norm: nn.LayerNorm, nn.RMSNorm, or a class declared with ``declare_layer_norm`` or
            ``declare_rms_norm``.
        dropout: name of the nn.Dropout, or None.
        sublayer: name of the child that is the sublayer and takes all arguments of the forward; None where the
            sublayer is the forward's second argument, a callable that takes x, and there is no third.

    Returns:
        The recipe, registered.

    Raises:
        TypeError: ``cls`` is no module class.
        ValueError: ``sublayer`` is None and the forward has no second argument.
    """
    _module_class("declare_residual", cls)
    names = _parameters(cls)[: 2 if sublayer is None else 1]
    if sublayer is None and len(names) < 2:
        raise ValueError(
            f"declare_residual: sublayer must name a child where {cls.__name__}.forward has no second argument, "
            f"got None; its arguments are {names}"
        )

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = _bind(names, args, kwargs)
        if bound is None or sublayer is None and any(bound[1:]):
            return NotImplemented
        (x, *given), args, kwargs = bound
        inner = guard.child(self, norm)
        known = _norms.get(original_class(inner))
        if known is None or guard.hooked(inner) or guard.spans_rows(inner):
            return NotImplemented
        y = given[0](x) if sublayer is None else guard.child(self, sublayer)(x, *args, **kwargs)
        if y.shape != x.shape or not known.takes(inner, x, y):  # the sum broadcasts, or fails
            return inner(x + (y if dropout is None else guard.child(self, dropout)(y)))
        return known.run_of_sum(inner, y, x, _probability(self, dropout), options(self).backend)

    covers = () if dropout is None else (dropout,)
    named = _names("declare_residual", {"norm": norm, "dropout": dropout, "sublayer": sublayer})

    def check(module: nn.Module) -> None:
        named(module)
        known = _norms.get(original_class(guard.child(module, norm)))
        if sublayer is None and known is not None:
            declared_numbers.require_post_norm(cls, module, norm, known)

    what = "dropout, sum and norm in one pass"
    return register_recipe(from_forward(_name(cls), cls, run, what, covers, check))


def _module_class(op: str, cls: object) -> None:
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise TypeError(f"{op}: cls must be a subclass of torch.nn.Module, got {cls!r}")


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _names(op: str, children: dict[str, Any], attributes: dict[str, Any] | None = None) -> Callable[[nn.Module], None]:
    """What asks of a module whether it has what was declared, each by the name of the declaration's argument."""

    def check(module: nn.Module) -> None:
        for argument, path in children.items():
            if path is not None:
                guard.require_child(op, argument, module, path)
        for argument, name in (attributes or {}).items():
            if isinstance(name, str):
                guard.require_attribute(op, argument, module, name)

    return check


def _parameters(cls: type[nn.Module]) -> tuple[str, ...]:
    """The names of the forward's arguments."""
    return tuple(inspect.signature(cls.forward).parameters)[1:]


def _bind(names: tuple[str, ...], args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, tuple, dict[str, Any]] | None:
    """A call's first arguments, ``names``, however given, and the others as they were; None where one is missing."""
    count, named = len(names), names[len(args) :]
    if not all(name in kwargs for name in named):
        return None
    others = {name: given for name, given in kwargs.items() if name not in named}
    return (*args[:count], *(kwargs[name] for name in named)), args[count:], others


def _of_one(cls: type[nn.Module]) -> Callable[[Callable[[Any, Tensor], Any]], Callable[..., Any]]:
    """Makes of a function of the module and x what takes the calls of a forward that takes x alone, by any name."""
    names = _parameters(cls)[:1]

    def taking(run: Callable[[Any, Tensor], Any]) -> Callable[..., Any]:
        def called(self: Any, *args: Any, **kwargs: Any) -> Any:
            bound = _bind(names, args, kwargs)
            return NotImplemented if bound is None or any(bound[1:]) else run(self, *bound[0])

        return called

    return taking


def _argument(place: tuple[int, str] | None, args: tuple, kwargs: dict[str, Any]) -> Any:
    if place is None:
        return None
    position, name = place
    return args[position] if position < len(args) else kwargs.get(name)


def _mask(given: Any, meaning: str, axis: str | None) -> Mask | Tensor | None:
    """The mask of a call as ops.attention takes it; ``axis`` is the first of three."""
    if given is None:
        return None
    if given.dim() == 3 and axis == "batch":
        given = given.unsqueeze(1)
    if given.dim() == 3 and axis is None and given.shape[0] != 1:
        raise ValueError(
            f"declare_attention: mask must be 2-D or 4-D, or have a first axis of 1, got {tuple(given.shape)}: declare "
            "mask_axis='batch' or 'heads' to say what that axis is"
        )
    given = given.view(*[1] * (4 - given.dim()), *given.shape)
    if meaning == "add":
        return given
    return Mask.keep(given != 0 if meaning == "keep" else given == 0)


def _probability(owner: nn.Module, name: str | None) -> float:
    if name is None:
        return 0.0
    held = getattr(owner, name) if "." not in name else guard.child(owner, name)
    if isinstance(held, nn.Module):
        return block.dropout_p(held)
    return held if owner.training else 0.0


def _pointwise(layer: Any) -> bool:
    """Whether a layer acts on each position by itself: an nn.Linear, or an nn.Conv1d of width 1."""
    if not isinstance(layer, nn.Conv1d):
        return isinstance(layer, nn.Linear)
    return layer.kernel_size == layer.stride == (1,) and layer.groups == 1 and layer.padding in ((0,), "same")
