"""The tests' own tools show what they are meant to show."""

import faulthandler
import itertools
import os
import signal

import pytest
import torch
import triton
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime.interpreter import interpreter_builder

from ..fences import fenced
from . import quickened


@triton.jit
def copy_kernel(x_ptr, y_ptr, N, BLOCK_N: tl.constexpr, IS_MASKED: tl.constexpr):
    offs_n = tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + offs_n, mask=offs_n < N, other=0.0) if IS_MASKED else tl.load(x_ptr + offs_n)
    tl.store(y_ptr + offs_n, x.to(y_ptr.dtype.element_ty), mask=offs_n < N)


@triton.jit
def sum_kernel(x_ptr, y_ptr, BLOCK_N: tl.constexpr):
    offs_n = tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + offs_n)
    tl.store(y_ptr + offs_n, x * x + x)


@triton.jit
def clamp_kernel(x_ptr, y_ptr, BLOCK_N: tl.constexpr):
    offs_n = tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + offs_n)
    tl.store(y_ptr + offs_n, tl.minimum(x, 1.0))
    tl.store(y_ptr + BLOCK_N + offs_n, tl.maximum(x, 1.0))
    tl.store(y_ptr + 2 * BLOCK_N + offs_n, tl.minimum(x, 1.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def offset_kernel(y_ptr, stride):
    offset = (tl.program_id(0) + 70_000) * stride
    tl.store(y_ptr, offset.to(tl.int64))


@triton.jit
def tile_kernel(y_ptr, start):
    offs_n = tl.arange(0, 8)
    tl.store(y_ptr + offs_n, start + offs_n)
    tl.store(y_ptr + 8 + offs_n, start - offs_n)


def test_bfloat16_is_rounded_to_nearest_even():
    x, y = torch.randn(4096) * 100, torch.empty(4096, dtype=torch.bfloat16)
    copy_kernel[(1,)](x, y, 4096, BLOCK_N=4096, IS_MASKED=True)
    assert torch.equal(y, x.bfloat16())
    x = x.bfloat16()
    sum_kernel[(1,)](x, y, BLOCK_N=4096)
    assert torch.equal(y, x * x + x)


def test_integers_of_8_bits_become_bfloat16():
    x, y = torch.arange(-128, 128, dtype=torch.int8), torch.empty(256, dtype=torch.bfloat16)
    copy_kernel[(1,)](x, y, 256, BLOCK_N=256, IS_MASKED=True)
    assert torch.equal(y, x.bfloat16())


def test_a_minimum_drops_nan_unless_told_otherwise():
    """As PTX's min.f32, max.f32 and min.NaN.f32 do."""
    y = torch.empty(3, 2)
    clamp_kernel[(1,)](torch.tensor([float("nan"), 3.0]), y, BLOCK_N=2)
    assert torch.equal(y[:2], torch.tensor([[1.0, 1.0], [1.0, 3.0]])) and y[2, 0].isnan() and y[2, 1] == 1.0


def test_an_offset_that_leaves_int32_is_an_error():
    with pytest.raises(Exception, match="int32 overflow detected"):
        offset_kernel[(1,)](torch.zeros(1, dtype=torch.int64), 32768)


def test_one_element_of_a_tile_that_leaves_int32_is_an_error():
    y = torch.zeros(16, dtype=torch.int32)
    tile_kernel[(1,)](y, 2**31 - 8)
    assert y[7] == 2**31 - 1
    tile_kernel[(1,)](y, 7 - 2**31)
    assert y[15] == -(2**31)
    with pytest.raises(Exception, match="int32 overflow detected for operation add"):
        tile_kernel[(1,)](y, 2**31 - 7)
    with pytest.raises(Exception, match="int32 overflow detected for operation sub"):
        tile_kernel[(1,)](y, 6 - 2**31)


def said(call, *arguments):
    """Types and shapes of the tensors that a call gives, or its refusal."""
    try:
        return [(str(x.type), x.dtype, [int(n) for n in x.shape], x.numel.value) for x in call(*arguments)]
    except Exception as error:
        return repr(error)


def test_what_is_kept_is_what_triton_works_out():
    """Of operands of all types, scalars, tiles and numbers, with pointers and without."""
    semantic = TritonSemantic(interpreter_builder)
    kinds = [tl.float16, tl.bfloat16, tl.float32, tl.int1, tl.int8, tl.int32, tl.uint32, tl.int64]
    operands = [semantic.scalar_constant(0, kind) for kind in kinds]
    kinds.append(tl.pointer_type(tl.float32))
    operands.append(tl.tensor(operands[-1].handle, kinds[-1]))
    operands += [semantic.splat(x, shape) for x in operands for shape in ([4, 1], [1, 8], [4, 8], [2, 8])]
    operands += [2, -1, 0.5]
    for pair in itertools.product(operands, operands):
        for asked in (False, False, True, False), (True, True, True, False), (False, False, True, True):
            ours = said(TritonSemantic.binary_op_type_checking_impl, semantic, *pair, *asked)
            assert ours == said(quickened._alike, semantic, *pair, *asked)
        if isinstance(pair[0], tl.tensor) and isinstance(pair[1], tl.tensor):
            ours = said(TritonSemantic.broadcast_impl_value, semantic, *pair)
            assert ours == said(quickened._broadcast, semantic, *pair)
            assert (pair[0].type == pair[1].type) == (str(pair[0].type) == str(pair[1].type))
    for kind in kinds:
        ours, tritons = tl.block_type(kind, [4, 8]), object.__new__(tl.block_type)
        quickened._init_block_type(tritons, kind, [4, 8])
        for name, value in vars(tritons).items():
            assert str(getattr(ours, name)) == str(value)
        assert ours == tritons and quickened.get_np_dtype(ours) == quickened._get_np_dtype(ours)


def test_the_fence_stops_a_read_past_the_end():
    x, y = fenced(torch.ones(5)), fenced(torch.zeros(5))
    copy_kernel[(1,)](x, y, 5, BLOCK_N=8, IS_MASKED=True)
    assert torch.equal(x, y)
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        copy_kernel[(1,)](x, y, 5, BLOCK_N=8, IS_MASKED=False)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSEGV
