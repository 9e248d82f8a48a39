"""What ``patch`` did to a model, module by module, and what its fused modules met at run time."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from . import frozen, swap


@dataclass(frozen=True)
class Entry:
    """One module of a patched model.

    Attributes:
        name: dotted, "" for the model itself.
        kind: the module's class.
        replaced: whether fused code runs in its place (or runs it, where a fused parent does its work).
        note: how it was replaced, or why it was kept: "because ...".
        inside: name of the replaced module that does its work, where it has no code of its own that runs.
    """

    name: str
    kind: str
    replaced: bool
    note: str
    inside: str | None = None

    def __str__(self) -> str:
        status = f"replaced: {self.note}" if self.replaced else f"kept {self.note}"
        return f"{self.name or '(the model)'}  {self.kind}  {status}"


class PatchReport:
    """The result of ``patch``: what was replaced, what was kept and why. Leaving it as a context manager unpatches.

    Attributes:
        entries: one Entry per module, in the order of ``model.named_modules()``.
        notes: what holds for the model as a whole.

    Example:
        >>> model = nn.Sequential(nn.LayerNorm(8), nn.Tanh())
        >>> with tfk.patch(model) as report:
        ...     print(report)
        ...     y = model(torch.randn(2, 8))
        1 of 3 modules replaced
        (the model)    Sequential  kept      because it holds nothing to fuse
        0              LayerNorm   replaced  layer_norm
        1              Tanh        kept      because it holds nothing to fuse
        >>> print(report.fallbacks)  # empty where every fused module served every call
        {}
    """

    def __init__(
        self, entries: list[Entry], modules: list[nn.Module], notes: list[str], undo: Callable[[], Any]
    ) -> None:
        self.entries = entries
        self.notes = notes
        self._modules = [weakref.ref(module) for module in modules]
        self._undo = undo

    @property
    def replaced(self) -> list[Entry]:
        """The modules in whose place fused code runs."""
        return [entry for entry in self.entries if entry.replaced]

    @property
    def kept(self) -> list[Entry]:
        """The modules that run as before."""
        return [entry for entry in self.entries if not entry.replaced]

    @property
    def fallbacks(self) -> dict[str, dict[str, int]]:
        """Module name -> reason -> calls in which a fused module ran its original code, so far and in eager mode."""
        met = {}
        for entry, reference in zip(self.entries, self._modules, strict=True):
            module = reference()
            if module is not None and (counts := swap.fallbacks(module)):
                met[entry.name] = counts
        return met

    @property
    def frozen(self) -> dict[str, int]:
        """Module name -> bytes of the packed weight it keeps now, for the modules that ``freeze=True`` lets keep one.

        0 stands for a module that has had no call yet, or none that pays for packing.
        """
        held = ((entry.name, reference()) for entry, reference in zip(self.entries, self._modules, strict=True))
        return {name: frozen.nbytes(m) for name, m in held if m is not None and frozen.is_frozen(m)}

    def __enter__(self) -> PatchReport:
        return self

    def __exit__(self, *exception: object) -> None:
        self._undo()

    def __repr__(self) -> str:
        return f"PatchReport({len(self.replaced)} replaced, {len(self.kept)} kept)"

    def __str__(self) -> str:
        fused, inside = len(self.replaced), sum(entry.inside is not None for entry in self.entries)
        told = f"run fused code: {fused - inside} replaced, {inside} inside them" if inside else "replaced"
        lines = [f"{fused} of {len(self.entries)} modules {told}"]
        rows = [(e.name or "(the model)", e.kind, "replaced" if e.replaced else "kept", e.note) for e in self.entries]
        lines += _table(_folded(rows))
        lines += [f"note: {note}" for note in self.notes]
        lines += _frozen(self.frozen)
        for name, counts in self.fallbacks.items():
            for reason, times in counts.items():
                lines.append(f"fell back: {name or '(the model)'} ran its original code {times} times because {reason}")
        return "\n".join(lines)


def _frozen(sizes: dict[str, int]) -> list[str]:
    if not sizes:
        return []
    made = {name: size for name, size in sizes.items() if size}
    lines = [f"frozen: {len(made)} of {len(sizes)} modules keep a packed weight so far, {sum(made.values())} bytes"]
    for name, times, size, *_ in _folded([(name or "(the model)", str(size), "", "") for name, size in made.items()]):
        lines.append(f"frozen: {name}{f' ({times})' if times else ''} keeps {size} bytes")
    return lines


def _folded(rows: list[tuple[str, str, str, str]]) -> list[tuple[str, ...]]:
    """Rows that differ only in the numbers of their names become one, with * for the numbers and a count."""
    folded: dict[tuple[str, ...], list[str]] = {}
    for name, *rest in rows:
        pattern = re.sub(r"\b\d+\b", "*", name)
        note = re.sub(r"(?<=\.)\d+\b|\b\d+(?=\.)", "*", rest[2])
        folded.setdefault((pattern, rest[0], rest[1], note), []).append(name)
    return [
        (names[0] if len(names) == 1 else pattern, f"{len(names)}x" if len(names) > 1 else "", *rest)
        for (pattern, *rest), names in folded.items()
    ]


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(4)]
    return ["  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]) for row in rows]
