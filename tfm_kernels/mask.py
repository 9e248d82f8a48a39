"""Mask: who may look at whom, as data that kernels read. ``dense()`` defines its meaning.

A Mask is the intersection of up to four conditions, each absent by default:

* a band: ``left``/``right`` limits on j - i, measured from the top-left or the bottom-right corner (causal, window);
* key lengths: j < key_lengths[b];
* a keep matrix: keep_matrix[b, h, i, j] is True.

True always means "may attend".
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Integral
from typing import NamedTuple

import torch
from torch import Tensor

ALIGNMENTS = ("top_left", "bottom_right")
UNBOUNDED = 1 << 40  # a limit no pair of positions reaches


class Band(NamedTuple):  # as a dataclass, torch.compile could not trace it as a default of Mask
    """low <= j - i <= high, where i is counted from the top-left or the bottom-right corner of (Tq, Tk)."""

    low: int = -UNBOUNDED
    high: int = UNBOUNDED

    def __and__(self, other: Band) -> Band:
        """The pairs that lie in both bands."""
        return Band(max(self.low, other.low), min(self.high, other.high))

    def shifted(self, by: int) -> Band:
        """The same band with i counted from a corner that lies ``by`` further right."""
        return Band(self.low + by, self.high + by)


_EVERYWHERE = Band()


@dataclass(frozen=True, eq=False)
class Mask:
    """Which query may attend to which key; combine masks with ``&``.

    Build one with ``Mask.causal``, ``Mask.window``, ``Mask.lengths``, ``Mask.keep`` or ``Mask.hide``; the constructor
    itself is for kernels and tests.

    Attributes:
        top_left: band measured with query i at key i.
        bottom_right: band measured with the last query at the last key, so query i at key i + Tk - Tq.
        key_lengths: (B,) int32 or int64, or None: keys j >= key_lengths[b] are hidden.
        keep_matrix: 4-D bool that broadcasts to (B, H, Tq, Tk), or None.

    Example:
        >>> mask = Mask.causal() & Mask.lengths(torch.tensor([3, 5]))
        >>> mask.dense(2, 1, 5, 5).shape
        torch.Size([2, 1, 5, 5])
    """

    top_left: Band = _EVERYWHERE
    bottom_right: Band = _EVERYWHERE
    key_lengths: Tensor | None = None
    keep_matrix: Tensor | None = None

    @staticmethod
    def causal(align: str = "top_left") -> Mask:
        """Hides the future.

        Args:
            align: "top_left": query i sees keys j <= i. "bottom_right": the last query sees all keys, so query i sees
                j <= i + Tk - Tq. They differ only where Tq != Tk.

        Raises:
            ValueError: ``align`` is neither.
        """
        return _band(Band(high=0), align, "Mask.causal")

    @staticmethod
    def window(left: int | None, right: int | None, align: str = "top_left") -> Mask:
        """Shows each query only the keys around it: i - left <= j <= i + right, both ends included.

        Args:
            left: how far back, in positions; None is unbounded.
            right: how far ahead, in positions; None is unbounded.
            align: the corner that i is counted from, as for ``causal``. Key lengths never shift it.

        Raises:
            TypeError: a limit is neither an int nor None.
            ValueError: a limit is negative, or ``align`` is unknown.
        """
        for name, limit in (("left", left), ("right", right)):
            if limit is not None and (isinstance(limit, bool) or not isinstance(limit, Integral)):
                raise TypeError(f"Mask.window: {name} must be an int or None, got {type(limit).__name__}")
            if limit is not None and limit < 0:
                raise ValueError(f"Mask.window: {name} must be >= 0 or None for unbounded, got {limit}")
        band = Band(
            -UNBOUNDED if left is None else -min(int(left), UNBOUNDED),
            UNBOUNDED if right is None else min(int(right), UNBOUNDED),
        )
        return _band(band, align, "Mask.window")

    @staticmethod
    def lengths(key_lengths: Tensor) -> Mask:
        """Hides the padding behind each sequence: key j of batch b is seen where j < key_lengths[b].

        Args:
            key_lengths: (B,) int32 or int64, values in [0, Tk].

        Raises:
            TypeError: not a tensor.
            ValueError: not one-dimensional, not an integer dtype.
        """
        if not isinstance(key_lengths, Tensor):
            raise TypeError(f"Mask.lengths: key_lengths must be a tensor, got {type(key_lengths).__name__}")
        if key_lengths.dtype not in (torch.int32, torch.int64) or key_lengths.dim() != 1:
            raise ValueError(
                "Mask.lengths: key_lengths must be an int32 or int64 tensor of shape (B,), got "
                f"{str(key_lengths.dtype).removeprefix('torch.')} of shape {tuple(key_lengths.shape)}"
            )
        return Mask(key_lengths=key_lengths)

    @staticmethod
    def keep(matrix: Tensor) -> Mask:
        """Shows exactly the pairs where ``matrix`` is True.

        Args:
            matrix: bool, (Tq, Tk), (B, 1, 1, Tk), (B, 1, Tq, Tk), (B, H, Tq, Tk), or these with size-1 axes.

        Raises:
            TypeError: not a tensor.
            ValueError: not bool, or of another number of dimensions.
        """
        return Mask(keep_matrix=_matrix(matrix, "Mask.keep"))

    @staticmethod
    def hide(matrix: Tensor) -> Mask:
        """Hides exactly the pairs where ``matrix`` is True: ``Mask.keep(~matrix)``, with the same shapes and errors."""
        return Mask(keep_matrix=~_matrix(matrix, "Mask.hide"))

    def __and__(self, other: Mask) -> Mask:
        """The pairs that both masks show; lengths and matrices that do not broadcast raise ValueError."""
        if not isinstance(other, Mask):
            return NotImplemented
        lengths = _both("key_lengths", self.key_lengths, other.key_lengths, torch.minimum)
        keep = _both("keep_matrix", self.keep_matrix, other.keep_matrix, torch.logical_and)
        return Mask(self.top_left & other.top_left, self.bottom_right & other.bottom_right, lengths, keep)

    def band(self, queries: int, keys: int) -> Band:
        """Both bands as one, measured from the top-left corner of a (queries, keys) matrix."""
        if self.bottom_right == _EVERYWHERE:
            return self.top_left
        return self.top_left & self.bottom_right.shifted(keys - queries)

    def has_band(self) -> bool:
        """Whether position alone hides anything."""
        return self.top_left != _EVERYWHERE or self.bottom_right != _EVERYWHERE

    def hides(self) -> bool:
        """Whether there is any condition."""
        return self.key_lengths is not None or self.keep_matrix is not None or self.has_band()

    def to(self, device: torch.device | str) -> Mask:
        """The same mask with its tensors on ``device``."""
        move = lambda t: None if t is None else t.to(device)  # noqa: E731
        return replace(self, key_lengths=move(self.key_lengths), keep_matrix=move(self.keep_matrix))

    def dense(
        self, batch: int, heads: int, queries: int, keys: int, device: torch.device | str | None = None
    ) -> Tensor:
        """The mask written out: the definition of what it means.

        Args:
            batch: B.
            heads: H, the number of query heads.
            queries: Tq.
            keys: Tk.
            device: where to, by default where the mask's tensors are, else the CPU.

        Returns:
            (B, H, Tq, Tk) bool, True = may attend; may be an expanded view.
        """
        if device is None:
            tensor = self.keep_matrix if self.keep_matrix is not None else self.key_lengths
            device = "cpu" if tensor is None else tensor.device
        i = torch.arange(queries, device=device).unsqueeze(1)
        j = torch.arange(keys, device=device).unsqueeze(0)
        band = self.band(queries, keys)
        attend = ((j - i >= band.low) & (j - i <= band.high)).view(1, 1, queries, keys)
        if self.key_lengths is not None:
            attend = attend & (j < self.key_lengths.to(device).unsqueeze(1)).view(self.key_lengths.shape[0], 1, 1, keys)
        if self.keep_matrix is not None:
            attend = attend & self.keep_matrix.to(device)
        return attend.expand(batch, heads, queries, keys)

    def visible(self, queries: int, keys: int, device: torch.device | str, bias: Tensor | None = None) -> Tensor | None:
        """``dense()`` in the smallest shape that broadcasts to (B, H, Tq, Tk), None where nothing is hidden.

        A 4-D ``bias`` hides with -inf.
        """
        parts = []
        if self.has_band():
            parts.append(Mask(self.top_left, self.bottom_right).dense(1, 1, queries, keys, device))
        if self.key_lengths is not None:
            parts.append(Mask(key_lengths=self.key_lengths).dense(self.key_lengths.shape[0], 1, 1, keys, device))
        if self.keep_matrix is not None:
            parts.append(self.keep_matrix)
        if bias is not None:
            parts.append(bias != -torch.inf)
        return functools.reduce(torch.logical_and, parts) if parts else None

    def explain(self) -> str:
        """The mask in words, one line."""
        parts = []
        for band, corner in ((self.top_left, "top-left"), (self.bottom_right, "bottom-right")):
            if band != _EVERYWHERE:
                low = "-inf" if band.low <= -UNBOUNDED else str(band.low)
                high = "+inf" if band.high >= UNBOUNDED else str(band.high)
                parts.append(f"{low} <= j - i <= {high} from the {corner} corner")
        if self.key_lengths is not None:
            parts.append(f"j < key_lengths[b] for {self.key_lengths.shape[0]} sequences")
        if self.keep_matrix is not None:
            parts.append(f"keep matrix of shape {tuple(self.keep_matrix.shape)}")
        return "query i attends to key j where " + " and ".join(parts) if parts else "every query attends to every key"


def _both(name: str, a: Tensor | None, b: Tensor | None, join: Callable[[Tensor, Tensor], Tensor]) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    if any(one not in (1, other) and other != 1 for one, other in zip(a.shape, b.shape, strict=True)):
        raise ValueError(
            f"Mask: {name} of masks that are combined must broadcast, got {tuple(a.shape)} and {tuple(b.shape)}"
        )
    return join(a, b)


def _band(band: Band, align: str, op: str) -> Mask:
    if align not in ALIGNMENTS:
        raise ValueError(f"{op}: align must be one of {', '.join(ALIGNMENTS)}, got {align!r}")
    return Mask(top_left=band) if align == "top_left" else Mask(bottom_right=band)


def _matrix(matrix: Tensor, op: str) -> Tensor:
    if not isinstance(matrix, Tensor):
        raise TypeError(f"{op}: matrix must be a tensor, got {type(matrix).__name__}")
    if matrix.dtype != torch.bool:
        raise ValueError(f"{op}: matrix must be bool, got {str(matrix.dtype).removeprefix('torch.')}")
    if matrix.dim() == 3:
        raise ValueError(
            f"{op}: matrix of shape {tuple(matrix.shape)} is ambiguous; write (B, 1, Tq, Tk) with .unsqueeze(1), or "
            "(1, H, Tq, Tk) with .unsqueeze(0)"
        )
    if matrix.dim() not in (2, 4):
        raise ValueError(f"{op}: matrix must have 2 or 4 dimensions, got shape {tuple(matrix.shape)}")
    return matrix if matrix.dim() == 4 else matrix.view(1, 1, *matrix.shape)
