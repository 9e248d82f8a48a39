"""Packed sequences: the tokens of a padded batch behind one another, so that nothing is computed for padding."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..mask import Mask


@dataclass(frozen=True, eq=False)
class Packed:
    """Where the tokens of a padded batch lie when they are packed; layers hand it on in place of their mask.

    Attributes:
        index: (total,) int64, the place of each token in the padded batch, b * T + t, rising.
        cu_seqlens: (B + 1,) int32, where each sequence begins among the packed tokens, and where the last one ends.
        batch: B.
        length: T, the padded length; dropout counts its rows by it, so that the padded run has the same masks.
        batch_first: whether the padded batch lies as (B, T, E), else as (T, B, E).
        sight: what a token sees of its sequence, causal or a window; None for all.
        keys: where the tokens lie that are attended to, a sequence each; None for those of the batch itself.
        longest: at least the length of the longest sequence, where that is not ``length``, or None.
    """

    index: Tensor
    cu_seqlens: Tensor
    batch: int
    length: int
    batch_first: bool = True
    sight: Mask | None = None
    keys: Packed | None = None
    longest: int | None = None

    @staticmethod
    def of(keep: Tensor, batch_first: bool = True, sight: Mask | None = None) -> Packed:
        """The packing of a batch whose tokens are where ``keep`` (B, T), bool, is True."""
        batch, length = keep.shape
        cu_seqlens = torch.nn.functional.pad(keep.sum(1).cumsum(0), (1, 0)).int()
        return Packed(keep.flatten().nonzero().squeeze(1), cu_seqlens, batch, length, batch_first, sight)

    @staticmethod
    def in_rows(starts: Tensor) -> Packed:
        """Of a batch without padding whose rows hold sequences behind one another: where ``starts`` (B, T) is True."""
        batch, length = starts.shape
        total = batch * length
        begins = torch.cat([starts.flatten().nonzero().squeeze(1), starts.new_tensor([total], dtype=torch.long)])
        longest = int(begins.diff().max())
        index = torch.arange(total, device=starts.device)
        return Packed(index, begins.int(), batch, length, longest=longest)

    def to(self, device: torch.device | str) -> Packed:
        """The same packing with its tensors on ``device``."""
        return replace(self, index=self.index.to(device), cu_seqlens=self.cu_seqlens.to(device))

    def pack(self, x: Tensor) -> Tensor:
        """(B, T, E) -> (1, total, E)."""
        x = x if self.batch_first else x.transpose(0, 1)
        return x.flatten(0, 1).index_select(0, self.index).unsqueeze(0)

    def unpack(self, x: Tensor) -> Tensor:
        """(1, total, E) -> (B, T, E), with 0 where there is padding."""
        padded = x.new_zeros(self.batch * self.length, x.shape[-1])
        padded = padded.index_copy_(0, self.index, x[0]).view(self.batch, self.length, -1)
        return padded if self.batch_first else padded.transpose(0, 1)

    @functools.cached_property
    def rows(self) -> Tensor:
        """(total,) int64, the rows of the tokens in the padded batch as it lies."""
        if self.batch_first:
            return self.index
        return self.index % self.length * self.batch + self.index // self.length

    def spread(self, x: Tensor) -> Tensor:
        """Heads as they lie in the padded batch: (1, H, total, D) -> (B, H, T, D), with 0 where there is padding."""
        x = x.squeeze(0).transpose(0, 1)
        padded = x.new_zeros(self.batch * self.length, *x.shape[1:]).index_copy(0, self.index, x)
        return padded.view(self.batch, self.length, *x.shape[1:]).transpose(1, 2)

    def padding(self) -> Tensor:
        """(B, T) bool, laid out as the padded batch: True where there is no token, and ``unpack`` gives 0."""
        hidden = self.index.new_ones(self.batch * self.length, dtype=torch.bool)
        hidden = hidden.index_fill_(0, self.index, False).view(self.batch, self.length)
        return hidden if self.batch_first else hidden.T

    def attention(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Attention within each sequence, or to that of ``keys``: (1, H, total, D) thrice -> (1, H, total, D).

        ``options`` as of ``ops.attention_varlen``; without a mask among them, it is ``sight``. With a ``bias``, which
        that does not take, (B or 1, H or 1, T, T), the padded batch attends: each sequence at the cost of T T_b.
        """
        options.setdefault("mask", self.sight)
        if options.get("bias") is not None:
            return self._padded(query, key, value, **options)
        options.pop("bias", None)
        q, k, v = (t.squeeze(0).transpose(0, 1) for t in (query, key, value))
        keys = self.keys or self
        ends, longest = (self.cu_seqlens, keys.cu_seqlens), (self.longest or self.length, keys.longest or keys.length)
        out: Any = ops.attention_varlen(q, k, v, *ends, *longest, **options)
        return out.transpose(0, 1).unsqueeze(0)

    def _padded(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask | None, **options: Any) -> Tensor:
        """``ops.attention`` of the padded batch, whose padding has to stand behind the tokens."""
        seen = Mask.lengths(self.cu_seqlens.diff())
        seen = seen if mask is None else mask & seen
        q, k, v = map(self.spread, (query, key, value))
        out: Any = ops.attention(q, k, v, seen, **options)
        return out.transpose(1, 2).flatten(0, 1).index_select(0, self.index).transpose(0, 1).unsqueeze(0)


def rows(mask: Any) -> dict[str, Any]:
    """The keyword by which dropout counts packed rows as the padded run does; none where ``mask`` is no Packed."""
    return {"dropout_rows": mask.rows} if isinstance(mask, Packed) else {}
