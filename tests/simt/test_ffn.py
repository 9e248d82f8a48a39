"""ffn's CUDA kernels on the CPU: the numeric contract, tiles, cut sums, dropout masks, tracing, refusals."""

import pytest
import torch

import tfm_kernels as tfk
from tests import ffn_checks as checks
from tests.cases import report_case
from tests.ffn_checks import DTYPES, FFN, NOTHING, PROBABILITIES, REFUSED, block, randn
from tfm_kernels.testing import assert_contract
from tfm_kernels.testing.contract import run


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
    checks.every_level(quick)


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
    every = 2 + (1 + 1) + 3 * 2 + 1 + 2  # y; dh, dx; three weights in parts; db1, db2 in runs
    assert (simt.launches() - before) % every == 0


def test_small_integers_are_exact():
    checks.small_integers_are_exact("cuda")


@pytest.mark.parametrize("hidden", [7, 64, 130])
@pytest.mark.parametrize("p", PROBABILITIES)
def test_dropout_masks_are_those_of_the_other_backends(hidden, p):
    checks.dropout_masks("cuda", hidden, p)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views_give_the_bits_of_contiguous_tensors(dtype):
    checks.views("cuda", dtype)


@pytest.mark.parametrize("sizes", NOTHING)
@pytest.mark.parametrize("recompute", [False, True])
def test_nothing_of_something(sizes, recompute):
    checks.nothing_of_something("cuda", sizes, recompute)


@pytest.mark.parametrize("gated", [False, True])
def test_any_subset_of_gradients(gated):
    checks.any_subset_of_gradients("cuda", gated)


@pytest.mark.parametrize("gated", [False, True])
def test_opcheck(gated):
    checks.opcheck("cuda", gated)


def test_traced_for_a_gpu_that_is_not_there():
    checks.traced_for_a_gpu_that_is_not_there("cuda")


@pytest.mark.parametrize("words", REFUSED)
def test_the_operators_themselves_refuse_what_would_read_outside(words):
    with pytest.raises(RuntimeError, match=f"ffn_[fb]wd_cuda: {words.split()[0]} (must|has)"):
        REFUSED[words]("cuda")


def test_float64_is_refused_in_words():
    x, w1, w2 = randn(2, 3), randn(4, 3), randn(3, 4)
    with pytest.raises(tfk.BackendError, match="has no float64 kernels"):
        tfk.ops.ffn(x.double(), w1.double(), None, w2.double(), None, backend="cuda")
    assert "-> cuda" not in tfk.explain("ffn", x, w1, None, w2, None)
