"""Attention as its declaration describes it: what it computes, in words, and by ops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..mask import Mask
from . import block, guard
from .declaration import is_switch, number, parameters, probability

MASKS = ("keep", "hide", "add", "sdpa")
AXES = ("batch", "heads", "keys")


@dataclass(frozen=True)
class DeclaredAttention:
    """The names of a class' parts and of its forward's arguments, and what it makes of them.

    Attributes:
        projections: names of the children that project queries, keys and values; or of the one that projects all.
        out: name of the child that projects the result, or None.
        norm: name of the child that the one input goes through first, or None.
        heads: number of heads, or name of the attribute that holds it.
        kv_heads: the same of the keys and values; None: as many.
        arguments: names of the forward's arguments for queries, keys, values and the mask, or None for the mask.
        causal: whether a query sees no key behind it.
        scale: factor of the scores, or name of the attribute that holds it; None: 1 / sqrt(D).
        dropout: name of what drops weights, or None.
        out_dropout: name of the child that drops elements of the result, or None.
        mask: one of MASKS.
        mask_axis: one of AXES, or None.
        weights: whether the forward gives the weights too.
    """

    projections: tuple[str, ...]
    out: str | None
    norm: str | None
    heads: str | int
    kv_heads: str | int | None
    arguments: tuple[str, str, str, str | None]
    causal: bool = False
    scale: str | float | None = None
    dropout: str | None = None
    out_dropout: str | None = None
    mask: str = "keep"
    mask_axis: str | None = None
    weights: bool = False

    def formula(self) -> str:
        """What a forward is to give, in words."""
        inner = "softmax(scale q k^T) v" + (" of a causal mask" if self.causal else "")
        return f"{inner}, the heads side by side" if self.out is None else f"{self.out}(the heads of {inner})"

    def takes(self, inputs: Sequence[Any], mask: Any) -> bool:
        """Whether these are what the declaration speaks of: (B, T, E), and as many queries as keys under ``causal``."""
        if not all(isinstance(t, Tensor) and t.dim() == 3 for t in inputs) or not isinstance(
            mask, (Tensor, type(None))
        ):
            return False
        return not self.causal or inputs[0].shape[1] == inputs[1].shape[1]

    def run(
        self, module: Any, inputs: Sequence[Tensor], mask: Any, backend: str | None
    ) -> tuple[Tensor, Tensor | None]:
        """(result, weights), weights None where they are not declared, of what the forward takes, its mask as it is."""
        if self.norm is not None:
            inputs = [guard.child(module, self.norm)(inputs[0])] * 3
        q, k, v = self._heads(module, inputs)
        mask, bias = self._masks(mask, q)
        told: dict[str, Any] = {"bias": bias, "scale": number(module, self.scale), "backend": backend}
        told["dropout_p"] = probability(module, self.dropout)
        maps = None
        if self.weights:
            result, maps = block.attend_with_weights(q, k, v, mask, **told)
        else:
            result = block.attend(q, k, v, mask, **told)
        result = block.merge_heads(result)
        for last in (self.out, self.out_dropout):
            if last is not None:
                result = guard.child(module, last)(result)
        return result, maps

    def _heads(self, module: Any, inputs: Sequence[Tensor]) -> list[Tensor]:
        heads = number(module, self.heads)
        others = heads if self.kv_heads is None else number(module, self.kv_heads)
        layers = [guard.child(module, name) for name in self.projections]
        if len(layers) == 1:
            projected = layers[0](inputs[0])
            width = projected.shape[-1] // (heads + 2 * others)
            parts = projected.split([heads * width, others * width, others * width], dim=-1)
        else:
            parts = tuple(layer(t) for layer, t in zip(layers, inputs, strict=True))
        return [block.split_heads(t, count) for t, count in zip(parts, (heads, others, others), strict=True)]

    def _masks(self, given: Any, query: Tensor) -> tuple[Mask | None, Tensor | None]:
        """The mask of a call, and what is added to the scores, as ops.attention takes them."""
        band = Mask.causal() if self.causal else None
        if given is None:
            return band, None
        given = self._four_axes(given)
        if self.mask == "add" or (self.mask == "sdpa" and given.dtype != torch.bool):
            return band, given if given.dtype == torch.float32 else given.to(query.dtype)
        keep = Mask.keep(given == 0 if self.mask == "hide" else given != 0)
        return keep if band is None else band & keep, None

    def _four_axes(self, mask: Tensor) -> Tensor:
        """A mask of a call as (B, H, Tq, Tk), axes of 1 among them."""
        axes = mask.dim()
        if self.mask_axis == "keys":
            if axes != 2:
                raise ValueError(
                    f"declare_attention: mask must be (B, Tk), which is what mask_axis='keys' says, got "
                    f"{tuple(mask.shape)}"
                )
            return mask[:, None, None]
        if axes == 3 and self.mask_axis == "batch":
            return mask.unsqueeze(1)
        if axes == 3 and self.mask_axis is None and mask.shape[0] != 1:
            raise ValueError(
                f"declare_attention: mask must be 2-D or 4-D, or have a first axis of 1, got {tuple(mask.shape)}: "
                "declare mask_axis='batch' or 'heads' to say what that axis is"
            )
        return mask.view(*[1] * (4 - axes), *mask.shape)


def names_of_arguments(op: str, cls: type[nn.Module], given: Any, one: bool) -> tuple[str, str, str, str | None]:
    """A forward's arguments for queries, keys, values and the mask; ``one`` has them all projected from the first."""
    names = parameters(cls)
    if given is None:
        inputs = 1 if one or len(names) < 3 else 3
        last = names[inputs] if len(names) > inputs and not is_switch(cls, names[inputs]) else None
        given = (*names[:inputs], last)
    if len(given) == 2:
        given = (given[0], given[0], given[0], given[1])
    if len(given) != 4 or None in given[:3] or (one and len(set(given[:3])) > 1):
        wanted = "(input, mask)" if one else "(input, mask) or (queries, keys, values, mask)"
        raise ValueError(f"{op}: arguments must be names {wanted}, got {given}")
    for name in given:
        if name is not None and name not in names:
            raise ValueError(f"{op}: {cls.__name__}.forward must have an argument {name!r}, got {names}")
    return given
