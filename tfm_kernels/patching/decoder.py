"""What decoder-only models of transformers have in common: attention with rotary positions, and a layer around it.

Rotary positions in one pass for queries and one for keys, and the residual sum in a layer's middle with the norm that
follows it. Nearly all children are called as they are, so that adapters and 8-bit layers in them keep working;
attention reaches ours through transformers' registry. llama.py, gemma.py ... say what is their family's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from ..nn.packed import Packed
from . import block, guard, huggingface
from .huggingface_norm import is_rms, sum_and_norm, why_not_sum_and_norm
from .known import Known
from .registry import Recipe, backend, register_recipe
from .rotary import turned, turns
from .swap import fell_back, found_class

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
NORMED = (*PROJECTIONS, "q_norm", "k_norm")
ATTENTION = "rotary positions in one pass; attention through transformers' AttentionInterface"

SIDE_BY_SIDE = "its branches run side by side, so that no norm follows a sum in it"

Heads = tuple[Tensor, Tensor, Tensor]  # query, key, value: (B, H, T, D)


def heads(self: Any, *projected: Tensor) -> Any:
    """(B, T, H D) -> (B, H, T, D) for each."""
    return tuple(x.view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2) for x in projected)


def plain(self: Any, x: Tensor) -> Heads:
    """Three projections."""
    return heads(self, self.q_proj(x), self.k_proj(x), self.v_proj(x))


def normed_heads(self: Any, x: Tensor) -> Heads:
    """Three projections, then each head's queries and keys normalised."""
    q, k, v = plain(self, x)
    return self.q_norm(q), self.k_norm(k), v


def windowed(module: Any) -> dict[str, Any]:
    """The window of a module's own, as its code names it to the attention."""
    return {"sliding_window": module.sliding_window}


def windowed_alike(module: Any) -> dict[str, Any]:
    """The window of all layers."""
    return {"sliding_window": getattr(module.config, "sliding_window", None)}


def attended(
    self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, angles: Any, update: Any, **told: Any
) -> tuple[Tensor, Any]:
    """(B, T, H D): attention of the turned heads, and the weights that its caller may want.

    Args:
        self: the attention module.
        q: (B, H, T, D).
        k: (B, Hk, T, D).
        v: (B, Hk, T, D).
        mask: as the model made it.
        angles: cos and sin; None where it does not turn them.
        update: update(k, v) -> the keys and values that its cache then holds, or None.
        told: what else the registry's function is called with; "dropout" where it is not its ``attention_dropout``.
    """
    if angles is not None:
        q, k = turned(self, q, k, *angles)
    if isinstance(mask, Packed):
        if update is not None:  # a cache lies padded
            update(mask.spread(k), mask.spread(v))
    elif update is not None:
        k, v = update(k, v)
    p = told.pop("dropout") if "dropout" in told else self.attention_dropout
    dropout = p if self.training else 0.0
    y, weights = huggingface.interface(self)(self, q, k, v, mask, dropout=dropout, scaling=self.scaling, **told)
    return y.reshape(*y.shape[:-2], -1), weights


