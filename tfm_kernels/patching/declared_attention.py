"""Attention as its declaration describes it: what it computes, in words, and by ops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..mask import Mask
from ..nn._bypass import cannot_be_kept
from . import block, guard
from .declaration import dropped, has_dropout, is_switch, number, of_one_dtype, parameters, probability
from .swap import options

MASKS = ("keep", "hide", "add", "sdpa")
AXES = ("batch", "heads", "keys")


@dataclass(frozen=True)
class DeclaredAttention:
    """The names of a class' parts and of its forward's arguments, and what it makes of them.

    Attributes:
        projections: names of the children that project queries, keys and values; queries, and keys and values; or all.
        out: name of the child that projects the result, or None.
        norm: name of the child that the one input goes through first, or None.
        heads: number of heads, or name of the attribute that holds it.
        kv_heads: the same of the keys and values; None: as many.
        arguments: names of the forward's arguments for queries, keys, values and the mask, or None for the mask.
        causal: whether a query sees no key behind it, or name of the attribute that tells.
        scale: factor of the scores, or name of the attribute that holds it, which may be a tensor; None: 1 / sqrt(D).
        dropout: name of what drops weights, or None.
        out_dropout: name of what drops elements of the result, or None.
        mask: one of MASKS.
        mask_axis: one of AXES, or None.
        weights: whether the forward gives the weights too, or "before_dropout".
        head_norms: names of what the queries and the keys of each head go through, or None.
    """

    projections: tuple[str, ...]
    out: str | None
    norm: str | None
    heads: str | int
    kv_heads: str | int | None
    arguments: tuple[str, str, str, str | None]
    causal: bool | str = False
    scale: str | float | None = None
    dropout: str | None = None
    out_dropout: str | None = None
    mask: str = "keep"
    mask_axis: str | None = None
    weights: bool | str = False
    head_norms: tuple[str | None, str | None] = (None, None)

    def formula(self) -> str:
        """What a forward is to give, in words."""
        q, k = (each if name is None else f"{name}({each})" for each, name in zip("qk", self.head_norms, strict=True))
        inner = f"softmax(scale {q} {k}^T) v" + (" of a causal mask" if self.causal else "")
        return f"{inner}, the heads side by side" if self.out is None else f"{self.out}(the heads of {inner})"

    def takes(self, module: Any, inputs: Sequence[Any], mask: Any) -> bool:
        """Whether these are what the declaration speaks of: (B, T, E), and as many queries as keys under ``causal``."""
        if not all(isinstance(t, Tensor) and not t.is_nested and t.dim() == 3 for t in inputs):
            return False
        if not (mask is None or isinstance(mask, Tensor)):
            return False
        if not of_one_dtype(inputs, (guard.child(module, name) for name in self.projections)):
            return False
        found = options(module).found
        if found is not None and found.leaves(inputs[0], mask):
            return False
        if mask is not None and mask.dim() == 3 and not self._knows_first_axis(mask, inputs[0]):
            return False
        if not all(has_dropout(module, name) for name in (self.dropout, self.out_dropout)):
            return False
        return not number(module, self.causal) or inputs[0].shape[1] == inputs[1].shape[1]

    def _knows_first_axis(self, mask: Tensor, x: Tensor) -> bool:
        """Whether a mask of three axes has the first one that ``mask_axis`` says, as far as x tells."""
        return self.mask_axis != "keys" and (self.mask_axis != "batch" or mask.shape[0] in (1, x.shape[0]))

    def run(
        self, module: Any, inputs: Sequence[Tensor], mask: Any, backend: str | None
    ) -> tuple[Tensor, Tensor | None]:
        """(result, weights), weights None where they are not declared, of what the forward takes, its mask as it is."""
        if self.norm is not None:
            inputs = [guard.child(module, self.norm)(inputs[0])] * 3
        q, k, v = self._heads(module, inputs)
        if any(self.head_norms):
            q, k = self._normed(module, (q, k), v.dtype)
        mask, bias = self._masks(module, mask, q)
        scale = number(module, self.scale)
        if isinstance(scale, Tensor):  # which may be trained, and which a graph may not read
            q, scale = q * scale.to(q.dtype), 1.0
        told: dict[str, Any] = {"bias": bias, "scale": scale, "backend": backend}
        told["dropout_p"] = p = probability(module, self.dropout)
        result, maps = None, None
        if self.weights:
            told_of_maps = {**told, "dropout_p": 0.0} if self.weights == "before_dropout" else told
            result, maps = block.attend_with_weights(q, k, v, mask, **told_of_maps)
        if result is None or (p > 0.0 and self.weights == "before_dropout"):
            result = block.attend(q, k, v, mask, **told)
        result = block.merge_heads(result)
        result = result if self.out is None else guard.child(module, self.out)(result)
        return dropped(module, self.out_dropout, result), maps

    def _heads(self, module: Any, inputs: Sequence[Tensor]) -> list[Tensor]:
        heads = number(module, self.heads)
        others = heads if self.kv_heads is None else number(module, self.kv_heads)
        layers = [guard.child(module, name) for name in self.projections]
        counts = (heads, others, others)
        projected = [layer(t) for layer, t in zip(layers, inputs, strict=False)]
        packed = counts[len(layers) - 1 :]  # what the last of them gives side by side
        width = projected[-1].shape[-1] // sum(packed)
        if len(packed) > 1:
            projected[-1:] = projected[-1].split([count * width for count in packed], dim=-1)
        return [block.split_heads(t, count) for t, count in zip(projected, counts, strict=True)]

    def _normed(self, module: Any, heads: tuple[Tensor, Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Queries and keys through the norms of each head, which may widen them: in the dtype of the values again."""
        named = zip(heads, self.head_norms, strict=True)
        return tuple((t if name is None else guard.child(module, name)(t)).to(dtype) for t, name in named)

    def _masks(self, module: Any, given: Any, query: Tensor) -> tuple[Mask | None, Tensor | None]:
        """The mask of a call, and what is added to the scores, as ops.attention takes them."""
        band = Mask.causal() if number(module, self.causal) else None
        if given is None:
            return band, None
        given = self._four_axes(given)
        if self.mask == "add" or (self.mask == "sdpa" and given.dtype != torch.bool):
            given = given.clone() if cannot_be_kept(given) else given  # where it is added, nothing keeps it
            return band, given if given.dtype == torch.float32 else given.to(query.dtype)
        keep = Mask.keep(given == 0 if self.mask == "hide" else given != 0)
        return keep if band is None else band & keep, None

    def _four_axes(self, mask: Tensor) -> Tensor:
        """A mask of a call as (B, H, Tq, Tk), axes of 1 among them."""
        axes = mask.dim()
        if axes == 2 and self.mask_axis == "keys":
            return mask[:, None, None]
        if axes == 3 and self.mask_axis == "batch":
            return mask.unsqueeze(1)
        if axes == 3 and self.mask_axis is None and mask.shape[0] != 1:
            raise ValueError(
                f"declare_attention: mask must be 2-D or 4-D, or have a first axis of 1, got {tuple(mask.shape)}: "
                "declare mask_axis='batch' or 'heads' to say what that axis is"
            )
        return mask.view(*[1] * (4 - axes), *mask.shape)


