"""Padding-free execution: when a fused stack of layers runs on packed sequences."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ..mask import Mask
from ..nn.packed import Packed
from . import guard
from .swap import fell_back, is_fused, options

WATCHERS: list[Callable[[nn.Module, Packed], None]] = []  # each is told of every stack that is about to run packed


class NotPacked(Exception):
    """Raised where a call that runs packed turns out not to be one that can, before it has changed anything."""


class _Padded(threading.local):
    reason: str | None = None


_padded = _Padded()


@contextmanager
def padded(reason: str) -> Iterator[None]:
    """Within the block this thread's calls run padded, for a reason that the report tells."""
    before, _padded.reason = _padded.reason, reason
    try:
        yield
    finally:
        _padded.reason = before


def packing(
    stack: nn.Module,
    mask: object,
    x: Tensor,
    layers: Iterable[nn.Module],
    why_not: Callable[[Any], str | None],
    reason: str | None = None,
    *,
    batch_first: bool = True,
    behind: bool = False,
    in_front: bool = False,
) -> Packed | None:
    """How the batch ``x`` (B, T, E) of a fused stack of layers runs packed, or None where it runs padded.

    Args:
        stack: the fused module; what keeps it from packing is noted for the report.
        mask: what it was given; only one that hides padding keys and nothing else can be packed. A Packed tells it.
        x: its input.
        layers: its layers; each has to be fused, and nobody may watch what goes into it and out.
        why_not: why_not(layer) tells what keeps a layer from running fused, or None.
        reason: what keeps the stack itself from it, if anything does.
        batch_first: whether ``x`` lies so; else it is (T, B, E).
        behind: whether its layers ask how far tokens are apart, so that no padding may stand between them.
        in_front: whether padding may stand in front of a row's tokens, or a row have none.
    """
    if mask is None or not options(stack).packed or guard.tracing(x) or x.numel() == 0:
        return None
    batch, length = x.shape[:2] if batch_first else (x.shape[1], x.shape[0])
    keep = _key_padding(mask, batch, length)
    if isinstance(mask, Packed):
        pass
    elif not isinstance(mask, Mask):
        reason = reason or "its mask is a matrix, which may hide more than padding"
    elif keep is None:
        reason = reason or "its mask hides more than padding"
    elif not bool(keep.any() if in_front else keep[:, 0].all()):
        reason = reason or ("there are no tokens" if in_front else "a row begins with padding")
    elif behind and bool(((keep[:, 1:] & ~keep[:, :-1]).sum(1) > (~keep[:, 0]).int()).any()):
        reason = reason or "padding stands between its tokens"
    elif _padded.reason is not None:
        reason = _padded.reason
    for number, layer in enumerate(layers if reason is None else ()):
        reason = "its class is not fused" if not is_fused(layer) else why_not(layer)
        if reason is None and guard.hooked(layer):
            reason = "it has hooks"
        if reason is not None:
            reason = f"layer {number} cannot run packed: {reason}"
            break
    if reason is None:
        if isinstance(mask, Packed):
            packed = mask
        else:
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
