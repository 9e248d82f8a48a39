"""Attention's CUDA kernels on the CPU: the numeric contract, masks, padding, dropout, tracing, refusals."""

import pytest
import torch

from tests.attention_cases import assert_enough_cases, marked_cases
from tests.attention_semantics import *  # noqa: F403  (the tests that every backend has)
from tests.attention_semantics import WIDTHS, assert_many_tiles, assert_wide_heads
from tests.cases import report_case

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MARKED = marked_cases(of_float32=2)


@pytest.fixture
def backend():
    return "cuda"


@pytest.mark.parametrize("case", MARKED)
def test_contract(case, simt):
    before = simt.launches()
    report_case(case, "cuda").raise_broken()
    (queries, keys), nothing = case.levels.get("lengths_qk", (1, 1)), case.levels.get("segments") in ("no_keys", "none")
    if queries and keys and not nothing and case.levels["heads"][0]:
        wants_dbias = case.levels.get("bias", "none") != "none"
        assert simt.launches() - before == 2 * (1 + 3 + wants_dbias)  # both ways, twice


def test_there_are_enough_cases():
    assert_enough_cases(MARKED)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_wide_heads(widths, dtype):
    assert_wide_heads(widths, dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_tiles(dtype):
    assert_many_tiles(dtype, "cuda")
