"""Padding: where it lies in a batch of token numbers, said once for a whole model."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import _check
from ..mask import Mask


class Padding(NamedTuple):
    """Which keys of a batch are padding, and which position each token has.

    Attributes:
        mask: hides the padding from every query; None where there is none.
        positions: (B, T) int64, how many tokens stand before each one, and the column of padding; None where that is
            the column of all. So what is looked at and what is not gives one result, at padding too.
        keep: (B, T) bool, True at tokens; None where all are tokens.
    """

    mask: Mask | None = None
    positions: Tensor | None = None
    keep: Tensor | None = None

    def behind(self) -> Tensor | None:
        """(B, T) bool, as ``keep``, where padding is known to stand behind one token or more in each row; else None."""
        if self.keep is None or self.positions is not None or not bool(self.keep[:, 0].all()):
            return None
        return self.keep

    def cleared(self, x: Tensor, columns: Tensor | None = None) -> Tensor:
        """``x`` (B, C, E) with 0 behind the last token of each row, but for the first position of all.

        ``columns`` (B, C), or (T,) for all, is where in its row each position stands.
        """
        if self.mask is None or self.mask.key_lengths is None:
            return x
        columns = torch.arange(x.shape[1], device=x.device) if columns is None else columns
        return x.masked_fill((columns >= self.mask.key_lengths.clamp(min=1).unsqueeze(1)).unsqueeze(-1), 0.0)

    def hidden_from(self, sight: Mask | None) -> Mask | None:
        """``sight`` without the padding."""
        if sight is None or self.mask is None:
            return self.mask if sight is None else sight
        return sight & self.mask


def padding(ids: Tensor, pad_id: int | None) -> Padding:
    """Finds the padding in ``ids`` (B, T).

    Padding may stand anywhere. Positions count tokens, so that where a row's padding stands changes nothing. Where
    the values may be looked at (in host memory, with no graph being made), a batch without padding costs no mask, and
    one that is padded on the right only key lengths. Elsewhere nothing is looked at, so that no device waits and no
    graph depends on the data, and every case is covered at once.
    """
    if pad_id is None:
        return Padding()
    keep = ids != pad_id
    if readable(ids):
        if bool(keep.all()):
            return Padding()
        lengths = keep.sum(1)
        if torch.equal(keep, torch.arange(ids.shape[1]) < lengths.unsqueeze(1)):
            return Padding(Mask.lengths(lengths), None, keep)
    columns = torch.arange(1, ids.shape[1] + 1, device=ids.device)
    last = (keep * columns).amax(1)  # the kernels read no further than the last token
    mask = Mask.lengths(last) & Mask.keep(keep[:, None, None, :])
    return Padding(mask, torch.where(keep, keep.cumsum(1), columns) - 1, keep)


def readable(ids: Tensor) -> bool:
    """Whether a tensor's values may be looked at: in host memory, and no graph is being made."""
    making = torch.compiler.is_compiling() or torch.jit.is_tracing()
    return type(ids) is Tensor and ids.device.type == "cpu" and not making


def check_ids(op: str, name: str, ids: Tensor, vocab: int, max_length: int) -> None:
    """Refuses anything but (B, T) token numbers of a vocabulary; values are looked at where that is free."""
    _check.tensor(op, name, ids)
    if ids.dtype not in (torch.int32, torch.int64) or ids.dim() != 2:
        raise ValueError(
            f"{op}: {name} must be an int32 or int64 tensor of shape (B, T), got {_check.dtype_name(ids)} of shape "
            f"{tuple(ids.shape)}"
        )
    length = ids.shape[1]
    if not 0 < length <= max_length:
        raise ValueError(f"{op}: {name} must have 1 to {max_length} positions, max_length, got {length}")
    if readable(ids) and ids.numel():
        low, high = torch.aminmax(ids)
        if low < 0 or high >= vocab:
            raise ValueError(
                f"{op}: {name} must hold token numbers in [0, {vocab}), got values from {int(low)} to {int(high)}"
            )
