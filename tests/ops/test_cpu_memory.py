"""The CPU's kernels read no byte behind a tensor: every argument ends at a protected page, and a read ends the process.

Where rows are few, a tile's last feature or row stands in for those that are not there: numbers alone do not show it.
"""

import mmap
import sys

import pytest
import torch

from tests.cases import CASES
from tests.fences import fenced
from tests.ffn_semantics import assert_no_byte_outside, randn
from tfm_kernels.testing import assert_contract, contract_report

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or mmap.PAGESIZE != 4096, reason="tests.fences knows Linux's pages of 4 KiB"
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
EVERY = 47  # of the contract's cases; a prime sees all that varies


def between_fences(given):
    return {name: fenced(t) if isinstance(t, torch.Tensor) else t for name, t in given.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 6, 9, 17, 33, 70])
def test_linear(rows, dtype):
    for width, features in ((1, 1), (17, 3), (70, 23), (140, 97)):
        given = {"x": randn(rows, width, dtype=dtype), "weight": randn(features, width, dtype=dtype, scale=0.1)}
        given |= {"bias": randn(features, dtype=dtype) if rows % 2 else None}
        assert_contract("linear", between_fences(given), "cpu", backward=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize(
    "sizes", [(1, 1, 1, 1), (3, 9, 67, 5), (7, 40, 98, 17), (19, 30, 34, 6), (65, 9, 67, 5)], ids=str
)
def test_ffn(sizes, save, dtype):
    assert_no_byte_outside("cpu", sizes, save, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(1, 5, 3, 7), (1, 70, 40, 24), (1, 33, 80, 65), (9, 67, 17, 33)], ids=str)
def test_attention(sizes, dtype):
    queries, keys, width, value_width = sizes
    given = {"query": randn(2, 4, queries, width, dtype=dtype), "bias": randn(1, 4, 1, keys, dtype=dtype, seed=3)}
    given |= {"key": randn(2, 2, keys, width, dtype=dtype, seed=1)}
    given |= {"value": randn(2, 2, keys, value_width, dtype=dtype, seed=2)}
    assert_contract("attention", between_fences(given), "cpu")


@pytest.mark.parametrize("case", CASES[::EVERY], ids=lambda case: case.id)
def test_case(case):
    contract_report(case.op, between_fences(case.inputs()), "cpu", douts=case.douts).raise_broken()
