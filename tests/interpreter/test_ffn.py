"""ffn's Triton kernels, interpreted: the numeric contract, every tile, cut sums, dropout masks, refusals."""

import pytest
import torch

import tfm_kernels as tfk
from tests.cases import report_case
from tests.ffn_semantics import *  # noqa: F403  (the tests that every backend has)
from tests.ffn_semantics import DTYPES, FFN, block, every_level, randn
from tests.interpreter.launches import chosen
from tfm_kernels import _library
from tfm_kernels.testing import assert_contract
from tfm_kernels.triton import _gemm, _launch, ffn_bwd, ffn_fwd


@pytest.fixture
def backend():
    return "triton"


@pytest.fixture
def refusal():
    return ValueError


def steps(case):
    """Tiles of the call's products times their steps along k, about: what the interpreter's time follows."""
    size, eo = case.levels, case.levels["e"] if case.levels["eo"] == "same" else case.levels["eo"]
    rows, deep = torch.Size(size["rows"]).numel(), 16 if size["dtype"] == "f32" else 64
    tile = 64 if deep == 64 or not (size["e"] % 8 or size["f"] % 8 or eo % 8) else 32
    count = lambda n, by=tile: -(-n // by)
    m, e, f, o = count(rows), count(size["e"]), count(size["f"]), count(eo)
    forward = m * f * count(size["e"], deep) + m * o * count(size["f"], deep)
    return (forward + m * f * count(eo, deep) + f * (e + o) * count(rows, deep)) * (1 + bool(size["gate"]))


def marked(case):
    return pytest.param(case, id=case.id, marks=pytest.mark.slow if steps(case) > 45 else ())


@pytest.mark.parametrize("case", [marked(case) for case in FFN])
def test_contract(case):
    report_case(case, "triton").raise_broken()


def test_there_are_enough_cases():
    quick = [case for case in FFN if not marked(case).marks]
    assert len(quick) >= 150 and len(FFN) >= 260
    every_level(quick)


@pytest.fixture
def launches(monkeypatch):
    picks = [(module, "pick_config") for module in (_gemm, ffn_fwd, ffn_bwd)]
    return chosen(monkeypatch, *picks, (_gemm, "pick_split"))


FEW = [(torch.bfloat16, True), (torch.float32, False)]
REST = [(torch.bfloat16, False), (torch.float32, True), (torch.float16, False), (torch.float16, True)]


@pytest.mark.parametrize("dtype, gated", [*FEW, *(pytest.param(*p, marks=pytest.mark.slow) for p in REST)], ids=str)
def test_largest_tiles_and_few_programs(dtype, gated, launches, monkeypatch):
    """A GPU of one multiprocessor takes the largest tile, and several to a program."""
    monkeypatch.setattr(_launch, "MULTIPROCESSORS", {9: 1})
    assert_contract("ffn", block(200, 40, 320, 72, dtype, gated), "triton")
    wide = 128 if dtype == torch.float32 else 256
    first = (64, 128) if dtype != torch.float32 else (128, 128)
    assert launches == {
        ("_gemm", 128, wide, False), ("ffn_fwd", 128, 64 if gated else 128, False), ("ffn_bwd", *first, False)
    }  # fmt: skip


def test_largest_tile_without_gate_and_dropout(launches, monkeypatch):
    """The backward has one of its own."""
    monkeypatch.setattr(_launch, "MULTIPROCESSORS", {9: 1})
    assert_contract("ffn", block(200, 40, 320, 72, torch.bfloat16) | {"dropout_p": 0.0}, "triton")
    assert ("ffn_bwd", 128, 128, False) in launches


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cut_sums(dtype, launches, monkeypatch):
    """Weights' gradients over more rows than one part holds, the last one shorter."""
    monkeypatch.setattr(_gemm, "LEAST_K", 64)
    assert_contract("ffn", block(300, 16, 24, 8, dtype, gated=True), "triton")
    assert ("_gemm", 128, 128, True) in launches


def test_sums_over_many_rows():
    """db2 by several programs, whose sums are added by a second launch."""
    assert_contract("ffn", block(1100, 8, 8, 8, torch.bfloat16), "triton")


def test_what_it_cannot_run():
    with pytest.raises(tfk.BackendError, match="has no float64 kernels"):
        tfk.ops.ffn(
            *(t.double() for t in (randn(2, 3), randn(4, 3))), None, randn(3, 4).double(), None, backend="triton"
        )
    assert _library.triton_interprets() and "-> triton" not in tfk.explain(
        "ffn", randn(2, 3), randn(4, 3), None, randn(3, 4), None
    )
