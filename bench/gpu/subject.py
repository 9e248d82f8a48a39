"""What an op declares to be proven and timed on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tfm_kernels.bench.subject import Group, Subject
from tfm_kernels.testing import invariance

from .item import Item

Inputs = Mapping[str, Any]


def nan_stays_in_its_row(
    branches: Callable[[str], Mapping[str, tuple[str, Inputs]]], op: str, backend: str, device: str
) -> None:
    """A check of all branches of an op: a GPU's minimum and maximum drop NaN, which no other machine here shows."""
    calls = [inputs for name, inputs in branches(device).values() if name == op]
    assert calls, f"no branch calls {op}"
    for inputs in calls:
        invariance.assert_nan_stays_in_its_row(op, inputs, backend)


@dataclass(frozen=True)
class GpuSubject:
    """One op stem on one backend.

    Attributes:
        stem: "layer_norm", as in ops/layer_norm.py.
        backend: the backend that is named in every call; nothing falls back.
        cases: () -> the contract's cases (tests/cases.py's Case), those that reach every launch among them.
        checks: name -> function(device) that raises AssertionError where an exact rule is broken, such as dropout's.
        branches: (device) -> name -> (op, inputs): the smallest call of each branch of the kernels.
        large: name -> function(device) that raises AssertionError where a call of more than 2**31 elements is wrong.
        speed: what is timed: cases, physics and PyTorch peers.
        predicted: (group, direction, limits) -> seconds that the kernel should take, said before it is measured.
    """

    stem: str
    backend: str
    cases: Callable[[], Sequence[Any]]
    checks: Mapping[str, Callable[[str], None]]
    branches: Callable[[str], Mapping[str, tuple[str, Inputs]]]
    large: Mapping[str, Callable[[str], None]]
    speed: Subject
    predicted: Callable[[Group, str, Mapping[str, Any]], float]

    def item(self, name: str, run: Callable[[], dict[str, Any]], op: str = "", heavy: bool = False) -> Item:
        """One thing to find out about it; op: the public function, "" for all of them."""
        return Item(f"{self.backend} {name}", run, op, self.stem, self.backend, heavy)
