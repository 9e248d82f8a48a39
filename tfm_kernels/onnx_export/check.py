"""Is the file the model? It is run by onnxruntime and judged by the rule of ``prove`` (proof/rule.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._backend import use_backend
from ..proof import precision
from ..proof.report import Row
from ..proof.rule import Judge
from ..proof.runs import named_tensors
from .call import FlatCall
from .plain import returned, within_aten
from .program import reason

LIMIT = 1.05  # prove()'s own


@dataclass(frozen=True)
class Checked:
    """What running a file found.

    Attributes:
        runtime: its name and version.
        sizes: the shapes of all inputs, for each run.
        rows: every output of every run, compared.
        notes: sizes that were not tried.
    """

    runtime: str
    sizes: tuple[tuple[tuple[int, ...], ...], ...]
    rows: list[Row]
    notes: list[str]


def check(file: Path, model: nn.Module, call: FlatCall, others: Sequence[Any], dtype: torch.dtype) -> Checked | None:
    """Runs a file on the examples and at other sizes, beside the plain model in its dtype and in float64.

    Args:
        file: the file.
        model: the plain copy.
        call: the examples.
        others: shapes of the inputs to run at besides.
        dtype: of the model.

    Returns:
        None where onnxruntime is not installed.

    Raises:
        RuntimeError: onnxruntime cannot load or run the file.
    """
    if find_spec("onnxruntime") is None:
        return None
    import onnxruntime

    session = _session(onnxruntime, file)
    exact = precision.exact(model)
    truth: dict[str, Tensor] = {}
    stock: dict[str, Tensor] = {}
    found: dict[str, Tensor] = {}
    sizes, notes = [], []
    for shapes in (call.shapes, *others):
        sized = call.resized(shapes)
        at = ", ".join(f"{name} {tuple(shape)}" for name, shape in zip(call.names, shapes, strict=True))
        try:
            with within_aten():
                own = named_tensors(returned(model, sized.call()))
        except Exception as error:  # a size that the model does not take
            if shapes == call.shapes:
                raise
            notes.append(f"not tried at {at}, where PyTorch fails itself ({reason(error)})")
            continue
        with use_backend("reference"), precision.exactly(dtype):
            right = named_tensors(returned(exact, sized.call().to(torch.float64)))
        outputs = dict(zip(own, _run(session, sized, at), strict=True))
        for name in own:
            where = f"{name} at {at}"
            truth[where], stock[where], found[where] = right[name], own[name], outputs[name]
        sizes.append(tuple(map(tuple, shapes)))
    rows = Judge(dtype, LIMIT).compare("output", truth, stock, found, module="")
    return Checked(f"onnxruntime {onnxruntime.__version__}", tuple(sizes), rows, notes)


def _session(onnxruntime: Any, file: Path) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # classes of its own, without a base
        raise RuntimeError(f"export_onnx: onnxruntime cannot load the exported file ({reason(error)})") from error


def _run(session: Any, call: FlatCall, at: str) -> list[Tensor]:
    wanted = {port.name for port in session.get_inputs()}
    feeds = {name: t.numpy() for name, t in zip(call.names, call.tensors, strict=True) if name in wanted}
    try:
        return [torch.from_numpy(array) for array in session.run(None, feeds)]
    except Exception as error:
        raise RuntimeError(
            f"export_onnx: onnxruntime cannot run the exported file at {at} ({reason(error)})"
        ) from error
