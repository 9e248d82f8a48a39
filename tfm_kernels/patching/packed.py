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
    """

    index: Tensor
    cu_seqlens: Tensor
    batch: int
    length: int

    @staticmethod
    def of(keep: Tensor) -> Packed:
        """The packing of a batch whose tokens are where ``keep`` (B, T), bool, is True."""
        batch, length = keep.shape
        cu_seqlens = torch.nn.functional.pad(keep.sum(1).cumsum(0), (1, 0)).int()
        return Packed(keep.flatten().nonzero().squeeze(1), cu_seqlens, batch, length)

    def to(self, device: torch.device | str) -> Packed:
        """The same packing with its tensors on ``device``."""
        return replace(self, index=self.index.to(device), cu_seqlens=self.cu_seqlens.to(device))

    def pack(self, x: Tensor) -> Tensor:
        """(B, T, E) -> (1, total, E)."""
        return x.reshape(self.batch * self.length, -1).index_select(0, self.index).unsqueeze(0)

    def unpack(self, x: Tensor) -> Tensor:
        """(1, total, E) -> (B, T, E), with 0 where there is padding."""
        padded = x.new_zeros(self.batch * self.length, x.shape[-1])
        return padded.index_copy_(0, self.index, x[0]).view(self.batch, self.length, -1)

    def attention(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Self-attention within each sequence: (1, H, total, D) thrice -> (1, H, total, D)."""
        q, k, v = (t.squeeze(0).transpose(0, 1) for t in (query, key, value))
        ends, longest = self.cu_seqlens, self.length
        out: Any = ops.attention_varlen(q, k, v, ends, ends, longest, longest, **options)
        return out.transpose(0, 1).unsqueeze(0)


def packing(
    stack: nn.Module,
    mask: object,
    x: Tensor,
    layers: Iterable[nn.Module],
    why_not: Callable[[Any], str | None],
    reason: str | None = None,
) -> Packed | None:
    """How the batch ``x`` (B, T, E) of a fused stack of layers runs packed, or None where it runs padded.

    Args:
        stack: the fused module; what keeps it from packing is noted for the report.
        mask: what it was given; only one that hides padding keys and nothing else can be packed.
        x: its input.
        layers: its layers; each has to be fused, and nobody may watch what goes into it and out.
        why_not: why_not(layer) tells what keeps a layer from running fused, or None.
        reason: what keeps the stack itself from it, if anything does.
    """
    if mask is None or not options(stack).packed or guard.tracing(x) or x.numel() == 0:
        return None
    keep = _key_padding(mask, *x.shape[:2])
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
        return Packed.of(keep)
    fell_back(stack, reason)
    return None


def _key_padding(mask: object, batch: int, length: int) -> Tensor | None:
    if not isinstance(mask, Mask) or mask.has_band() or mask.key_lengths is not None or mask.keep_matrix is None:
        return None
    keep = mask.keep_matrix
    return keep.view(batch, length) if keep.shape == (batch, 1, 1, length) else None