def names_of_arguments(op: str, cls: type[nn.Module], given: Any, projections: int) -> tuple[str, str, str, str | None]:
    """A forward's arguments for queries, keys, values and the mask, by which its ``projections`` are fed."""
    names = parameters(cls)
    if given is None:
        given = _guessed(op, cls, names, projections)
    if len(given) == 2:
        given = (given[0], given[0], given[0], given[1])
    if len(given) != 4 or None in given[:3] or len(set(given[projections - 1 : 3])) > 1:
        wanted = ("", "", "(queries, context, context, mask)", "(queries, keys, values, mask)")[projections]
        raise ValueError(
            f"{op}: arguments must be names {' or '.join(filter(None, ('(input, mask)', wanted)))}, got {given}"
        )
    for name in given:
        if name is not None and name not in names:
            raise ValueError(f"{op}: {cls.__name__}.forward must have an argument {name!r}, got {names}")
    return given


def _guessed(op: str, cls: type[nn.Module], names: tuple[str, ...], projections: int) -> tuple[Any, ...]:
    """The inputs are what comes before the mask, which is called so; or the first ones, and the mask is next."""
    mask = next((name for name in names if "mask" in name), None)
    if mask is not None:
        inputs = names[: names.index(mask)]
        if len(inputs) not in (1, projections):
            raise ValueError(
                f"{op}: arguments must say which of {names} {cls.__name__}.forward projects to queries, keys and "
                "values, got None"
            )
    else:
        inputs = names[: projections if len(names) >= projections else 1]
        rest = names[len(inputs) :]
        mask = rest[0] if rest and not is_switch(cls, rest[0]) else None
    return (*inputs, inputs[1], mask) if len(inputs) == 2 else (*inputs, mask)
