"""A progress line with the time that is left: tqdm's bar where it is installed, else plain lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


class Progress:
    """Walks over items and says how far it is.

    Args:
        items: what to walk over; its length must be known.
        name: what one item is called in the line.
    """

    def __init__(self, items: Iterable[Any], name: str) -> None:
        self.items, self.start, self.done = list(items), time.monotonic(), 0
        self.bar: Any = None
        if sys.stderr.isatty():
            try:
                from tqdm import tqdm
            except ModuleNotFoundError:
                return
            self.bar = tqdm(total=len(self.items), unit=name, smoothing=0.05, dynamic_ncols=True)

    def __iter__(self) -> Iterator[Any]:
        """The items; the line is advanced behind each."""
        for item in self.items:
            yield item
            self.done += 1
            if self.bar is not None:
                self.bar.update()
        if self.bar is not None:
            self.bar.close()

    def say(self, line: str) -> None:
        """Prints a line of output without tearing the bar."""
        if self.bar is not None:
            self.bar.write(line)
            return
        spent = time.monotonic() - self.start
        left = spent / max(self.done, 1) * (len(self.items) - self.done) if self.done else float("nan")
        note = f"{self.done + 1:4}/{len(self.items)}" + (f"  {left:4.0f} s left" if self.done else "")
        print(f"{note:24}{line}", flush=True)
