"""Seeing attention calls as they happen, whichever layer, patch or function makes them, without changing them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .attention_call import AttentionCall

Watcher = Callable[[AttentionCall, Tensor | None], None]
_watcher: Watcher | None = None


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Within it every attention call of the process is told to ``watcher``: the checked call, and lse where it has one.

    Compiled graphs tell nothing, and what the watcher itself calls is not told.
    """
    global _watcher
    before, _watcher = _watcher, watcher
    try:
        yield
    finally:
        _watcher = before


def is_watched() -> bool:
    """Whether calls have to be told."""
    return _watcher is not None


def tell(call: AttentionCall, lse: Tensor | None) -> None:
    """Tells the watcher, where there is one, about a call that has run."""
    global _watcher
    if torch.compiler.is_compiling() or _watcher is None:
        return
    watcher, _watcher = _watcher, None
    try:
        watcher(call, lse)
    finally:
        _watcher = watcher
