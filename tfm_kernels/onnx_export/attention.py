"""scaled_dot_product_attention in ONNX operators, as PyTorch means it.

torch's own translation (seen in 2.13) gives a row that sees no key the mean of the hidden values where the mask is
bool, and NaN where it is additive; PyTorch gives 0.
"""

from __future__ import annotations

import math
from typing import Any

import torch


def translations() -> dict[Any, Any]:
    """The operator and its translation, for torch.onnx.export's ``custom_translation_table``."""
    return {torch.ops.aten.scaled_dot_product_attention.default: _attention}


def _attention(
    query: Any,  # (..., Tq, D)
    key: Any,  # (..., Tk, D)
    value: Any,  # (..., Tk, Dv)
    attn_mask: Any = None,
    dropout_p: float = 0.0,  # of training
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    import onnx_ir as ir
    import onnxscript

    op: Any = onnxscript.opset18  # what the operators below mean has not changed since
    if enable_gqa and query.shape[1] != key.shape[1]:
        key, value = (_repeated(op, each, query.shape[1]) for each in (key, value))
    rank = len(query.shape)
    constant = lambda number: op.Constant(value=ir.tensor(number, dtype=query.dtype))  # noqa: E731
    factor = _scale(op, query) if scale is None else constant(scale)
    keys = op.Transpose(key, perm=[*range(rank - 2), rank - 1, rank - 2])
    scores = op.MatMul(op.Mul(query, factor), keys)
    visible = _causal(op, query, key, rank) if is_causal else attn_mask
    if visible is None:
        return op.MatMul(op.Softmax(scores, axis=-1), value)
    if visible.dtype != ir.DataType.BOOL:
        scores = op.Add(scores, attn_mask)
        visible = op.Not(op.Equal(attn_mask, constant(-math.inf)))
    # finite, so that a row which sees nothing has numbers, and 0 afterwards
    weights = op.Softmax(op.Where(visible, scores, constant(float(query.dtype.min))), axis=-1)
    return op.MatMul(op.Where(visible, weights, constant(0.0)), value)


def _scale(op: Any, query: Any) -> Any:
    """1 / sqrt(D)."""
    import onnx_ir as ir

    width = query.shape[-1]
    if isinstance(width, int):
        return op.Constant(value=ir.tensor(1.0 / math.sqrt(width), dtype=query.dtype))
    rank = len(query.shape)
    return op.Reciprocal(op.Sqrt(op.Cast(op.Shape(query, start=rank - 1, end=rank), to=query.dtype)))


def _causal(op: Any, query: Any, key: Any, rank: int) -> Any:
    """(Tq, Tk) bool, query i sees keys j <= i."""
    import onnx_ir as ir

    def positions(tensor: Any, axis: int) -> Any:
        length = op.Squeeze(op.Shape(tensor, start=rank - 2, end=rank - 1))
        return op.Unsqueeze(op.Range(op.Constant(value_int=0), length, op.Constant(value_int=1)), [axis])

    visible = op.LessOrEqual(positions(key, 0), positions(query, 1))
    visible.dtype = ir.DataType.BOOL
    return visible


def _repeated(op: Any, tensor: Any, heads: Any) -> Any:
    """(B, Hk, T, D) -> (B, heads, T, D), each head for as many queries' heads in a row as there are to it."""
    if not isinstance(heads, int) or not isinstance(tensor.shape[1], int):
        raise ValueError("attention with grouped heads needs a fixed number of them: name the axes in dynamic_axes")
    times = heads // tensor.shape[1]
    tiled = op.Tile(op.Unsqueeze(tensor, [2]), [1, 1, times, 1, 1])
    return op.Reshape(
        tiled, op.Concat(op.Constant(value_ints=[0, heads, -1]), op.Shape(tensor, start=3, end=4), axis=0)
    )  # 0: as it was
