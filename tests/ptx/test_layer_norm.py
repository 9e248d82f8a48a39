"""The norms' compiled kernels, Triton's and csrc/cuda's: long rows, constant rows, rows far from 0, dropout masks."""

import pytest
import torch

from tests.layer_norm_semantics import (  # noqa: F401  (some of the tests that every backend has)
    assert_sum_need_not_be_kept,
    calls,
    test_a_row_too_far_from_zero_for_its_factor,
    test_constant_row_gives_the_bias,
    test_dropout_masks_are_those_of_the_other_backends,
    test_sums_are_rounded_once_to_the_parameters_type,
    test_the_sum_need_not_be_kept,
    test_views_give_the_bits_of_contiguous_tensors,
)
from tfm_kernels.testing import assert_contract

SLOW = pytest.mark.slow
LONG = [  # 8200: sums over rows are another launch's; 16392: rows are walked in pieces
    (2049, torch.float32), (2049, torch.bfloat16), (4096, torch.float32), (4096, torch.bfloat16),
    (8200, torch.bfloat16), (16392, torch.bfloat16),
    *(pytest.param(width, torch.float32, marks=SLOW) for width in (8200, 16392, 16385)),
    pytest.param(16385, torch.bfloat16, marks=SLOW),
]  # fmt: skip


@pytest.mark.parametrize("width, dtype", LONG, ids=str)
def test_long_rows(width, dtype, backend):
    for op, inputs in calls(width, dtype, rows=11 if width > 8192 else 3):
        assert_contract(op, inputs, backend)
    assert_sum_need_not_be_kept(backend, width, dtype)
