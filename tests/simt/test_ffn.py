"""ffn's CUDA kernels on the CPU: the numeric contract, tiles, cut sums, dropout masks, tracing, refusals."""

import pytest
import torch

import tfm_kernels as tfk
from tests.cases import report_case
from tests.ffn_semantics import *  # noqa: F403  (the tests that every backend has)
from tests.ffn_semantics import DTYPES, FFN, block, every_level, randn
from tests.float64_errors import frobenius_errors
from tfm_kernels.testing import assert_contract
from tfm_kernels.testing.contract import run


@pytest.fixture
def backend():
    return "cuda"


@pytest.fixture
def refusal():
    return RuntimeError


def marked(case):
    """float32 is multiplied by threads, one by one: seconds for a case of many products."""
    size = case.levels
    slow = size["dtype"] == "f32" and torch.Size(size["rows"]).numel() * size["e"] * size["f"] > 2e6
    return pytest.param(case, id=case.id, marks=pytest.mark.slow if slow else ())


@pytest.mark.parametrize("case", [marked(case) for case in FFN])
def test_contract(case, simt):
    before = simt.launches()
    report_case(case, "cuda").raise_broken()
    assert simt.launches() > before


def test_there_are_enough_cases():
    quick = [case for case in FFN if not marked(case).marks]
    assert len(quick) >= 240 and len(FFN) >= 260
    every_level(quick)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gated", [False, True])
def test_no_tile_changes_a_bit(gated, dtype, simt):
    """One multiprocessor takes the largest tiles, several to a block; many take small ones. Sums have one order."""
    given = block(150, 40, 136, 72, dtype, gated)
    simt.configure(1, multiprocessors=1, resident=1)
    assert_contract("ffn", given, "cuda")
    large = run("ffn", given, "cuda")
    simt.configure(2, multiprocessors=64, resident=3)
    small = run("ffn", given, "cuda", douts=large.douts)
    assert torch.equal(small.outputs["y"], large.outputs["y"])
    for name, t in large.grads.items():
        assert torch.equal(small.grads[name], t), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cut_sums(dtype, simt):
    """Weights' gradients in parts of k, the last one shorter, and sums over rows in runs."""
    simt.configure(3, multiprocessors=3, resident=2)
    before = simt.launches()
    given = block(1300, 8, 24, 10, dtype, gated=True)
    assert_contract("ffn", given, "cuda")
    every = 2 + (1 + 1) + 3 * 2 + 1 + 2 + 2  # y; dh, dx; three weights in parts; db1; the gate's bias and db2 in runs
    assert (simt.launches() - before) % every == 0


def test_float64_is_refused_in_words():
    x, w1, w2 = randn(2, 3), randn(4, 3), randn(3, 4)
    with pytest.raises(tfk.BackendError, match="has no float64 kernels"):
        tfk.ops.ffn(x.double(), w1.double(), None, w2.double(), None, backend="cuda")
    assert "-> cuda" not in tfk.explain("ffn", x, w1, None, w2, None)


@pytest.mark.parametrize("sizes", [(16, 2048, 64, 48), (16, 64, 2048, 48), (2048, 32, 64, 48)], ids=str)
def test_long_float32_sums_are_made_of_pieces(sizes):
    """One chain of 2048 products loses 7e-7; rows, which are also cut in parts, 4e-7."""
    errors = frobenius_errors("ffn", block(*sizes), "cuda")
    assert max(errors.values()) < 3.2e-7, errors
