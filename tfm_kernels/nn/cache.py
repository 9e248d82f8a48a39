"""Keys and values that attention keeps from call to call, so that decoding one more token costs one token.

A cache is handed to a stack in place of its mask, and the stack's attention modules hand it themselves. Everything else
in the layers runs as always: one code for training and for decoding. Lengths become a keep matrix once for all layers,
because every attention call looks at the values of lengths to check them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..mask import Mask
from ._projection import project


class Step(NamedTuple):
    """What ops.attention_step needs of a cache."""

    keys: Tensor  # (B, H, S, D), the memory that is there
    values: Tensor
    length: int  # how many of them are seen, a new one included
    grows: bool
    keep: Tensor | None


class AttentionCache(ABC):
    """What ``MultiheadAttention`` takes as ``attn_mask`` to be told its keys and values instead of projecting them."""

    def begin(self) -> None:  # noqa: B027  (most caches need not know)
        """Another call of an attention module begins; ``step`` and ``attended`` are about this one."""

    @abstractmethod
    def step(self, attention: Any) -> Step | None:
        """What one call of ``attention`` is, where it is a step of rows that stand at one place, else None."""

    @abstractmethod
    def attended(self, attention: Any, query: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor, Mask | None]:
        """q, k, v, all (B, H, T, D), and the mask of one call of ``attention``."""


class Reserved:
    """Keys and values (B, H, T, D) that grow in memory reserved for ``size`` positions, without being copied.

    Args:
        keys: the first keys, for their shape but T, dtype and device.
        values: the first values, likewise.
        size: how many positions there is room for.
    """

    def __init__(self, keys: Tensor, values: Tensor, size: int) -> None:
        self._stores = [t.new_zeros(*t.shape[:2], size, t.shape[3]) for t in (keys, values)]

    def write(self, keys: Tensor, values: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Puts positions behind the first ``start`` ones, and gives all up to them as views."""
        new = keys.shape[2]
        k, v = self._stores
        k.narrow(2, start, new).copy_(keys)
        v.narrow(2, start, new).copy_(values)
        return self.first(start + new)

    def step(self, start: int) -> Step:
        """The call that puts one position behind the first ``start`` ones and sees all of them."""
        k, v = self._stores
        return Step(k, v, start + 1, True, None)

    def first(self, length: int) -> tuple[Tensor, Tensor]:
        """The first ``length`` positions, as views."""
        k, v = self._stores
        return k.narrow(2, 0, length), v.narrow(2, 0, length)

    def write_rows(self, keys: Tensor, values: Tensor, rows: Tensor, at: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """Puts one position of row ``rows``[b] at ``at``[b], and gives the first ``end`` ones as views."""
        k, v = self._stores
        k[rows, :, at] = keys[:, :, 0]
        v[rows, :, at] = values[:, :, 0]
        return self.first(end)

    def expand(self, times: int) -> None:
        """Every row becomes ``times`` rows, one behind the other."""
        self._stores = [t.repeat_interleave(times, 0) for t in self._stores]

    def copy_rows(self, source: Tensor, to: Tensor, length: int) -> None:
        """Row ``to``[i] gets the first ``length`` positions that row ``source``[i] has now."""
        for store in self._stores if to.numel() else ():
            store[to, :, :length] = store[source, :, :length]


def moves(index: Tensor) -> tuple[Tensor, Tensor]:
    """(source, to): which rows have to be copied where, so that row i becomes row ``index``[i]; many stay."""
    to = (index != torch.arange(index.shape[0], device=index.device)).nonzero().squeeze(1)
    return index[to], to


class GrowingCache(AttentionCache):
    """The keys and values of a causal stack, each call adding those of its own positions behind the last ones.

    They lie in memory that is reserved at the first call: a call writes its own positions and reads the others as a
    view. All rows grow together (``lengths`` None), or each one at its own place, as after prompts of different
    lengths, which stand on the left.

    Args:
        size: how many positions there is room for.

    Attributes:
        length: how many columns are written in the longest row.
        lengths: (B,) int64, the positions of each row, None where all have ``length``.
    """

    def __init__(self, size: int) -> None:
        self.size, self.length = size, 0
        self._kept: dict[int, Reserved] = {}  # by the number of the call in its step: a module may be called twice
        self._call = 0
        self.lengths: Tensor | None = None
        self._new = 0
        self._mask: Mask | None = None
        self._rows: Tensor | None = None

    def prepare(self, new: int) -> None:
        """Tells what is the same for all layers: the next call has ``new`` positions."""
        if self.length + new > self.size:
            raise ValueError(f"GrowingCache: there is room for {self.size} positions, got {self.length + new}")
        self._new, self._call = new, 0
        if self.lengths is None:
            self._mask = Mask.causal("bottom_right") if new > 1 else None
        elif new != 1:
            raise ValueError(f"GrowingCache: rows of different lengths grow by 1 position at once, got {new}")
        else:
            columns = torch.arange(self.length + 1, device=self.lengths.device)
            self._mask = Mask.keep((columns <= self.lengths.unsqueeze(1))[:, None, None, :])
            self._rows = torch.arange(self.lengths.shape[0], device=self.lengths.device)

    def begin(self) -> None:
        """See ``AttentionCache``."""
        self._call += 1

    def advance(self) -> None:
        """What was prepared is done."""
        self.length += self._new
        if self.lengths is not None:
            self.lengths = self.lengths + self._new

    def step(self, attention: Any) -> Step | None:
        """See ``AttentionCache``."""
        kept = self._kept.get(self._call)
        return None if kept is None or self._new != 1 or self.lengths is not None else kept.step(self.length)

    def attended(self, attention: Any, query: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor, Mask | None]:
        """Projects ``query`` and adds its keys and values to those kept."""
        q, k, v = attention._project_self(query)
        kept = self._kept.get(self._call)
        if kept is None:
            self._kept[self._call] = kept = Reserved(k, v, self.size)
        if self.lengths is None:
            k, v = kept.write(k, v, self.length)
        else:
            assert self._rows is not None
            k, v = kept.write_rows(k, v, self._rows, self.lengths, self.length + 1)
        return q, k, v, self._mask

    def expand(self, times: int) -> None:
        """Every row becomes ``times`` rows, one behind the other."""
        for kept in self._kept.values():
            kept.expand(times)
        if self.lengths is not None:
            self.lengths = self.lengths.repeat_interleave(times)

    def reorder(self, index: Tensor) -> None:
        """Row i becomes what row ``index``[i] was."""
        source, to = moves(index)
        for kept in self._kept.values():
            kept.copy_rows(source, to, self.length)
        if self.lengths is not None:
            self.lengths = self.lengths[index]


class MemoryCache(AttentionCache):
    """The keys and values of an encoder's output, which cross-attention projects at its first call and keeps.

    Rows of one sentence, such as the beams of a search, share its keys and values: they count as its queries.

    Args:
        mask: what of the memory every position sees, None for everything.
    """

    def __init__(self, mask: Mask | None) -> None:
        self.mask = mask
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}  # by the id of the attention module

    def step(self, attention: Any) -> Step | None:
        """See ``AttentionCache``."""
        kept, mask = self._kept.get(id(attention)), self.mask
        if kept is None or mask is not None and mask.has_band():  # lengths became a keep matrix when kept was made
            return None
        return Step(*kept, kept[0].shape[2], False, None if mask is None else mask.keep_matrix)

    def attended(self, attention: Any, query: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor, Mask | None]:
        """Projects ``query``, and ``memory`` where that has not been done."""
        kept = self._kept.get(id(attention))
        if kept is None:
            q, k, v = attention._project(query, memory, memory, project)
            k, v = (attention._heads(t, 1).contiguous() for t in (k, v))
            self._kept[id(attention)] = kept = k, v
            if self.mask is not None and self.mask.key_lengths is not None:
                self.mask = Mask.keep(self.mask.dense(k.shape[0], 1, 1, k.shape[2]))
        else:
            q = attention._project_query(query)
        rows = kept[0].shape[0]
        return attention._heads(q.reshape(rows, -1, q.shape[-1]), 1), *kept, self.mask
