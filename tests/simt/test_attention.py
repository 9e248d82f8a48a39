"""Attention's CUDA kernels on the CPU: the numeric contract, masks, padding, dropout, tracing, refusals."""

import pytest
import torch

from tests.attention_cases import assert_enough_cases, marked_cases
from tests.attention_semantics import *  # noqa: F403  (the tests that every backend has)
from tests.attention_semantics import SEED, WIDTHS, assert_many_tiles, assert_wide_heads, named, qkv, randn
from tests.cases import report_case
from tests.float64_errors import frobenius_errors
from tfm_kernels import Mask

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


# queries, keys, heads, key heads, and what is the most that the output and the gradients may lose. Gradients make the
# weights anew from lse, which float32 rounds: of 2000 keys that alone is 3e-7.
LONG = {"keys": (3, 2000, 4, 2, 4e-7, 7e-7), "queries": (2000, 8, 1, 1, 2e-7, 4e-7)}


@pytest.mark.parametrize("width", [128, 256])
@pytest.mark.parametrize("of", LONG)
def test_long_float32_sums_are_made_of_pieces(of, width):
    """One chain of 2000 products loses 8e-7 and more, twice what PyTorch's own float32 products lose on a GPU."""
    *shape, out_bound, bound = LONG[of]
    queries, keys, heads, key_heads = shape
    inputs = named(*qkv(1, heads, key_heads, queries, keys, width, width), bias=randn(1, heads, queries, keys, seed=3))
    if of == "keys":
        inputs["mask"] = Mask.causal("bottom_right")
    errors = frobenius_errors("attention", {**inputs, "dropout_p": 0.1, "seed": SEED}, "cuda")
    assert errors.pop("out") < out_bound and max(errors.values()) < bound, errors
