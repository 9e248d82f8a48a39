"""What a benchmark of an op declares: its cases, its arguments, its PyTorch peer, and its physics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .shapes import Case

FORWARD, BACKWARD, BOTH = DIRECTIONS = ("forward", "backward", "both")
Eager = tuple[Callable[..., Any], dict[str, Tensor]]  # a function, and the floating tensors it takes by name


@dataclass(frozen=True)
class Subject:
    """One op stem under measurement.

    Attributes:
        stem: "attention", as in ops/attention.py.
        cases: the grid.
        arguments: (case, dtype, device) -> the public function's arguments by name, the same ones every time; large
            tensors are drawn on the device, gate.on() moves the rest.
        eager: (case, arguments) -> the plain PyTorch function a model would run today, with its own tensors.
        proof: case -> a case that takes the same branches and is small enough for a float64 judge.
        flops: (case, direction) -> floating-point operations that the result needs; hidden pairs count as none.
        bytes_moved: (case, itemsize, direction) -> bytes that must cross the memory bus: each argument and result once.
        comparable: case -> whether the eager function's results are the op's, element by element.
        rivals: the eager function -> name -> the same function by one particular way that PyTorch has of running it.
    """

    stem: str
    cases: Sequence[Any]
    arguments: Callable[..., dict[str, Any]]
    eager: Callable[[Any, Mapping[str, Any]], Eager]
    proof: Callable[[Any], Any]
    flops: Callable[[Any, str], int]
    bytes_moved: Callable[[Any, int, str], int]
    comparable: Callable[[Any], bool]
    rivals: Callable[[Callable[..., Any]], Mapping[str, Callable[..., Any]]] = lambda function: {}


@dataclass(frozen=True)
class Group:
    """One thing that all implementations are timed on, in turns: a case in a type, for inference or in training."""

    subject: Subject
    case: Case
    dtype: str
    kind: str  # "infer" or "train"

    @property
    def key(self) -> str:
        """Unique in the grid, and what pytest -k and --only search in."""
        return f"{self.case.op} {self.case.label} {self.dtype} {self.kind}"

    @property
    def directions(self) -> tuple[str, ...]:
        """What one run of the group times, in the order of its samples."""
        return (FORWARD,) if self.kind == "infer" else (BACKWARD, BOTH)


def drawer(seed: int, dtype: str, device: torch.device | str = "cpu") -> Callable[..., Tensor]:
    """(*shape, scale=1.0) -> normal numbers times scale, rounded to dtype, drawn where they will be used."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(shape, generator=generator, device=device)).to(getattr(torch, dtype))

    return draw


def groups(subject: Subject, cases: Sequence[Case] | None = None) -> list[Group]:
    """Every group of an op's grid."""
    return [
        Group(subject, case, dtype, kind)
        for case in (subject.cases if cases is None else cases)
        for dtype in case.dtypes
        for kind in case.passes
    ]
