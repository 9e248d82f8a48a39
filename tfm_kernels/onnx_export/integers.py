"""Products of int8 in ONNX operators."""

from __future__ import annotations

from typing import Any

import torch


def translations() -> dict[Any, Any]:
    """The operator and its translation, for torch.onnx.export's ``custom_translation_table``."""
    return {torch.ops.aten._int_mm.default: _product}


def _product(rows: Any, columns: Any) -> Any:  # (M, K) and (K, N), int8
    import onnxscript

    return onnxscript.opset18.MatMulInteger(rows, columns)  # its meaning has not changed since opset 10
