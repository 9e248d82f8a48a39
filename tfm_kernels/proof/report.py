"""ProofReport: what prove() found, as an object, a table and JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any

KINDS = ("output", "buffer", "gradient", "step", "module")  # in the order of the table


@dataclass(frozen=True)
class Row:
    """One tensor of the patched model, compared.

    Attributes:
        kind: "output", "buffer", "gradient", "step" (of the whole model), or "module" (one replaced module, fed alone).
        module: dotted name of the module that the tensor belongs to; "" for the model itself.
        tensor: "output", "gradient of weight", "loss after step 1" ...
        elements: how many elements were compared.
        stock: error of the original against float64, divided by the size of the tensor.
        patched: the same of the patched model.
        allowed: the largest ``patched`` that passes.
        rule: "size" (Frobenius norm of the error), "bias" (the error leans to one side), "row" (of all rows the one
            whose error is the largest part of what it may be) or "form" (shape, NaN, integers, a call that fails,
            other bits from call to call).
        detail: what went wrong, or which row it is, where a number does not tell.
    """

    kind: str
    module: str
    tensor: str
    elements: int
    stock: float
    patched: float
    allowed: float
    rule: str = "size"
    detail: str = ""

    @property
    def passed(self) -> bool:
        """Whether the error stays within what is allowed (NaN does not)."""
        return self.patched <= self.allowed

    @property
    def load(self) -> float:
        """Error / allowed error: above 1 the row fails."""
        if self.passed:
            return self.patched / self.allowed if self.allowed > 0.0 else 0.0
        return self.patched / self.allowed if self.allowed > 0.0 and math.isfinite(self.patched) else math.inf

    @property
    def ratio(self) -> float:
        """Error of the patched model / error of the original."""
        if self.stock > 0.0:
            return self.patched / self.stock
        return 1.0 if self.patched == 0.0 else math.inf

    def __str__(self) -> str:
        """One sentence."""
        where = f"{self.module}: {self.tensor}" if self.module else self.tensor
        if self.rule == "form":
            return f"{where}: {self.detail}"
        what = {"bias": "leaning of the error", "row": f"error of {self.detail}"}.get(self.rule, "error")
        return (
            f"{where}: {what} {self.patched:.2e}, PyTorch's own {self.stock:.2e}, ratio {self.ratio:.3g}, "
            f"allowed {self.allowed:.2e}"
        )


@dataclass
class ProofReport:
    """The verdict of prove(), with every comparison behind it.

    Attributes:
        model: class name of the model.
        dtype: what both models ran in, "bfloat16".
        limit: what was asked for.
        training: whether the model was in training mode (then dropout was on, with the same elements dropped).
        replaced: names of the modules that patching changed.
        options: what the model is patched with; several where parts of it have their own.
        rows: every comparison.
        notes: what was left out, and why.
        seconds: how long it took.
    """

    model: str
    dtype: str
    limit: float
    training: bool
    replaced: list[str] = field(default_factory=list)
    options: list[dict[str, Any]] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether every comparison passed."""
        return all(row.passed for row in self.rows)

    @property
    def worst(self) -> Row | None:
        """The row with the largest error / allowed error; None where there was nothing to compare."""
        return max(self.rows, key=lambda row: row.load, default=None)

    @property
    def failures(self) -> list[Row]:
        """The rows that failed, worst first."""
        return sorted((row for row in self.rows if not row.passed), key=lambda row: -row.load)

    @property
    def culprits(self) -> list[str]:
        """The modules to look at: replaced modules that fail although nothing inside them does.

        Where no replaced module fails when it is fed alone, the modules whose gradients, or the model's outputs, fail.
        """
        alone = {row.module for row in self.failures if row.kind == "module"}
        inner = [
            name for name in alone if not any(other.startswith(f"{name}." if name else "") for other in alone - {name})
        ]
        if inner:
            return sorted(name or "the model" for name in inner)
        return sorted({row.module or "the model" for row in self.failures})

    def table(self) -> str:
        """The whole model's outputs, its worst gradients, losses and worst steps, then one line per replaced module."""
        shown = [row for row in self.rows if row.kind == "output"]
        for kind in ("buffer", "gradient", "step"):
            rows = sorted((row for row in self.rows if row.kind == kind), key=lambda row: -row.load)
            loss = [row for row in rows if row.tensor.startswith("loss ")]
            shown += loss + [r for n, r in enumerate(r for r in rows if r not in loss) if n < 5 or not r.passed]
        for module in dict.fromkeys(row.module for row in self.rows if row.kind == "module"):
            rows = [row for row in self.rows if row.kind == "module" and row.module == module]
            shown.append(max(rows, key=lambda row: row.load))
        cells = [("", "what", "PyTorch", "patched", "ratio", "allowed")]
        aside = {"bias": " (leaning)", "row": " (worst row)"}
        for row in shown:
            what = f"{row.module}: {row.tensor}" if row.module else row.tensor
            numbers = (f"{row.stock:.2e}", f"{row.patched:.2e}", f"{row.ratio:.3f}", f"{row.allowed:.2e}")
            verdict = "ok" if row.passed else "FAIL"
            cells.append((verdict, _short(what) + aside.get(row.rule, ""), *numbers))
        widths = [max(len(line[column]) for line in cells) for column in range(6)]
        lines = [
            f"  {line[0]:{widths[0]}}  {line[1]:{widths[1]}}  "
            + "  ".join(f"{line[c]:>{widths[c]}}" for c in range(2, 6))
            for line in cells
        ]
        patched = [", ".join(f"{name}={value!r}" for name, value in each.items()) for each in self.options]
        return "\n".join(
            [
                str(self),
                *(f"  patch({each})" for each in patched),
                *(line.rstrip() for line in lines),
                *(f"  note: {note}" for note in self.notes),
            ]
        )

    def to_json(self) -> str:
        """Everything, as JSON; infinities and NaN are written as strings."""
        rows = [{**asdict(row), "ratio": row.ratio, "passed": row.passed} for row in self.rows]
        worst = None if self.worst is None else str(self.worst)
        found = {**asdict(self), "rows": rows, "passed": self.passed, "worst": worst, "culprits": self.culprits}
        return json.dumps(_finite(found), indent=1)

    def __str__(self) -> str:
        """Two sentences: what was compared, and the verdict."""
        mode = "training, with the same elements dropped" if self.training else "evaluation"
        counts = ", ".join(
            f"{count} {kind}{'s' * (count != 1)}"
            for kind in KINDS[:-1]
            if (count := len({(row.module, row.tensor) for row in self.rows if row.kind == kind}))
        )
        alone = len({row.module for row in self.rows if row.kind == "module"})
        head = (
            f"prove {self.model} in {self.dtype} ({mode}): {len(self.replaced)} modules replaced; compared {counts}, "
            f"{alone} modules fed alone"
        )
        if self.passed:
            return f"{head}. PASSED" + (f", worst: {self.worst}" if self.worst is not None else "")
        return f"{head}. FAILED in {', '.join(self.culprits)}, worst: {self.worst}"


def _short(text: str, width: int = 76) -> str:
    return text if len(text) <= width else f"...{text[3 - width :]}"


def _finite(value):
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list) else value
