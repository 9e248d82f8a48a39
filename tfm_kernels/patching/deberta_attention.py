"""Disentangled attention of DeBERTa-v2: scores of content and content, and of content and distance, the latter a bias.

    x_ij = (q_i . k_j + q_i . u_c(i,j) + k_j . w_d(j,i)) / s         s^2 = D (1 + how many of the last two there are)

u and w are projections of one table of distances, c and d the rows of it that the model chose for a pair of tokens. Of
the table only the rows that a batch has distances of are projected; the bias is made of a few rows of the batch at a
time, which stay in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..mask import Mask
from ..nn.packed import Packed
from . import block, guard
from .linear import linear

KINDS = ("c2p", "p2c")
_CACHED = 1 << 20  # scores that are made at a time


@dataclass(frozen=True)
class Window:
    """Which rows of the table the distances between the first tokens of a row choose.

    Attributes:
        low, high: the rows from ``low`` on and before ``high`` are enough.
        c2p: (L, L) int64, for query i and key j, counted from ``low``.
        p2c: the same for key i and query j.
    """

    low: int
    high: int
    c2p: Tensor
    p2c: Tensor


@dataclass(frozen=True, eq=False)
class Places:
    """Where tokens stand to each other: (1, T, T) int64, as the encoder makes it for all its layers."""

    relative: Tensor
    _found: dict[tuple[int, int], Window] = field(default_factory=dict)

    def window(self, length: int, span: int) -> Window:
        """That of rows of ``length`` tokens, of a table of ``2 * span`` rows."""
        if (length, span) not in self._found:
            self._found[length, span] = self._window(length, span)
        return self._found[length, span]

    def _window(self, length: int, span: int) -> Window:
        relative = self.relative[0, :length, :length]
        c2p, p2c = (torch.clamp(each + span, 0, 2 * span - 1) for each in (relative, -relative))
        if not _may_be_read(relative) or length == 0:
            return Window(0, 2 * span, c2p, p2c)
        low, high = min(int(c2p.min()), int(p2c.min())), max(int(c2p.max()), int(p2c.max())) + 1
        return Window(low, high, c2p - low, p2c - low)


@dataclass(frozen=True, eq=False)
class Distances:
    """What one layer's queries and keys are multiplied by for the distances of a batch.

    Attributes:
        places: where its tokens stand.
        span: half of the table's rows.
        low: the row of the table that the first of ``keys`` and ``queries`` is of.
        keys: (H, D, R), u of (R) rows; None without c2p.
        queries: (H, D, R), w, over s; None without p2c.
    """

    places: Places
    span: int
    low: int
    keys: Tensor | None
    queries: Tensor | None

    @staticmethod
    def of(attention: Any, places: Places, table: Tensor, scale: Tensor) -> Distances:
        """Those of a layer's attention, whose dropout ``table`` went through."""
        span, heads = attention.pos_ebd_size, attention.num_attention_heads
        window = places.window(places.relative.shape[-1], span)
        rows = table[window.low : window.high]

        def projected(kind: str, shared: Any, own: str) -> Tensor | None:
            if kind not in attention.pos_att_type:
                return None
            y = linear(rows, shared) if attention.share_att_key else getattr(attention, own)(rows)
            return block.split_heads(y, heads).transpose(-1, -2)

        keys = projected("c2p", attention.key_proj, "pos_key_proj")
        queries = projected("p2c", attention.query_proj, "pos_query_proj")
        return Distances(places, span, window.low, keys, None if queries is None else queries / scale)

    def bias(self, query: Tensor, key: Tensor) -> Tensor:
        """(B, H, L, L) for (B, H, L, D) twice, the first tokens of each row; of a ``query`` over s."""
        window = self.places.window(query.shape[-2], self.span)
        columns = slice(window.low - self.low, window.high - self.low)
        c2p = None if self.keys is None else _chosen(query, self.keys[..., columns], window.c2p)
        if self.queries is None:
            assert c2p is not None
            return c2p
        p2c = _chosen(key, self.queries[..., columns], window.p2c).transpose(-1, -2)
        return p2c if c2p is None else c2p + p2c


def _chosen(x: Tensor, of_distances: Tensor, index: Tensor) -> Tensor:
    return torch.gather(torch.matmul(x, of_distances), -1, index.expand(*x.shape[:2], -1, -1))


def _may_be_read(x: Tensor) -> bool:
    return x.device.type == "cpu" and not guard.tracing(x)


