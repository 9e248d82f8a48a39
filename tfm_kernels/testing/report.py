"""What a judgement found: one line a tensor and rule, and the error that is raised where one fails."""

from __future__ import annotations

from dataclasses import dataclass, field


class ContractError(AssertionError):
    """A result breaks the numeric contract; the message names op, backend, tensor, index and error / bound."""


@dataclass(frozen=True)
class Finding:
    """One rule applied to one tensor.

    Attributes:
        tensor: "out", "y", "dquery" ...
        rule: "C1" ... "C6", or "form" (shape, dtype, device) and "placement" (NaN, Inf, exact zeros).
        ratio: error / bound; above 1 the rule is broken.
        detail: where and how, for the message.
        binding: whether a broken rule fails the call, or is only measured.
    """

    tensor: str
    rule: str
    ratio: float
    detail: str = ""
    binding: bool = True

    @property
    def broken(self) -> bool:
        """Whether the rule is broken and binding (a ratio of NaN breaks it)."""
        return self.binding and not self.ratio <= 1.0


@dataclass
class Report:
    """All findings of one call.

    Attributes:
        op: the public function's name.
        backend: who computed it.
        label: the call in words (dtype and shapes).
        findings: one a tensor and rule.
    """

    op: str
    backend: str
    label: str = ""
    findings: list[Finding] = field(default_factory=list)

    def add(self, tensor: str, rule: str, ratio: float, detail: str = "", binding: bool = True) -> None:
        """Records one rule's answer."""
        self.findings.append(Finding(tensor, rule, ratio, detail, binding))

    @property
    def broken(self) -> list[Finding]:
        """The findings that fail the call, worst first."""
        order = lambda finding: -finding.ratio if finding.ratio == finding.ratio else -float("inf")  # noqa: E731
        return sorted((finding for finding in self.findings if finding.broken), key=order)

    @property
    def passed(self) -> bool:
        """Whether no binding rule is broken."""
        return not self.broken

    @property
    def worst(self) -> dict[str, float]:
        """Tensor -> its worst componentwise error / bound (C1)."""
        worst: dict[str, float] = {}
        for finding in self.findings:
            if finding.rule == "C1":
                worst[finding.tensor] = max(worst.get(finding.tensor, 0.0), finding.ratio)
        return worst

    def raise_broken(self) -> Report:
        """Raises ContractError where a rule is broken; else returns itself."""
        if self.broken:
            lines = [
                f"{f.tensor}: {f.rule} broken, error / bound = {f.ratio:.4g}{_after(f.detail)}" for f in self.broken
            ]
            raise ContractError(f"{self.op}: backend {self.backend!r} on {self.label}: " + "; ".join(lines))
        return self

    def __str__(self) -> str:
        """One line a tensor: error / bound of each rule."""
        rules = sorted({finding.rule for finding in self.findings})
        lines = [
            f"{self.op} [{self.backend}] {self.label}",
            f"  {'tensor':12}" + "".join(f"{rule:>11}" for rule in rules),
        ]
        for tensor in dict.fromkeys(finding.tensor for finding in self.findings):
            cells = {finding.rule: finding.ratio for finding in self.findings if finding.tensor == tensor}
            lines.append(
                f"  {tensor:12}" + "".join(f"{cells[rule]:>11.3g}" if rule in cells else f"{'-':>11}" for rule in rules)
            )
        return "\n".join(lines)


def _after(detail: str) -> str:
    return f" ({detail})" if detail else ""
