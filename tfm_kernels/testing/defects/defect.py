"""What a planted defect is, and the wrong steps that several ops share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..emulations import Emulation, Hook

NARROW = (torch.bfloat16, torch.float16)
ALL = (*NARROW, torch.float32)
Inputs = dict[str, Any]
Build = Callable[[torch.dtype], Inputs]


@dataclass(frozen=True)
class Defect:
    """One mistake.

    Attributes:
        name: what the wrong kernel does.
        op: the public function it is planted in.
        build: dtype -> inputs on which it must be caught.
        hooks: step of the emulation -> what the wrong kernel has there.
        dtypes: the storage types it can occur in.
        tile: the tile size of the emulation; small tiles make errors that grow with their number.
    """

    name: str
    op: str
    build: Build
    hooks: Mapping[str, Hook]
    dtypes: tuple[torch.dtype, ...] = ALL
    tile: int = 64


def planter(op: str) -> Callable[..., Defect]:
    """plant(name, build, step, hook, dtypes=ALL) -> the defect of ``op`` that has ``hook`` at this one step."""

    def plant(name: str, build: Build, step: str, hook: Hook, dtypes: tuple[torch.dtype, ...] = ALL) -> Defect:
        return Defect(name, op, build, {step: hook}, dtypes)

    return plant


def truncated(t: Tensor, run: Emulation) -> Tensor:
    """Rounded to the storage type toward zero, as a shift of the bits does."""
    rounded = t.to(run.dtype)
    toward_zero = torch.nextafter(rounded, torch.zeros_like(rounded))
    return torch.where(rounded.to(t.dtype).abs() > t.abs(), toward_zero, rounded)


def in_16_bits(t: Tensor, run: Emulation) -> Tensor:
    """A sum or statistic kept in the storage type (in bfloat16 for float32)."""
    return t.to(run.dtype if run.dtype != torch.float32 else torch.bfloat16).to(t.dtype)


def in_type(dtype: torch.dtype) -> Hook:
    """Rounded to ``dtype``."""
    return lambda t, run: t.to(dtype).to(t.dtype)


def in_tf32(t: Tensor, run: Emulation) -> Tensor:
    """Rounded to tf32's ten bits of mantissa."""
    return ((t.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def times(factor: float) -> Hook:
    """A wrong factor."""
    return lambda t, run: t * factor


def missing(t: Any, run: Emulation) -> None:
    """Not there at all."""
    return None


def one(t: Any, run: Emulation) -> Any:
    """A factor that was forgotten."""
    return torch.ones_like(t) if isinstance(t, Tensor) else 1.0


def lost_in_last_tile(t: Tensor, run: Emulation) -> Tensor:
    """Present in all tiles but the last."""
    return t * 0 if run.index == run.last else t


def only_last_tile(t: Tensor, run: Emulation) -> Tensor:
    """Overwritten by each tile where it had to be summed."""
    return t if run.index == run.last else t * 0


def neighbour(t: Tensor, run: Emulation) -> Tensor:
    """The dropout mask of the neighbouring column."""
    return torch.roll(t, 1, -1)
