"""What TensorRT's ONNX parser is documented to take, and what of a graph lies outside of it.

From the operator matrix of onnx-tensorrt 10.1, docs/operators.md, which speaks for opsets 9 to 20; later releases take
more. The table holds what Transformers are exported to, with the types that are documented for each: a graph within it
is documented to be taken. Nothing here has been run on TensorRT.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

OPSETS = range(9, 21)
_FLOATS = {"FLOAT", "FLOAT16", "BFLOAT16"}
_NUMBERS = _FLOATS | {"INT32", "INT64"}
_ALL = _NUMBERS | {"BOOL"}
DOCUMENTED: dict[str, set[str]] = {
    # arithmetic
    **dict.fromkeys(("Abs", "Add", "Div", "Max", "Min", "Mod", "Mul", "Neg", "Sub", "Sum"), _NUMBERS),
    **dict.fromkeys(
        ("Ceil", "Cos", "Erf", "Exp", "Floor", "Log", "Pow", "Reciprocal", "Round", "Sin", "Sqrt"), _FLOATS
    ),
    **dict.fromkeys(("Elu", "LeakyRelu", "Relu", "Sigmoid", "Softplus", "Tanh"), _FLOATS),
    "Gelu": _NUMBERS,
    "Sign": _NUMBERS,
    # the sums of a layer
    **dict.fromkeys(("Conv", "Einsum", "Gemm", "MatMul", "LayerNormalization", "LogSoftmax", "Softmax"), _FLOATS),
    **dict.fromkeys(("ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare"), _NUMBERS),
    **dict.fromkeys(("ArgMax", "ArgMin"), _NUMBERS),
    "ReduceL2": _NUMBERS,
    "CumSum": _FLOATS,
    # masks; the integers of Clip are no line of the matrix, but its importer computes them with Min and Max
    **dict.fromkeys(("And", "Not", "Or", "Xor"), {"BOOL"}),
    **dict.fromkeys(("Equal", "Greater", "GreaterOrEqual", "IsNaN", "Less", "LessOrEqual"), _NUMBERS),
    "Clip": _NUMBERS,
    "Range": _NUMBERS,
    "Trilu": _ALL,
    "Where": _ALL,
    # shapes and places
    **dict.fromkeys(("Cast", "Concat", "Constant", "ConstantOfShape", "Expand", "Flatten", "Identity"), _ALL),
    **dict.fromkeys(("Gather", "GatherElements", "GatherND", "Reshape", "Shape", "Size", "Slice", "Split"), _ALL),
    **dict.fromkeys(("Pad", "ScatterElements", "ScatterND"), _NUMBERS),
    **dict.fromkeys(("Squeeze", "Tile", "Transpose", "Unsqueeze"), _ALL),
}


def count_in_float(model: Any) -> None:
    """Counts of True (running sums of a mask, as positions are) in float32, the only kind of CumSum documented.

    Exact up to 2^24 positions. Running sums of other integers are left as they are: those may be larger.
    """
    import onnx_ir as ir

    for node in [node for node in model.graph.all_nodes() if node.op_type == "CumSum"]:
        data, result = node.inputs[0], node.outputs[0]
        if result.dtype not in (ir.DataType.INT32, ir.DataType.INT64) or not _is_mask(data):
            continue
        widened = ir.node("Cast", [data], {"to": ir.DataType.FLOAT}, name=f"{node.name}_in_float")
        back = ir.node("Cast", [result], {"to": result.dtype}, name=f"{node.name}_as_integers")
        for cast, dtype in ((widened, ir.DataType.FLOAT), (back, result.dtype)):
            cast.outputs[0].name, cast.outputs[0].dtype, cast.outputs[0].shape = cast.name, dtype, result.shape
        ir.convenience.replace_all_uses_with(result, back.outputs[0], replace_graph_outputs=True)
        back.replace_input_with(0, result)
        result.name, back.outputs[0].name = f"{node.name}_of_floats", result.name
        node.replace_input_with(0, widened.outputs[0])
        result.dtype = ir.DataType.FLOAT
        node.graph.insert_before(node, widened)
        node.graph.insert_after(node, back)


def _is_mask(value: Any) -> bool:
    """Whether integers are True and False, cast."""
    while value is not None and value.producer() is not None and value.producer().op_type == "Cast":
        value = value.producer().inputs[0]
    return value is not None and value.dtype is not None and value.dtype.name == "BOOL"


def remarks(model: Any, opset: int) -> tuple[str, ...]:
    """What of a model the matrix does not hold, each in a few words."""
    found = list(_outside(model))
    if opset not in OPSETS:
        found.insert(0, f"opset {opset} is newer than {OPSETS[-1]}, the last that the matrix speaks for")
    return tuple(dict.fromkeys(found))


def _outside(model: Any) -> Iterator[str]:
    for node in model.graph.all_nodes():
        allowed = DOCUMENTED.get(node.op_type)
        if allowed is None:
            yield f"{node.op_type} is not in the table of documented operators"
            continue
        value = node.inputs[1] if node.op_type == "Where" else next(iter(node.inputs), None)
        if value is not None and value.dtype is not None and value.dtype.name not in allowed:
            yield f"{node.op_type} of {value.dtype.name} is not documented"
