"""Attention's Triton kernels, interpreted: the numeric contract, masks, padding, dropout, tracing, refusals."""

import pytest
import torch

import tfm_kernels as tfk
from tests.attention_cases import assert_enough_cases, marked_cases
from tests.attention_semantics import *  # noqa: F403  (the tests that every backend has)
from tests.attention_semantics import WIDTHS, assert_many_tiles, assert_wide_heads
from tests.cases import report_case

# float32 is multiplied without matrix units: its many small tiles take the interpreter half a minute
HEAVY = (pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16, torch.float16)
MARKED = marked_cases(of_float32=8)


@pytest.fixture
def backend():
    return "triton"


@pytest.mark.parametrize("case", MARKED)
def test_contract(case):
    report_case(case, "triton").raise_broken()


def test_there_are_enough_cases():
    assert_enough_cases(MARKED)


@pytest.mark.parametrize("dtype", HEAVY, ids=str)
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_wide_heads(widths, dtype):
    assert_wide_heads(widths, dtype, "triton")


@pytest.mark.parametrize("dtype", HEAVY, ids=str)
def test_many_tiles(dtype):
    assert_many_tiles(dtype, "triton")


def test_the_output_may_be_written_into():
    """As what PyTorch's own attention returns: autograd keeps track of no view, though it is a transposed one."""
    q, other = torch.randn(1, 2, 5, 16), torch.randn(16, requires_grad=True)
    with torch.no_grad():
        out = tfk.ops.attention(q, q, q, backend="triton")
    expected = out + other
    assert torch.equal(out.add_(other), expected) and out.requires_grad
