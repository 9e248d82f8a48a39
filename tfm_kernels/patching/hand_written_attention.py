"""Attention that users wrote by hand, declared by the names of its parts; see hand_written.py for the others."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .. import _check
from . import declaration
from .attention_trial import require_attention
from .declared_attention import AXES, MASKS, DeclaredAttention, names_of_arguments
from .found import Found
from .registry import Recipe, from_forward, name_of, register_recipe
from .specimen import once
from .swap import options


def declare_attention(
    cls: type[nn.Module],
    *,
    query: str | None = None,
    key: str | None = None,
    value: str | None = None,
    qkv: str | None = None,
    kv: str | None = None,
    out: str | None,
    norm: str | None = None,
    query_norm: str | None = None,
    key_norm: str | None = None,
    heads: str | int,
    kv_heads: str | int | None = None,
    causal: bool | str = False,
    scale: str | float | None = None,
    dropout: str | None = None,
    out_dropout: str | None = None,
    arguments: tuple[str | None, ...] | None = None,
    mask: str = "keep",
    mask_axis: str | None = None,
    weights: bool | str = False,
) -> Recipe:
    """Declare that a class is multi-head attention: out(concat of heads softmax(scale q k^T) v), of (B, T, E).

    The projections are called as modules, so hooks and adapters on them keep working. ``patch`` tries a copy with other
    parameters on a few rows, without a mask, with some, and in training, and refuses a class that gives other numbers
    or gradients. It believes layers other than nn.Linear, which it cannot try, and leaves a module as it is whose
    forward refuses such rows, writes parameters or buffers, or draws by another generator than torch's. It does not see
    what a forward does beyond 70 tokens (a longer window), by its state (a cache that an attribute switches on, a
    buffer that is loaded later) or at large scores alone (a cap). The forward runs as it is written where a call gives
    arguments that are not declared anything but their defaults, or a mask of a form (the number of axes, one for each
    head or not) that the trial found read in another way or not at all, or with three axes of which the first is no
    batch. A row that may see no key gives 0 before ``out``, where code that fills with -1e9 gives the mean of hidden
    values. An attribute in which the forward keeps its weights for pictures, such as ``self.attn``, is not written:
    ``tfk.get_attention_maps`` gives the weights.

    Args:
        cls: the class, matched exactly.
        query: name of the child that projects queries, dotted where it lies deeper ("linears.0").
        key: name of the child that projects keys.
        value: name of the child that projects values.
        qkv: instead of these three, name of the child that projects all of them, in this order, as nanoGPT's ``c_attn``
            and timm's ``qkv`` do.
        kv: instead of ``key`` and ``value``, name of the child that projects both, as lucidrains' ``to_kv`` does.
        out: name of the child that projects the result, or None.
        norm: name of the child that the input goes through first, as in vit-pytorch, or None.
        query_norm: name of the child that the queries of each head (B, H, T, D) go through, as timm's ``q_norm``, or
            None.
        key_norm: the same of the keys.
        heads: name of the attribute that holds the number of heads ("config.n_head"), or the number.
        kv_heads: the same of the keys and values, where they have fewer heads (grouped queries); None: as many.
        causal: whether the forward itself hides from a query the keys behind it, or name of the attribute that tells.
        scale: name of the attribute that holds the factor of the scores, or the number; None: 1 / sqrt(D). A tensor,
            which may be trained, multiplies the queries.
        dropout: name of the nn.Dropout (or of a float) that acts on the weights, or None.
        out_dropout: the same of what acts on what ``out`` gives, or None.
        arguments: names of the forward's arguments that hold queries, keys, values and the mask, or input and mask
            where all are projected from one. ("x", None): no mask. By default the mask is what is called so, and the
            inputs come before it; or they are the first three (one where there are fewer, or ``qkv`` is given) and the
            mask is next, unless that has a default such as False.
        mask: "keep": positions where the mask is 0 are hidden; "hide": where it is not 0; "add": added to the scores;
            "sdpa": as F.scaled_dot_product_attention takes it, bool as "keep" and any other as "add". It broadcasts to
            (B, H, Tq, Tk) as in torch.
        mask_axis: what the first axis of a mask with three is: "batch" where the forward puts the heads in by
            ``mask.unsqueeze(1)``, as in The Annotated Transformer; "heads" where it lets the mask broadcast. "keys":
            a mask of two axes is (B, Tk), one of three is left to the forward. None: a mask with three axes is refused
            unless the first has size 1.
        weights: whether the forward returns (result, weights); dropout acts on those that are returned, too.
            "before_dropout": it does not, and in training attention is computed twice.

    Returns:
        The recipe, registered.

    Raises:
        TypeError: ``cls`` is no module class.
        ValueError: ``mask`` or ``mask_axis`` is unknown; ``qkv`` is given besides ``query``, ``key`` and ``value``, or
            neither; the forward has no argument of a declared name, or wants one that is not declared; ``norm`` is
            given where there is more than one input.

    Example:
        >>> recipe = tfk.patching.declare_attention(  # nanoGPT's
        ...     CausalSelfAttention, qkv="c_attn", out="c_proj", heads="n_head", causal=True, dropout="dropout",
        ...     out_dropout="resid_dropout",
        ... )
    """
    op = "declare_attention"
    declaration.module_class(op, cls)
    _check.choice(op, "mask", mask, MASKS)
    if not isinstance(weights, bool) and weights != "before_dropout":
        raise ValueError(f"{op}: weights must be True, False or 'before_dropout', got {weights!r}")
    if mask_axis is not None:
        _check.choice(op, "mask_axis", mask_axis, AXES)
    all_named = {"query": query, "key": key, "value": value, "qkv": qkv, "kv": kv}
    projections = {name: child for name, child in all_named.items() if child is not None}
    if tuple(projections) not in (("query", "key", "value"), ("query", "kv"), ("qkv",)):
        raise ValueError(
            f"{op}: query, key and value must name a child each, or query and kv, or qkv alone, got {projections}"
        )
    order = names_of_arguments(op, cls, arguments, len(projections))
    if norm is not None and len(set(order[:3])) > 1:
        raise ValueError(f"{op}: norm must be None where queries, keys and values are {order[:3]}, got {norm!r}")
    layers = tuple(projections.values())
    norms = (query_norm, key_norm)
    declared = DeclaredAttention(
        layers, out, norm, heads, kv_heads, order, causal, scale, dropout, out_dropout, mask, mask_axis, weights, norms
    )
    taken = declaration.Arguments(cls, tuple(name for name in order if name is not None))
    unknown = taken.required()
    if unknown is not None:
        raise ValueError(
            f"{op}: arguments must name all that {cls.__name__}.forward has no default for, got {order}, without "
            f"{unknown!r}; a class that takes more is written as a function, see patching.recipe"
        )

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = taken.of(args, kwargs)
        if call is None:
            return NotImplemented
        inputs: list[Any]
        *inputs, given = (None if name is None else call.get(name) for name in order)
        if not declared.takes(self, inputs, given):
            return NotImplemented
        result, maps = declared.run(self, inputs, given, options(self).backend)
        return (result, maps) if weights else result

    named = declaration.names(
        op,
        {**projections, "out": out, "norm": norm, "query_norm": query_norm, "key_norm": key_norm},
        {
            "heads": heads,
            "kv_heads": kv_heads,
            "causal": causal,
            "scale": scale,
            "dropout": dropout,
            "out_dropout": out_dropout,
        },
    )

    @once
    def check(module: nn.Module) -> str | Found | None:
        named(module)
        for argument, held in (("heads", heads), ("kv_heads", kv_heads), ("causal", causal)):
            value = declaration.number(module, held)
            if isinstance(value, Tensor) and value.numel() != 1:
                raise ValueError(f"{op}: {argument} must name a number, got {held!r}, a tensor of {tuple(value.shape)}")
        return declaration.why_not_dropped(module, dropout, out_dropout) or require_attention(cls, module, declared)

    calls = tuple(name for name in (*layers, norm, *norms, out, out_dropout) if name is not None)
    what = "fused attention"
    return register_recipe(from_forward(name_of(cls), cls, run, what, check=check, calls=calls))
