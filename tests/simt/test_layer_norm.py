"""The norms' CUDA kernels on the CPU: the numeric contract, dropout masks, tracing, refusals."""

import pytest
import torch

import tfm_kernels as tfk
from tests.cases import report_case
from tests.layer_norm_semantics import *  # noqa: F403  (the tests that every backend has)
from tests.layer_norm_semantics import (
    DTYPES,
    NORMS,
    OPS,
    PROBABILITIES,
    X,
    assert_sum_need_not_be_kept,
    calls,
    forward,
    randn,
    test_dropout_masks_are_those_of_the_other_backends,
)
from tfm_kernels.testing import assert_contract

FIRST = 150  # all pairs have come several times by then


@pytest.fixture
def backend():
    return "cuda"


@pytest.fixture
def refusal():
    return RuntimeError


def marked(index, case):
    return pytest.param(case, id=case.id, marks=pytest.mark.slow if index >= FIRST else ())


@pytest.mark.parametrize("case", [marked(index, case) for index, case in enumerate(NORMS)])
def test_contract(case, simt):
    before = simt.launches()
    report_case(case, "cuda").raise_broken()
    assert simt.launches() - before == (4 if 0 not in case.levels["rows"] else 0)  # both ways, twice


def test_there_are_enough_cases():
    quick = NORMS[:FIRST]
    assert len(quick) >= 80 and len(NORMS) >= 300 and {case.op for case in quick} == set(OPS)


LAUNCHES = [
    (37, 40), (5, 509), (5, 512), (37, 520), (5, 1023), (7, 1024), (3, 1025), (5, 2056), (3, 8192), (3, 8193),
    (2, 16384), (3, 16392), (2, 16385),
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows, width", LAUNCHES)
def test_every_launch(rows, width, dtype, simt):
    """Either side of where pick() changes, rows that start at whole packs and rows that do not, more than blocks."""
    simt.configure(seed=width, multiprocessors=2, resident=3)
    for op, inputs in calls(width, dtype, rows):
        assert_contract(op, inputs, "cuda")
    assert_sum_need_not_be_kept("cuda", width, dtype, rows)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [32767, 65536])
def test_the_longest_rows(width, dtype):
    for op, inputs in calls(width, dtype, rows=3):
        assert_contract(op, inputs, "cuda")


@pytest.mark.parametrize("x, residual", [(a, b) for a in DTYPES for b in DTYPES if a != b], ids=str)
@pytest.mark.parametrize("width", [200, 203, 1028])
def test_mixed_types(width, x, residual):
    inputs = {"x": randn(5, width, dtype=x), "residual": randn(5, width, dtype=residual, seed=1)}
    assert_contract("add_layer_norm", {**inputs, "weight": randn(width, seed=2)}, "cuda")


@pytest.mark.parametrize("p", PROBABILITIES)
def test_dropout_masks_of_blocks(p):
    test_dropout_masks_are_those_of_the_other_backends("cuda", 1030, p)


def test_a_weight_of_another_16_bit_type_is_refused():
    with pytest.raises(RuntimeError, match="layer_norm_fwd_cuda: .*weight must be BFloat16, got Half"):
        forward(X.bfloat16(), weight=torch.ones(8).half())("cuda")


def test_float64_is_refused_in_words():
    with pytest.raises(tfk.BackendError, match="has no float64 kernels"):
        tfk.ops.layer_norm(X.double(), backend="cuda")
    assert "-> cuda" not in tfk.explain("layer_norm", X)
