"""Triton's interpreter, mended: bfloat16 rounds as on a GPU, a minimum or maximum drops NaN as on a GPU, integers that
overflow are errors.

Unmended, Triton 3.5.1 to 3.9.0 computes on the raw bits of bfloat16 and truncates stores, keeps in tl.minimum and
tl.maximum the NaN that PTX's min and max drop, and lets int32 offsets wrap.
"""

import dataclasses

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_Builder = type(interpreter.interpreter_builder)
_Handle = interpreter.TensorHandle
_binary_op, _unary_op, _cast = _Builder.binary_op, _Builder.unary_op, _Builder.cast_impl
_fp_to_fp, _dot = _Builder.create_fp_to_fp, _Builder.create_dot


def widen(bits):
    """float32 of the raw bits of bfloat16."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(values):
    """Raw bits of bfloat16, float32 rounded to nearest even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + 0x7FFF).astype(np.uint32)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def _is_bf16(handle):
    return getattr(handle.dtype, "scalar", handle.dtype) == tl.bfloat16


def _wide(handle):
    return widen(handle.data) if _is_bf16(handle) else handle.data


def binary_op(self, lhs, rhs, op):
    if not (_is_bf16(lhs) and _is_bf16(rhs)):
        return _binary_op(self, lhs, rhs, op)
    result = op(widen(lhs.data), widen(rhs.data))
    return _Handle(result, tl.int1) if result.dtype == np.bool_ else _Handle(narrow(result), tl.bfloat16)


def unary_op(self, arg, op):
    return _Handle(narrow(op(widen(arg.data))), tl.bfloat16) if _is_bf16(arg) else _unary_op(self, arg, op)


def cast_impl(self, src, dst_type):
    types = src.dtype.scalar, dst_type.scalar
    if types == (tl.float32, tl.bfloat16):
        return _Handle(narrow(src.data), tl.bfloat16)
    if types == (tl.bfloat16, tl.float32):
        return _Handle(widen(src.data), tl.float32)
    if types == (tl.int8, tl.bfloat16):  # which holds them exactly
        return _Handle(narrow(src.data.astype(np.float32)), tl.bfloat16)
    if tl.bfloat16 in types and types[0] != types[1]:
        raise NotImplementedError(f"the mended interpreter does not cast {types[0]} to {types[1]}")
    return _cast(self, src, dst_type)


def create_fp_to_fp(self, src, dst_type, rounding_mode):
    if tl.bfloat16 in (src.dtype.scalar, dst_type.scalar):
        return cast_impl(self, src, dst_type)
    return _fp_to_fp(self, src, dst_type, rounding_mode)


def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    if not (_is_bf16(a) or _is_bf16(b)):
        if d.data.dtype == np.float32:  # numpy's own product gave views and copies other bits on a Zen 3
            exact = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64))
            return _Handle((exact + d.data).astype(np.float32), d.dtype.scalar)
        return _dot(self, a, b, d, input_precision, max_num_imprecise_acc)
    return _Handle(np.matmul(_wide(a), _wide(b), dtype=np.float32) + d.data, d.dtype.scalar)


def create_minnumf(self, lhs, rhs):
    return self.binary_op(lhs, rhs, np.fmin)


def create_maxnumf(self, lhs, rhs):
    return self.binary_op(lhs, rhs, np.fmax)


def mend():
    """Puts all of it in place, for the rest of the process."""
    for function in (
        binary_op, unary_op, cast_impl, create_fp_to_fp, create_dot, create_minnumf, create_maxnumf
    ):  # fmt: skip
        setattr(_Builder, function.__name__, function)
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = dataclasses.replace(options, debug=True)