def _fuse_attention(
    known: Known,
    project: Callable[[Any, Tensor], Heads],
    options: Callable[[Any], dict[str, Any]],
    angles: Callable[[Any, Any], Any],
    finish: Callable[[Any, Tensor], Tensor],
) -> Callable[[Any], type]:
    def fuse(original: Any) -> type:
        keyword, named = huggingface.cache_keyword(original), huggingface.named_arguments(original)

        class Fused(original):
            def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
                told = named(args, kwargs)
                if fell_back(self, known.why_not(self)):
                    return super().forward(hidden_states, **told)
                given, mask, cache = (
                    told.pop(name, None) for name in ("position_embeddings", "attention_mask", keyword)
                )

                def update(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
                    return cache.update(k, v, self.layer_idx, **({"kwargs": told} if keyword == "cache" else {}))

                q, k, v = project(self, hidden_states)
                updated = None if cache is None else update
                y, weights = attended(self, q, k, v, mask, angles(self, given), updated, **{**options(self), **told})
                return finish(self, y), weights

        return Fused

    return fuse


def _fuse_layer(
    known: Known,
    why_not: Callable[[Any], str | None],
    attention: str,
    mlp: str,
    norm: str,
    after_attention: str | None,
    after_mlp: str | None,
    dropout: str | None,
    scale: str | None,
    by_name: bool,
) -> Callable[[Any], type]:
    def fuse(original: Any) -> type:
        named = huggingface.named_arguments(original)

        class Fused(original):
            def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
                told = named(args, kwargs)
                middle = guard.child(self, norm)
                reason = known.why_not(self) or why_not(self) or why_not_sum_and_norm(middle, hidden_states)
                if fell_back(self, reason):
                    return super().forward(hidden_states, **told)
                x, attend = self.input_layernorm(hidden_states), guard.child(self, attention)
                x, _ = attend(hidden_states=x, **told) if by_name else attend(x, **told)
                if after_attention is not None:
                    x = guard.child(self, after_attention)(x)
                factor = None if scale is None else getattr(self, scale)
                x = x if factor is None else x * factor
                p = 0.0 if dropout is None else block.dropout_p(guard.child(self, dropout))
                y, z = sum_and_norm(x, hidden_states, middle, dropout_p=p, backend=backend(self))
                y = guard.child(self, mlp)(y)
                y = y if after_mlp is None else guard.child(self, after_mlp)(y)
                return z + (y if factor is None else y * factor)

        return Fused

    return fuse


def register_attention(
    family: str,
    known: Known,
    project: Callable[[Any, Tensor], Heads] = plain,
    options: Callable[[Any], dict[str, Any]] = lambda module: {},
    what: str = ATTENTION,
    angles: Callable[[Any, Any], Any] = lambda module, given: given,
    finish: Callable[[Any, Tensor], Tensor] = lambda module, y: module.o_proj(y),
) -> None:
    """A recipe for an attention with rotary positions.

    Args:
        family: what the recipe is called by.
        known: its code.
        project: project(module, hidden_states) -> its heads, not yet turned.
        options: options(module) -> what it calls the registry's function with, besides scaling and dropout.
        what: for the report.
        angles: angles(module, position_embeddings) gives cos and sin, or None where it turns nothing.
        finish: finish(module, y) is what it does with the heads' results side by side.
    """
    fuse = _fuse_attention(known, project, options, angles, finish)
    register_recipe(Recipe(f"{family}.attention", turns(known), fuse, what), first=False)


def layer_code(
    forward: str | tuple[str, ...],
    norm: str,
    kind: type | Mapping[str, str],
    *calls: str,
    mlp: str = "mlp",
    dropout: str | None = None,
    shares: bool = True,
) -> Known:
    """The code of a pre-norm layer, for ``register_layer``.

    Args:
        forward: its fingerprints.
        norm: the child that normalises the sum in its middle.
        kind: the class of that norm, or the fingerprints of its methods by their names.
        calls: children that it calls besides its first norm, attention and mlp.
        mlp: as in ``register_layer``.
        dropout: an nn.Dropout that runs with the sum, or None.
        shares: as Known has it.
    """
    reads: dict[str, type | str] = {} if dropout is None else {dropout: nn.Dropout}
    called = ("input_layernorm", "self_attn", mlp, *calls)
    if isinstance(kind, type):
        return Known({"forward": forward}, {norm: kind, **reads}, calls=called, shares=shares)
    code = {f"{norm}.{method}": known for method, known in kind.items()}
    return Known({"forward": forward, **code}, reads, passes=(norm,), calls=called, shares=shares)


def register_layer(
    family: str,
    known: Known,
    norm: str = "post_attention_layernorm",
    *,
    why_not: Callable[[Any], str | None] = lambda module: None,
    attention: str = "self_attn",
    mlp: str = "mlp",
    after_attention: str | None = None,
    after_mlp: str | None = None,
    dropout: str | None = None,
    scale: str | None = None,
    by_name: bool = True,
) -> None:
    """A recipe for a pre-norm layer: input_layernorm, attention, sum, norm, mlp, sum.

    Args:
        family: what the recipe is called by.
        known: its code; where it shares names with other kinds, it is tried before those that do not say so.
        norm: the child that normalises the sum, run with it in one pass.
        why_not: why_not(module) tells what of its settings keeps a known one from it, or None.
        attention: the child that attends.
        mlp: the child that takes the normalised sum.
        after_attention: a child that attention's output goes through before the sum, or None.
        after_mlp: the same of the mlp.
        dropout: an nn.Dropout of attention's output before the sum, run with it in one pass, or None.
        scale: name of a number that both branches are multiplied by before their sums, or None.
        by_name: whether its own code gives attention its hidden states by name, which is how hooks then see them.
    """

    def recognise(module: nn.Module) -> bool | str:
        answer = known.recognise(module)
        if isinstance(answer, str) and known.shares and _has_another_norm(module):
            return False
        return why_not(module) or True if answer is True else answer

    def _has_another_norm(module: nn.Module) -> bool:
        return norm in known.reads and found_class(guard.child(module, norm)) is not known.reads[norm]

    fuse = _fuse_layer(known, why_not, attention, mlp, norm, after_attention, after_mlp, dropout, scale, by_name)
    kind = "RMSNorm" if is_rms(known, norm) else "LayerNorm"
    what = f"dropout, sum and {kind} in one pass" if dropout else f"sum and {kind} in one pass"
    register_recipe(Recipe(f"{family}.layer", recognise, fuse, what, known.covers), first=known.shares)


def register_side_by_side(family: str, known: Known) -> None:
    """Lets the report say why a layer is left whose attention and mlp take the same norm: its children are fused."""
    recognise = lambda module: SIDE_BY_SIDE if known.recognise(module) is True else False  # noqa: E731
    register_recipe(Recipe(f"{family}.layer", recognise, lambda original: original, ""), first=False)
