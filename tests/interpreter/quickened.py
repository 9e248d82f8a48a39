"""Triton's interpreter in half of the time: what it works out anew for every operation is kept.

An operation on a tile takes numpy microseconds. Around it the interpreter builds types, whose shapes are tuples of
constants, names and checks them, and asks of a sum by six more operations whether it overflows.
"""

import functools
import inspect

import numpy as np
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_init_block_type, _init_tensor, _equal = core.block_type.__init__, core.tensor.__init__, core.dtype.__eq__
_patch_lang, _get_np_dtype = interpreter._patch_lang, interpreter._get_np_dtype
_alike, _broadcast = TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value
_constant = TritonSemantic.scalar_constant
_semantic_of = functools.cache(TritonSemantic)
_block_types, _shapes, _of_scalars, _np_dtypes, _constants = {}, {}, {}, {}, {}
_patched, _met = set(), set()
_WIDE = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
_AS_THEY_ARE = "fp32", "int32", "uint32", "int64"


def patch_lang(fn):
    """Turns triton.language into the interpreter's once and for good.

    Triton does so for every call of a @triton.jit function, also from inside a kernel.
    """
    if fn not in _met:
        modules = {value.__name__ for value in fn.__globals__.values() if value is tl or value is core}
        if not modules <= _patched:
            _patch_lang(fn)
            _patched.update(modules)
        _met.add(fn)
    return interpreter._LangPatchScope()


def patch_attr(obj, name, member, builder, scope):
    """Without the wrapper that asks for _semantic, and without a copy of the keywords."""
    semantic, function = _semantic_of(builder), inspect.unwrap(member)

    def call(*args, **kwargs):
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    scope.set_attr(obj, name, call)


def _of_tensors(type):
    """What every tensor of a type has."""
    tensor = object.__new__(core.tensor)
    _init_tensor(tensor, None, type)
    return {name: value for name, value in vars(tensor).items() if name not in ("handle", "type", "dtype")}


def init_block_type(self, element_ty, shape):
    """All of an element's and a shape's name are alike; a shape is one object, whatever its elements."""
    values = tuple(shape.values if isinstance(shape, core.tuple) else shape)
    known = _block_types.get((element_ty.name, values))
    if known is None:
        _init_block_type(self, element_ty, shape)
        self.shape = _shapes.setdefault(tuple(self.shape.values), self.shape)
        self.of_tensors = _of_tensors(self)
        known = _block_types[element_ty.name, values] = dict(vars(self))
    vars(self).update(known, element_ty=element_ty)


def init_tensor(self, handle, type):
    if isinstance(type, core.block_type):
        of_tensors = type.of_tensors
    elif (of_tensors := _of_scalars.get(type.name)) is None:
        of_tensors = _of_scalars[type.name] = _of_tensors(type)
    vars(self).update(of_tensors, handle=handle, type=type, dtype=type.scalar)


def equal(self, other):
    return self is other or _equal(self, other)


def scalar_constant(self, value, dtype):
    key = dtype.name, value
    if key not in _constants:
        _constants[key] = _constant(self, value, dtype)
    return _constants[key]


def binary_op_type_checking_impl(self, lhs, rhs, *asked, **by_name):
    """Two tensors of one such type need no cast, whatever is asked."""
    if isinstance(lhs, core.tensor) and isinstance(rhs, core.tensor):
        kind = lhs.type.scalar
        if kind is rhs.type.scalar and kind.name in _AS_THEY_ARE:
            return self.broadcast_impl_value(lhs, rhs)
    return _alike(self, lhs, rhs, *asked, **by_name)


def broadcast_impl_value(self, lhs, rhs):
    one, other = lhs.type, rhs.type
    if one is other or (one.is_block() and other.is_block() and one.shape is other.shape):
        return lhs, rhs
    return _broadcast(self, lhs, rhs)


def binary_op_sanitize_overflow_impl(self, lhs, rhs, binary_op):
    """As Triton's, but by numpy."""
    kind, options = lhs.type.scalar, self.builder.options
    if kind.int_bitwidth < 64 and options.sanitize_overflow and options.debug:
        result = _WIDE[binary_op.__name__](lhs.handle.data.astype(np.int64), rhs.handle.data.astype(np.int64))
        fits = result.min() >= kind.get_int_min_value() and result.max() <= kind.get_int_max_value()
        message = f"int{kind.int_bitwidth} overflow detected for operation {binary_op.__name__}"
        self.builder.create_assert(fits, message)


def get_np_dtype(type):
    name = type.scalar.name
    if name not in _np_dtypes:
        _np_dtypes[name] = _get_np_dtype(type)
    return _np_dtypes[name]


def quicken():
    """Puts all of it in place, for the rest of the process."""
    core.block_type.__init__, core.tensor.__init__, core.dtype.__eq__ = init_block_type, init_tensor, equal
    interpreter._patch_lang, interpreter._patch_attr, interpreter._get_np_dtype = patch_lang, patch_attr, get_np_dtype
    for function in (
        scalar_constant, binary_op_type_checking_impl, binary_op_sanitize_overflow_impl, broadcast_impl_value
    ):  # fmt: skip
        setattr(TritonSemantic, function.__name__, function)
