"""What decoder-only models of transformers have in common: attention with rotary positions, and a layer around it.

Rotary positions in one pass for queries and one for keys, and the residual sum in a layer's middle with the norm that
follows it. Nearly all children are called as they are, so that adapters and 8-bit layers in them keep working;
attention reaches ours through transformers' registry. llama.py, gemma.py ... say what is their family's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .. import _backend, ops
from . import block, guard, huggingface, source
from .huggingface_parts import sum_and_norm, why_not_sum_and_norm
from .known import Known
from .registry import Recipe, backend, register_recipe
from .swap import fell_back

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
NORMED = (*PROJECTIONS, "q_norm", "k_norm")
ATTENTION = "rotary positions in one pass; attention through transformers' AttentionInterface"
# apply_rotary_pos_emb of transformers 5.23 and 5.24 (source.py) that turns the first half of a head by the second: the
# whole head (Llama), a part of it (GPT-NeoX, Phi-3), the whole with the result in the dtype that came (Olmo)
_HALVES = ("137d53615941", "ac79818ce30e", "f43e6c870a47", "c98b5941dddf")
_ROTATE_HALF = "d13566b44750"  # what they call

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


def turned(module: nn.Module, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Query and key by their positions; as the model's own function does it where ops.rotary cannot."""
    if not _backend.offers("rotary") or any(cos.dtype not in (t.dtype, torch.float32) for t in (query, key)):
        return huggingface.file_of(module).apply_rotary_pos_emb(query, key, cos, sin)
    named = backend(module)  # meant for those of the fused ops that have it
    named = named if named in _backend.OPS["rotary"].support else None
    return ops.rotary(query, cos, sin, backend=named), ops.rotary(key, cos, sin, backend=named)


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
        told: what else the registry's function is called with.
    """
    if angles is not None:
        q, k = turned(self, q, k, *angles)
    if update is not None:
        k, v = update(k, v)
    dropout = self.attention_dropout if self.training else 0.0
    y, weights = huggingface.interface(self)(self, q, k, v, mask, dropout=dropout, scaling=self.scaling, **told)
    return y.reshape(*y.shape[:-2], -1), weights


def _fuse_attention(
    known: Known,
    project: Callable[[Any, Tensor], Heads],
    options: Callable[[Any], dict[str, Any]],
    turns: Callable[[Any], bool],
) -> Callable[[Any], type]:
    def fuse(original: Any) -> type:
        keyword = huggingface.cache_keyword(original)

        class Fused(original):
            def forward(
                self,
                hidden_states: Tensor,
                position_embeddings: Any = None,
                attention_mask: Any = None,
                cache: Any = None,
                **kwargs: Any,
            ) -> tuple[Tensor, Any]:
                cache = huggingface.cache_of(cache, kwargs)
                if fell_back(self, known.why_not(self)):
                    told = {keyword: cache, **kwargs}
                    return super().forward(hidden_states, position_embeddings, attention_mask, **told)

                def update(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
                    return cache.update(k, v, self.layer_idx, **({"kwargs": kwargs} if keyword == "cache" else {}))

                q, k, v = project(self, hidden_states)
                told = {**options(self), **kwargs}
                updated = None if cache is None else update
                angles = position_embeddings if turns(self) else None
                y, weights = attended(self, q, k, v, attention_mask, angles, updated, **told)
                return self.o_proj(y), weights

        return Fused

    return fuse


def _fuse_layer(
    known: Known,
    why_not: Callable[[Any], str | None],
    attention: str,
    norm: str,
    after_attention: str | None,
    after_mlp: str | None,
    dropout: str | None,
) -> Callable[[Any], type]:
    def fuse(original: Any) -> type:
        named = _named(original)

        class Fused(original):
            def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
                told = named(args, kwargs)
                middle = guard.child(self, norm)
                reason = known.why_not(self) or why_not(self) or why_not_sum_and_norm(middle, hidden_states)
                if fell_back(self, reason):
                    return super().forward(hidden_states, **told)
                x, _ = guard.child(self, attention)(hidden_states=self.input_layernorm(hidden_states), **told)
                if after_attention is not None:
                    x = guard.child(self, after_attention)(x)
                p = 0.0 if dropout is None else block.dropout_p(guard.child(self, dropout))
                y, z = sum_and_norm(x, hidden_states, middle, dropout_p=p, backend=backend(self))
                y = self.mlp(y)
                return z + (y if after_mlp is None else guard.child(self, after_mlp)(y))

        return Fused

    return fuse


def _named(original: Any) -> Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any]]:
    """How the arguments behind a layer's hidden states are told by name, defaults included."""
    parameters = list(inspect.signature(original.forward).parameters.values())[2:]
    defaults = {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    keyword = huggingface.cache_keyword(original)

    def named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        told = {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}
        if keyword in defaults:
            told[keyword] = huggingface.cache_of(told.pop(keyword), told)
        return told

    return named


def register_attention(
    family: str,
    known: Known,
    project: Callable[[Any, Tensor], Heads] = plain,
    options: Callable[[Any], dict[str, Any]] = lambda module: {},
    what: str = ATTENTION,
    turns: Callable[[Any], bool] = lambda module: True,
) -> None:
    """A recipe for an attention whose heads are turned in halves.

    Args:
        family: what the recipe is called by.
        known: its code; it has ``o_proj``.
        project: project(module, hidden_states) -> its heads, not yet turned.
        options: options(module) -> what it calls the registry's function with, besides scaling and dropout.
        what: for the report.
        turns: turns(module) tells whether it has rotary positions at all.
    """
    fuse = _fuse_attention(known, project, options, turns)
    register_recipe(Recipe(f"{family}.attention", turns_halves(known), fuse, what), first=False)


def turns_halves(known: Known) -> Callable[[nn.Module], bool]:
    """What recognises an attention of this code, in whose file rotary positions are those of ops.rotary, in halves."""

    def recognise(module: nn.Module) -> bool:
        """What is not known still has its attention as its model calls it, and is no failure."""
        if known.recognise(module) is not True:
            return False
        own = huggingface.file_of(module)
        turn, half = (source.fingerprint(getattr(own, name, len)) for name in ("apply_rotary_pos_emb", "rotate_half"))
        return turn in _HALVES and half == _ROTATE_HALF

    return recognise


def register_layer(
    family: str,
    known: Known,
    norm: str = "post_attention_layernorm",
    *,
    why_not: Callable[[Any], str | None] = lambda module: None,
    attention: str = "self_attn",
    after_attention: str | None = None,
    after_mlp: str | None = None,
    dropout: str | None = None,
) -> None:
    """A recipe for a pre-norm layer: input_layernorm, attention, sum, norm, mlp, sum.

    Args:
        family: what the recipe is called by.
        known: its code; where it shares names with other kinds, it is tried before those that do not say so.
        norm: the child that normalises the sum, run with it in one pass.
        why_not: why_not(module) tells what of its settings keeps a known one from it, or None.
        attention: the child that attends.
        after_attention: a child that attention's output goes through before the sum, or None.
        after_mlp: the same of the mlp.
        dropout: an nn.Dropout of attention's output before the sum, run with it in one pass, or None.
    """

    def recognise(module: nn.Module) -> bool | str:
        answer = known.recognise(module)
        return why_not(module) or True if answer is True else answer

    fuse = _fuse_layer(known, why_not, attention, norm, after_attention, after_mlp, dropout)
    kind = "LayerNorm" if norm in known.reads else "RMSNorm"
    what = f"dropout, sum and {kind} in one pass" if dropout else f"sum and {kind} in one pass"
    register_recipe(Recipe(f"{family}.layer", recognise, fuse, what, known.covers), first=known.shares)
