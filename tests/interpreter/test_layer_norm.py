"""The norms' Triton kernels, interpreted: the numeric contract, dropout masks, tracing, refusals."""

import pytest
import torch

import tfm_kernels as tfk
from tests.cases import report_case
from tests.layer_norm_semantics import *  # noqa: F403  (the tests that every backend has)
from tests.layer_norm_semantics import DTYPES, NORMS, OPS, X, assert_sum_need_not_be_kept, calls
from tfm_kernels import _library
from tfm_kernels.testing import assert_contract
from tfm_kernels.triton import _layer_norm_sums, layer_norm_bwd, layer_norm_fwd

FIRST = 120  # all pairs have come several times by then


@pytest.fixture
def backend():
    return "triton"


@pytest.fixture
def refusal():
    return ValueError


def elements(case):
    return torch.Size(case.levels["rows"]).numel() * case.levels["width"]


def marked(index, case):
    slow = index >= FIRST or elements(case) > 40_000
    return pytest.param(case, id=case.id, marks=pytest.mark.slow if slow else ())


@pytest.mark.parametrize("case", [marked(index, case) for index, case in enumerate(NORMS)])
def test_contract(case):
    report_case(case, "triton").raise_broken()


def test_there_are_enough_cases():
    quick = [case for index, case in enumerate(NORMS) if not marked(index, case).marks]
    assert len(quick) >= 100 and len(NORMS) >= 300
    assert {case.op for case in quick} == set(OPS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_n, width, apart", [(64, 129, 2), (64, 136, 1), (256, 200, 2), (256, 200, 0)])
def test_walks_and_shared_rows(block_n, width, apart, dtype, monkeypatch):
    """Long rows in pieces, many rows to one program, sums over rows apart: by small launches, which are not slow."""
    forward = layer_norm_fwd.Config(1 if block_n < width else 2, block_n, num_warps=1, max_registers=None)
    backward = layer_norm_bwd.Config(forward.block_m, block_n, 1, 2, 3, max_registers=None, holds_sums=not apart)
    sums = _layer_norm_sums.Config(2, 64, num_warps=1, num_stages=1, parts=apart, max_registers=128)
    monkeypatch.setattr(layer_norm_fwd, "pick_config", lambda *_: forward)
    monkeypatch.setattr(layer_norm_bwd, "pick_config", lambda *_: backward)
    monkeypatch.setattr(_layer_norm_sums, "pick_config", lambda *_: sums)
    for op, inputs in calls(width, dtype, rows=7):
        assert_contract(op, inputs, "triton")
    assert_sum_need_not_be_kept("triton", width, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [16385, 32769, 65536])
def test_rows_longer_than_registers(width, dtype):
    for op, inputs in calls(width, dtype, rows=2):
        assert_contract(op, inputs, "triton")


def test_float64_is_refused_in_words():
    with pytest.raises(tfk.BackendError, match="has no float64 kernels"):
        tfk.ops.layer_norm(X.double(), backend="triton")
    assert _library.triton_interprets() and "-> triton" not in tfk.explain("layer_norm", X)
