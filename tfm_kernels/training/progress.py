"""How far a run is: a bar where tqdm is installed, else a line now and then."""

from __future__ import annotations

import sys
import time
from typing import Any


class Progress:
    """Shows steps on stderr.

    Args:
        steps: in all.
        done: before.
        shown: False shows nothing.
    """

    def __init__(self, steps: int, done: int, shown: bool) -> None:
        self._bar: Any = None
        self._steps, self._shown, self._told = steps, shown, time.monotonic()
        if shown:
            try:
                from tqdm import tqdm
            except ImportError:
                return
            self._bar = tqdm(total=steps, initial=done, unit="step", dynamic_ncols=True, mininterval=0.5)

    def step(self, number: int, words: str | None) -> None:
        """One more step is done; ``words`` says how it went, None leaves what stands there."""
        if self._bar is not None:
            if words is not None:
                self._bar.set_postfix_str(words, refresh=False)
            self._bar.update()
        elif self._shown and words is not None and time.monotonic() - self._told > 10.0:
            self._told = time.monotonic()
            print(f"step {number:,} of {self._steps:,}: {words}", file=sys.stderr, flush=True)

    def say(self, line: str) -> None:
        """A line above the bar."""
        if self._bar is not None:
            self._bar.write(line, file=sys.stderr)
        elif self._shown:
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Ends the bar."""
        if self._bar is not None:
            self._bar.close()
