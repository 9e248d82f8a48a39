"""export_onnx(): a model as one ONNX file of standard operators, which has proven itself before it is there."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import _check
from ..proof.runs import Call, named_tensors, others
from . import axes as dynamic
from . import tensorrt
from .call import Flat, FlatCall, output_names
from .check import Checked, check
from .file import replaced
from .plain import plain, returned, within_aten
from .program import captured, limits, reason, tidy, translated
from .report import OnnxReport as OnnxReport
from .report import Port as Port

DTYPES = (torch.float32, torch.float64)  # of 16 bits onnxruntime's CPU knows but a part


def export_onnx(
    model: nn.Module,
    path: str | PathLike[str],
    example_inputs: Any,
    *,
    dynamic_axes: dynamic.Axes | None = None,
    opset: int = 20,
) -> OnnxReport:
    """Write a model as an ONNX file for onnxruntime, TensorRT and others, and check that the file is the model.

    Takes any module: ``tfk.models``, models of ``tfk.nn`` or ``torch.nn``, Hugging Face's, patched or not. A copy is
    exported, in evaluation mode, on the CPU, unpatched and by PyTorch's own operators, so the file asks for none of
    ours and the model stays as it is. It is written beside ``path`` first, and takes that name when

    * ``onnx.checker`` finds nothing, and
    * onnxruntime, where installed, gives the model's outputs on the examples, on larger and smaller sizes and on
      sizes of 1: no further from a float64 run than the rule of ``prove`` allows, which measures by plain PyTorch.

    Otherwise an older file is left alone. Weights of more than 2 GiB go into a second file, which must stay beside it.

    Args:
        model: in any mode, float32 or float64. 16 bits are the choice of the runtime (``trtexec --fp16``, ``--bf16``):
            onnxruntime cannot run all of a file in 16 bits on a CPU, which the check needs.
        path: the file, replaced where there is one.
        example_inputs: what to call the model with: a tensor, a tuple of arguments, or a dict of arguments by name.
            Tensors become inputs, named as ``forward`` names them; all else is a constant of the file. With padding in
            the examples its handling is checked, too.
        dynamic_axes: which axes may vary: ``{"input_ids": {0: "batch", 1: "sequence"}}``; equal names are equal sizes.
            None finds every axis that the model leaves free, of those larger than 1 in the examples; a batch of 1, in
            front of the first input, may vary, too. ``{}`` fixes all.
        opset: of the standard operators. 20 is the last that TensorRT 10.1 documents.

    Returns:
        An ``OnnxReport``; ``print`` it.

    Raises:
        ImportError: onnx or onnxscript is not installed; ``pip install 'tfm_kernels[export]'`` brings them.
        TypeError, ValueError: an argument is wrong.
        RuntimeError: the model cannot be exported, or the file does not give its outputs.
        OSError: the file cannot be written.

    Dynamic layers of ``quantize`` keep their integers in the file (MatMulInteger, which TensorRT's list does not hold);
    the weights of others are written as the floats that they stand for.

    Cost: three copies of the model (one in float64), a trace of it, and a few calls.

    A language model's or a translator's file maps ids to scores, without a cache of keys and values. To generate, run
    it in a loop, each time on all tokens so far: append the argmax of the last position's scores to ``ids`` (to the
    target's, the source's stay) until the end token comes.

    TensorRT reads the file by ``trtexec --onnx=model.onnx --minShapes=ids:1x1 --optShapes=ids:8x64
    --maxShapes=ids:32x256``, a size for every input that may vary. The report's ``remarks`` name the operators that
    its parser does not document. No file has been run there yet.

    Example:
        >>> config = tfk.models.CausalLanguageConfig(100, 1, d_model=16, nhead=2, dim_feedforward=32)
        >>> model = tfk.models.CausalLanguageModel(config)
        >>> report = tfk.export_onnx(model, "model.onnx", torch.randint(1, 100, (2, 5)))
        >>> print(report.inputs[0], "->", report.outputs[0])
        ids int64 (batch, sequence) -> output float32 (batch, sequence, 100)
    """
    return export_stage_by_stage(model, path, example_inputs, dynamic_axes, opset)


def export_stage_by_stage(
    model: nn.Module,
    path: str | PathLike[str],
    example_inputs: Any,
    dynamic_axes: dynamic.Axes | None = None,
    opset: int = 20,
    progress: Callable[[str], None] = lambda stage: None,
) -> OnnxReport:
    """export_onnx() with a function that is told of each stage."""
    call = _checked(model, path, example_inputs, opset)
    progress("copying")
    copied, file = plain(model), Path(fspath(path)).absolute()
    flat_call = FlatCall.of(copied, call)
    if not flat_call.tensors:
        raise ValueError("export_onnx: example_inputs must hold at least one tensor, got none")
    axes = dynamic.checked(dynamic_axes, flat_call)
    with replaced(file) as write:
        outputs, notes = _outputs(copied, flat_call)
        flat = Flat(copied, flat_call)
        progress("tracing")
        program = captured(flat, dynamic.widened(flat_call, axes), axes)
        shapes = dynamic.symbols(program)
        named = dynamic.names(flat_call, shapes, axes)
        progress("translating")
        graph = translated(program, flat_call.names, output_names(outputs, flat_call.names), named, opset)
        tensorrt.count_in_float(graph)
        tidy(graph)
        progress("writing")
        written = write(graph)
        _check_form(written, graph)
        sizes = dynamic.others(flat_call, shapes, limits(program))
        progress("running the file, and PyTorch in float64")
        checked = check(written, copied, flat_call, sizes, _dtype(copied))
        _judge(checked)
    ports = [tuple(_port(value) for value in values) for values in (graph.graph.inputs, graph.graph.outputs)]
    return OnnxReport(
        path=Path(fspath(path)),
        opset=opset,
        inputs=ports[0],
        outputs=ports[1],
        operators=tuple(sorted({node.op_type for node in graph.graph.all_nodes()})),
        runtime=None if checked is None else checked.runtime,
        sizes=() if checked is None else checked.sizes,
        worst=None if checked is None else max(checked.rows, key=lambda row: row.load),
        remarks=tensorrt.remarks(graph, opset),
        notes=(*notes, *_notes(checked, bool(named))),
    )


def _checked(model: Any, path: Any, inputs: Any, opset: Any) -> Call:
    if not isinstance(model, nn.Module):
        raise TypeError(f"export_onnx: model must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(path, (str, PathLike)):
        raise TypeError(f"export_onnx: path must be a str or a path, got {type(path).__name__}")
    call = Call(*_check.call_arguments("export_onnx", inputs))
    if isinstance(opset, bool) or not isinstance(opset, int) or not 18 <= opset <= 23:
        raise ValueError(f"export_onnx: opset must be an integer from 18 to 23, got {opset!r}")
    dtype = _dtype(model)
    if dtype not in DTYPES:
        raise ValueError(
            f"export_onnx: model must be float32 or float64, got {str(dtype)[6:]}: export model.float(), and let "
            "the runtime compute in 16 bits"
        )
    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    if missing:
        raise ImportError(
            f"export_onnx: needs {' and '.join(missing)}, which is not installed: pip install 'tfm_kernels[export]'"
        )
    return call


def _dtype(model: nn.Module) -> torch.dtype:
    """Of the parameters; of several, the one with the largest rounding."""
    found = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    return max(found, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


def _outputs(model: nn.Module, call: FlatCall) -> tuple[dict[str, Tensor], list[str]]:
    """What the plain copy gives, and notes of what no file can give."""
    try:
        with within_aten():
            result = returned(model, call.call())
    except Exception as error:  # whatever the model raises
        name = type(model).__name__
        raise RuntimeError(f"export_onnx: {name} cannot run example_inputs ({reason(error)})") from error
    outputs = named_tensors(result)
    if not outputs:
        raise ValueError(f"export_onnx: {type(model).__name__} gives no tensor")
    return outputs, [f"{name} is left out: it is of type {kind}" for name, kind in others(result).items()]


def _check_form(file: Path, graph: Any) -> None:
    """Refuses what onnx.checker refuses, and operators that are not of the standard."""
    import onnx

    nodes = [node for node in graph.graph.all_nodes() if node.domain not in ("", "ai.onnx")]
    foreign = sorted({f"{node.domain}::{node.op_type}" for node in nodes})
    if foreign:
        raise RuntimeError(f"export_onnx: the model needs operators that are no standard of ONNX: {', '.join(foreign)}")
    try:
        onnx.checker.check_model(str(file), full_check=True)
    except Exception as error:  # ValidationError, and others that shape inference raises
        raise RuntimeError(f"export_onnx: onnx.checker refuses the exported file ({reason(error)})") from error


def _judge(checked: Checked | None) -> None:
    """Refuses a file whose numbers are not the model's."""
    if checked is None:
        return
    if not checked.rows:
        raise RuntimeError("export_onnx: no output can be compared: all are empty, NaN or infinite in PyTorch")
    worst = max(checked.rows, key=lambda row: row.load)
    if not worst.passed:
        raise RuntimeError(f"export_onnx: the exported file does not give the model's outputs: {worst}")


def _notes(checked: Checked | None, varies: bool) -> list[str]:
    """What running the file left open."""
    if checked is None:
        return []
    alone = ["axes may vary, but it was run at the sizes of the examples alone"] if varies else []
    return checked.notes + (alone if len(checked.sizes) == 1 else [])


def _port(value: Any) -> Port:
    shape = tuple(size if isinstance(size, int) else str(size.value) for size in value.shape)
    return Port(value.name, str(value.dtype.numpy()), shape)
