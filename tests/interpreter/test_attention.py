"""Attention's Triton kernels, interpreted: the numeric contract, masks, padding, dropout, tracing, refusals."""

import pytest
import torch

from tests.attention_cases import assert_enough_cases, marked_cases
from tests.attention_semantics import (  # noqa: F401  (the tests that every backend has)
    WIDTHS,
    assert_many_tiles,
    assert_wide_heads,
    test_backward_of_another_backend,
    test_batch_and_heads_are_independent_and_padding_is_unread,
    test_compiled,
    test_dropout_masks_are_those_of_the_other_backends,
    test_nan_where_it_is_seen,
    test_nothing_in_nothing_out,
    test_opcheck,
    test_packed_dropout_is_the_padded_calls,
    test_rows_that_see_nothing,
    test_scale,
    test_the_least_finite_bias_gives_the_mean,
    test_the_operator_itself_refuses_what_would_read_outside,
    test_traced_for_a_gpu_that_is_not_there,
    test_views_give_the_bits_of_contiguous_tensors,
    test_what_it_cannot_is_said,
    test_what_lies_in_padding_changes_no_bit,
    test_who_sees_whom,
    test_wrong_lengths_read_nothing_outside,
)
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
