"""One thing that a proof finds out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Item:
    """One thing to find out.

    Attributes:
        key: its name, unique in the part; a resumed run skips the keys that the file holds.
        run: returns what to record of it, with "state" UNAVAILABLE where it cannot be found out here. What it raises
            makes it red.
        op: the public function that it judges, "" for none or all of its stem.
        stem: of the op.
        backend: that it judges.
        heavy: whether it fills so much of the GPU's memory that no second such one may run beside it.
    """

    key: str
    run: Callable[[], dict[str, Any]]
    op: str = ""
    stem: str = ""
    backend: str = ""
    heavy: bool = False

    @property
    def name(self) -> dict[str, str]:
        """What its record begins with."""
        return {"key": self.key, "op": self.op, "stem": self.stem, "backend": self.backend}
