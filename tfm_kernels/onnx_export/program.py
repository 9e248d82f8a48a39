"""From a model to an ONNX program: captured by torch.export, translated by torch.onnx, tidied."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from typing import Any

import torch
from torch.export import ExportedProgram

from ..ops.int8_linear import products_of_int8
from . import attention, integers
from . import axes as dynamic
from .call import Flat, FlatCall
from .plain import within_aten

_LOGGERS = ("torch", "onnxscript", "onnx_ir")


def captured(flat: Flat, call: FlatCall, axes: dynamic.Axes | None) -> ExportedProgram:
    """The model as a graph of ATen operators.

    Raises:
        RuntimeError: the model's code cannot be captured.
    """
    told = dynamic.hints(call, axes)
    try:
        with within_aten(), products_of_int8(), quiet():
            return torch.export.export(flat, call.tensors, dynamic_shapes=told, strict=False)
    except Exception as error:  # whatever the model raises
        why = "its code asks for the values of a tensor" if _asked_for_values(error) else reason(error)
        name = type(flat.model).__name__
        raise RuntimeError(f"export_onnx: {name} cannot be captured by torch.export ({why})") from error


def translated(
    program: ExportedProgram, inputs: Sequence[str], outputs: Sequence[str], named: Mapping[str, str], opset: int
) -> Any:
    """The program as an ``onnx_ir.Model``.

    Args:
        program: of ``captured``.
        inputs: their names.
        outputs: their names.
        named: symbol -> name of the axis.
        opset: of the standard operators.

    Raises:
        RuntimeError: an operator of it has no counterpart in ONNX.
    """
    shapes = tuple(
        {axis: named[size] for axis, size in enumerate(shape) if isinstance(size, str) and size in named}
        for shape in dynamic.symbols(program)
    )
    try:
        with within_aten(), quiet():
            model = torch.onnx.export(
                program, (), dynamo=True, input_names=list(inputs), output_names=list(outputs), opset_version=opset,
                dynamic_shapes={"tensors": shapes} if any(shapes) else None, verbose=False,
                custom_translation_table={**attention.translations(), **integers.translations()},
            ).model  # type: ignore[union-attr]  # fmt: skip
    except Exception as error:  # the exporter's many kinds
        raise RuntimeError(f"export_onnx: torch.onnx.export cannot translate the model ({reason(error)})") from error
    if model.opset_imports.get("") != opset:
        raise RuntimeError(
            f"export_onnx: the model cannot be written with opset {opset}, only with {model.opset_imports.get('')}"
        )
    return model


def tidy(model: Any) -> None:
    """Weights under the names that the user's model has, fixed sizes as numbers, no traces of the code it came from."""
    import onnx_ir

    for value in list(model.graph.initializers.values()):
        value.name = value.name.removeprefix("model.")
    model.producer_name = "tfm_kernels"
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    for node in model.graph.all_nodes():
        node.doc_string = None
        node.metadata_props.clear()
    nodes = [value for node in model.graph.all_nodes() for value in node.outputs]
    for value in (*model.graph.inputs, *nodes, *model.graph.initializers.values()):
        value.metadata_props.clear()
        if value.shape is not None:  # an axis that turned out fixed is still a symbol, called "16"
            value.shape = onnx_ir.Shape([_number(size) for size in value.shape])


def _number(size: Any) -> Any:
    words = str(getattr(size, "value", size))
    return int(words) if words.isdigit() else size


def limits(program: ExportedProgram) -> dict[str, tuple[float, float]]:
    """Symbol -> the least and the largest size that the program's own conditions allow."""
    found = {}
    for symbol, bounds in program.range_constraints.items():
        try:
            found[str(symbol)] = (float(bounds.lower), float(bounds.upper))
        except (TypeError, ValueError, OverflowError):  # one of the two is symbolic: no bound
            continue
    return found


def _asked_for_values(error: BaseException | None) -> bool:
    while error is not None and type(error).__name__ != "GuardOnDataDependentSymNode":
        error = error.__cause__ or error.__context__
    return error is not None


def reason(error: BaseException) -> str:
    """The line that tells what went wrong: of the first cause, for those around it say where."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    return f"{type(error).__name__}: {lines[0]}"


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps to itself what torch's exporter tells its own developers."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):  # where a failed trace is printed
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