def self_attention(
    attention: Any, x: Tensor, mask: Any, places: Places | None, table: Tensor | None, backend: str | None
) -> Tensor:
    """The heads' results side by side, of a padded batch (B, T, E) or a packed one.

    Args:
        attention: the module.
        x: what it is given.
        mask: a Packed, or who sees whom, (B, 1, T, T): a row that sees no key weighs all alike.
        places: where tokens stand; None where its attention does not ask.
        table: the rows of distances, or None.
        backend: of the ops.
    """
    projections = (attention.query_proj, attention.key_proj, attention.value_proj)
    query, key, value = (block.split_heads(linear(x, each), attention.num_attention_heads) for each in projections)
    terms = 1 + sum(kind in attention.pos_att_type for kind in KINDS)
    scale = torch.sqrt(torch.tensor(query.shape[-1], dtype=torch.float) * terms).to(query.dtype)
    distances = None
    if attention.relative_attention and places is not None:
        table = attention.pos_dropout(table)
        distances = Distances.of(attention, places, table, scale) if terms > 1 else None
    each, p = (query / scale, key, value), block.dropout_p(attention.dropout)
    told: dict[str, Any] = {"scale": 1.0, "backend": backend}
    if not isinstance(mask, Packed):
        return _padded(*each, distances, p, told, hidden=_hidden(mask))
    if distances is None:
        return block.merge_heads(mask.attention(*each, dropout_p=p, **told))
    return _packed(*each, mask, distances, p, told)


def _hidden(mask: Tensor) -> Tensor | None:
    """True where a mask hides a pair; None where it is seen to hide none."""
    seen = mask.bool()
    return None if _may_be_read(seen) and bool(seen.all()) else ~seen


def _packed(q: Tensor, k: Tensor, v: Tensor, packed: Packed, distances: Distances, p: float, told: Any) -> Tensor:
    """Sequence after sequence; as a padded batch where dropout counts by it, or where they are too small to gain."""
    heads = q.shape[1]
    if p > 0.0 or q.device.type != "cpu" or packed.batch * heads * packed.length**2 <= _CACHED:
        q, k, v = (block.split_heads(packed.unpack(block.merge_heads(t)), heads) for t in (q, k, v))
        seen = Mask.lengths(packed.cu_seqlens.diff())
        return packed.pack(_padded(q, k, v, distances, p, told, seen=seen))
    lengths = packed.cu_seqlens.diff().tolist()
    parts = zip(*(t.split(lengths, -2) for t in (q, k, v)), strict=True)
    return torch.cat([_attend(q, k, v, None, distances.bias(q, k), 0.0, told) for q, k, v in parts], 1)


def _padded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    distances: Distances | None,
    p: float,
    told: Any,
    *,
    hidden: Tensor | None = None,
    seen: Mask | None = None,
) -> Tensor:
    """A few rows of the batch at a time. ``hidden`` pairs count where a row has no other; ``seen`` leaves them out."""
    batch, heads, length, _ = q.shape
    if hidden is not None:
        hidden = hidden.expand(batch, -1, length, length)
        # a row that sees no key weighs all alike, whatever its scores are, and no gradient comes back by them
        q = q.masked_fill(hidden.all(-1, keepdim=True), 0.0)
    some = max(1, _CACHED // max(heads * length**2, 1)) if _may_be_read(q) else max(batch, 1)
    parts = list(zip(q.split(some), k.split(some), v.split(some), strict=True))
    hides = [None] * len(parts) if hidden is None else hidden.split(some)
    biases = (_bias(q, k, distances, hides) for (q, k, _), hides in zip(parts, hides, strict=True))
    if len(parts) == 1:
        return _attend(q, k, v, seen, next(biases), p, told)
    if p == 0.0 and seen is None:
        return torch.cat([_attend(*part, None, bias, p, told) for part, bias in zip(parts, biases, strict=True)])
    made = [bias for bias in biases if bias is not None]
    return _attend(q, k, v, seen, torch.cat(made) if made else None, p, told)


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Mask | None, bias: Any, p: float, told: Any) -> Tensor:
    return block.merge_heads(block.attend(q, k, v, seen, bias=bias, dropout_p=p, **told))


def _bias(q: Tensor, k: Tensor, distances: Distances | None, hidden: Tensor | None) -> Tensor | None:
    """What is added to the scores; half of the lowest number hides, as kernels may take scores times log2(e)."""
    if hidden is None:
        return None if distances is None else distances.bias(q, k)
    bias = q.new_zeros(hidden.shape) if distances is None else distances.bias(q, k)
    return bias.masked_fill(hidden, torch.finfo(bias.dtype).min / 2)
