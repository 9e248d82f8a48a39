"""OnnxReport: what export_onnx() wrote, and what was found when it was run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..proof.report import Row


@dataclass(frozen=True)
class Port:
    """An input or an output of the file.

    Attributes:
        name: as runtimes know it.
        dtype: "int64", "float32" ...
        shape: a number for each axis that is fixed, a name for each that may vary; equal names are equal sizes.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]

    def __str__(self) -> str:
        """One line."""
        return f"{self.name} {self.dtype} ({', '.join(map(str, self.shape))})"


@dataclass(frozen=True)
class OnnxReport:
    """What lies in an exported file, and how it was checked.

    Attributes:
        path: the file.
        opset: the version of the standard operators that it asks for.
        inputs: in the order of the file.
        outputs: in the order of the file.
        operators: the operators in it, by name.
        runtime: "onnxruntime 1.22.0", which ran it; None where none is installed: then no number was compared.
        sizes: the sizes that it was run at, each as the shapes of all inputs.
        worst: the comparison with the largest error / allowed error, None where nothing was run. ``worst.ratio`` is
            the file's error / plain PyTorch's, both against float64.
        remarks: what TensorRT's ONNX parser is not documented to take; nothing was run there.
        notes: what else is to be known: outputs that are left out, sizes that could not be tried.
    """

    path: Path
    opset: int
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    operators: tuple[str, ...]
    runtime: str | None
    sizes: tuple[tuple[tuple[int, ...], ...], ...]
    worst: Row | None
    remarks: tuple[str, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        """A few lines to read."""
        lines = [f"{self.path}: opset {self.opset}, {len(self.operators)} kinds of operators"]
        lines += [f"  input   {port}" for port in self.inputs] + [f"  output  {port}" for port in self.outputs]
        lines.append(f"  {self._checked()}")
        documented = "every operator and type in it is documented" if not self.remarks else "; ".join(self.remarks)
        lines.append(f"  TensorRT, by its parser's list, not run: {documented}")
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])

    def _checked(self) -> str:
        if self.runtime is None or self.worst is None:
            return "not run: onnxruntime is not installed, so its numbers are not compared"
        at = "; ".join(" ".join(map(str, shapes)) for shapes in self.sizes)
        times = f"{self.worst.ratio:.3g} times PyTorch's own, " if self.worst.stock > 0.0 else ""
        return (
            f"{self.runtime}: error against float64 at most {times}{self.worst.patched:.2e}, "
            f"allowed {self.worst.allowed:.2e}; run at {at}"
        )
