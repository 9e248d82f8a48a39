"""What the processes of a part tell, put together: the part's file, which nobody else writes, and lines of progress."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from tfm_kernels.bench.record import Results

from .part import RED, Begun, Listed, Message

_SAY_EVERY = 10.0  # seconds


class Ledger:
    """A part's file while its processes run.

    Args:
        part: its name.
        results: its file.
        stems: of the ops under test.
        count: how many processes share the items.
        say: prints a line.
    """

    def __init__(
        self, part: str, results: Results, stems: Sequence[str], count: int, say: Callable[[str], None]
    ) -> None:
        self.part, self.results, self.stems, self.say = part, results, stems, say
        self.left: list[Counter[str] | None] = [None] * count  # op stem -> items of a process, once it has listed them
        self.running: list[Begun | None] = [None] * count  # the item that a process is at
        self.waits = ""
        self.done, self.start = 0, time.monotonic()
        self.said, self.changed = self.start, False

    def take(self, index: int, message: Message) -> None:
        """Takes down what a process tells; write() brings it to the file."""
        if isinstance(message, Begun):
            self.running[index] = message
        elif isinstance(message, Listed):
            self._list(index, message)
        else:
            self.running[index] = None
            left, record = self.left[index], message.record
            assert left is not None, "a process lists its items before it runs them"
            left[record["stem"]] -= not record.get("unfinished")
            self.add(record)
        self._settle()

    def add(self, record: dict[str, Any]) -> None:
        """Adds a record; what is red is said at once."""
        self.results.put(record)
        self.done, self.changed = self.done + 1, True
        if record["state"] == RED or time.monotonic() - self.said > _SAY_EVERY:
            self.said = time.monotonic()
            words = f"{self.part}: {record['key']}: {record['state']} {record.get('why', '')}".rstrip()
            self.say(f"{self._progress():24}{words}")

    def age(self, index: int) -> float:
        """Seconds that a process has been at its item; 0 between items."""
        running = self.running[index]
        return time.monotonic() - running.since if running else 0.0

    def write(self) -> None:
        """Writes the file, where something is new."""
        if self.changed:
            self.results.write()
            self.changed = False

    def _list(self, index: int, listed: Listed) -> None:
        self.left[index] = Counter(listed.left)
        self.results.data.update(listed.data)
        self.changed = True
        if listed.waits and not self.waits:
            self.waits = listed.waits
            self.say(f"{self.part}: {self.waits}")

    def _settle(self) -> None:
        """An op is complete when no process has an item of it left; none is while some could not be listed."""
        left = self._left()
        if self.waits or None in self.left or left[""]:
            return
        done = {stem for stem in self.stems if not left[stem]}
        self.results.data["complete"] = sorted(done.union(self.results.data.get("complete", ())))

    def _left(self) -> Counter[str]:
        return sum((left for left in self.left if left is not None), Counter())

    def _progress(self) -> str:
        left = self._left().total()
        seconds = (time.monotonic() - self.start) / self.done * left
        return f"{self.done:4}/{self.done + left}  {seconds:4.0f} s left"
