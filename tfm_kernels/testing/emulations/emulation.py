"""One run of an emulated algorithm: how it rounds, in what tiles, and where a defect may be planted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

Hook = Callable[[Any, "Emulation"], Any]
Results = tuple[dict[str, Tensor], dict[str, Tensor | None]]


class Emulation:
    """One run of an algorithm.

    Attributes:
        dtype: the storage type.
        tile: how many keys (hidden columns, classes, rows) are taken at a time.
        lazy: sums under a running maximum are rescaled only where it has grown by more than 8 powers of two; ffn keeps
            its hidden activation and linear_cross_entropy the logits' gradient in float32; operands of bfloat16
            products that are subnormal count as 0.
        index: the number of the tile at work, and ``last`` that of the last one.
        backward: whether the backward is at work.
        context: intermediate values by name, for planted defects to build theirs from.
    """

    def __init__(self, dtype: torch.dtype, tile: int = 64, lazy: bool = False, hooks: Mapping[str, Hook] | None = None):
        self.dtype, self.tile, self.lazy, self.hooks = dtype, tile, lazy, hooks or {}
        self.wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.index = self.last = 0
        self.backward = False
        self.context: dict[str, Any] = {}

    def step(self, name: str, value: Any) -> Any:
        """``value``, or what a planted defect makes of it."""
        return self.hooks[name](value, self) if name in self.hooks else value

    def low(self, t: Tensor) -> Tensor:
        """An operand rounded to the storage type between two products."""
        return self.read(self.hooks["low"](t, self) if "low" in self.hooks else t.to(self.dtype))

    def read(self, t: Tensor) -> Tensor:
        """A stored operand of a product, in the type of the sums."""
        flushes = self.lazy and t.dtype == torch.bfloat16
        return (torch.where(t.abs() < torch.finfo(t.dtype).tiny, 0, t) if flushes else t).to(self.wide)

    def store(self, t: Tensor, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A result rounded once, at the store."""
        t = self.step(name, t)
        return self.hooks["store"](t, self) if "store" in self.hooks else t.to(dtype or self.dtype)

    def up(self, t: Tensor | None) -> Tensor | None:
        """A stored tensor widened to the type of the sums."""
        return None if t is None else t.to(self.wide)

    def tiles(self, length: int) -> Iterator[slice]:
        """The tiles of an axis, counted in ``index``."""
        slices = [slice(start, min(start + self.tile, length)) for start in range(0, length, self.tile)]
        self.last = len(slices) - 1
        for index, tile in enumerate(self.step("tiles", slices)):
            self.index = index
            yield tile
