"""Padding-free execution: the tokens of a padded batch behind one another, so that nothing is computed for padding."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..mask import Mask
from . import guard
from .swap import fell_back, is_fused, options


@dataclass(frozen=True, eq=False)
class Packed:
    """Where the tokens of a padded batch lie when they are packed; layers hand it on in place of their mask.

    Attributes:
        index: (total,) int64, the place of each token in the padded batch, b * T + t, rising.
        cu_seqlens: (B + 1,) int32, where each sequence begins among the packed tokens, and where the last one ends.
        batch: B.
        length: T, the padded length; dropout counts its rows by it, so that the padded run has the same masks.
        batch_first: whether the padded batch lies as (B, T, E), else as (T, B, E).
    """

    index: Tensor
    cu_seqlens: Tensor
    batch: int
    length: int
    batch_first: bool = True

    @staticmethod
    def of(keep: Tensor, batch_first: bool = True) -> Packed:
        """The packing of a batch whose tokens are where ``keep`` (B, T), bool, is True."""
        batch, length = keep.shape
        cu_seqlens = torch.nn.functional.pad(keep.sum(1).cumsum(0), (1, 0)).int()
        return Packed(keep.flatten().nonzero().squeeze(1), cu_seqlens, batch, length, batch_first)

    def to(self, device: torch.device | str) -> Packed:
        """The same packing with its tensors on ``device``."""
        return replace(self, index=self.index.to(device), cu_seqlens=self.cu_seqlens.to(device))

    def pack(self, x: Tensor) -> Tensor:
        """(B, T, E) -> (1, total, E)."""
        x = x if self.batch_first else x.transpose(0, 1)
        return x.reshape(self.batch * self.length, -1).index_select(0, self.index).unsqueeze(0)

    def unpack(self, x: Tensor) -> Tensor:
        """(1, total, E) -> (B, T, E), with 0 where there is padding."""
        padded = x.new_zeros(self.batch * self.length, x.shape[-1])
        padded = padded.index_copy_(0, self.index, x[0]).view(self.batch, self.length, -1)
        return padded if self.batch_first else padded.transpose(0, 1)

    def padding(self) -> Tensor:
        """(B, T) bool, laid out as the padded batch: True where there is no token, and ``unpack`` gives 0."""
        hidden = self.index.new_ones(self.batch * self.length, dtype=torch.bool)
        hidden = hidden.index_fill_(0, self.index, False).view(self.batch, self.length)
        return hidden if self.batch_first else hidden.T

    def attention(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Self-attention within each sequence: (1, H, total, D) thrice -> (1, H, total, D)."""
        q, k, v = (t.squeeze(0).transpose(0, 1) for t in (query, key, value))
        ends, longest = self.cu_seqlens, self.length
        out: Any = ops.attention_varlen(q, k, v, ends, ends, longest, longest, **options)
        return out.transpose(0, 1).unsqueeze(0)


WATCHERS: list[Callable[[nn.Module, Packed], None]] = []  # each is told of every stack that is about to run packed


def packing(
    stack: nn.Module,
    mask: object,
    x: Tensor,
    layers: Iterable[nn.Module],
    why_not: Callable[[Any], str | None],
    reason: str | None = None,
    *,
    batch_first: bool = True,
) -> Packed | None:
    """How the batch ``x`` (B, T, E) of a fused stack of layers runs packed, or None where it runs padded.

    Args:
        stack: the fused module; what keeps it from packing is noted for the report.
        mask: what it was given; only one that hides padding keys and nothing else can be packed.
        x: its input.
        layers: its layers; each has to be fused, and nobody may watch what goes into it and out.
        why_not: why_not(layer) tells what keeps a layer from running fused, or None.
        reason: what keeps the stack itself from it, if anything does.
        batch_first: whether ``x`` lies so; else it is (T, B, E).
    """
    if mask is None or not options(stack).packed or guard.tracing(x) or x.numel() == 0:
        return None
    batch, length = x.shape[:2] if batch_first else (x.shape[1], x.shape[0])
    keep = _key_padding(mask, batch, length)
    if not isinstance(mask, Mask):
        reason = reason or "its mask is a matrix, which may hide more than padding"
    elif keep is None:
        reason = reason or "its mask hides more than padding"
    elif not bool(keep[:, 0].all()):  # also where a row has no token at all
        reason = reason or "a row begins with padding"
    for number, layer in enumerate(layers if reason is None else ()):
        reason = "its class is not fused" if not is_fused(layer) else why_not(layer)
        if reason is None and guard.hooked(layer):
            reason = "it has hooks"
        if reason is not None:
            reason = f"layer {number} cannot run packed: {reason}"
            break
    if reason is None:
        assert keep is not None
        packed = Packed.of(keep, batch_first)
        for watcher in WATCHERS:
            watcher(stack, packed)
        return packed
    fell_back(stack, reason)
    return None


def _key_padding(mask: object, batch: int, length: int) -> Tensor | None:
    if not isinstance(mask, Mask) or mask.has_band() or mask.key_lengths is not None or mask.keep_matrix is None:
        return None
    keep = mask.keep_matrix
    return keep.view(batch, length) if keep.shape == (batch, 1, 1, length) else None
