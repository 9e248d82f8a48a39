"""Attention's Triton kernels, interpreted: the numeric contract, masks, padding, dropout, tracing, refusals."""

import pytest
import torch

import tfm_kernels as tfk
from tests.attention_cases import assert_enough_cases, marked_cases
from tests.attention_semantics import *  # noqa: F403  (the tests that every backend has)
from tests.attention_semantics import SEED, WIDTHS, assert_many_tiles, assert_wide_heads, direct, qkv
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


def test_the_output_may_be_written_into():
    """As what PyTorch's own attention returns: autograd keeps track of no view, though it is a transposed one."""
    q, other = torch.randn(1, 2, 5, 16), torch.randn(16, requires_grad=True)
    with torch.no_grad():
        out = tfk.ops.attention(q, q, q, backend="triton")
    expected = out + other
    assert torch.equal(out.add_(other), expected) and out.requires_grad


PACKED = {"q": torch.zeros(5, 4, 8), "k": torch.zeros(7, 2, 8), "v": torch.zeros(7, 2, 8)}
ENDS = {"cu_seqlens_q": torch.tensor([0, 5]), "cu_seqlens_k": torch.tensor([0, 7])}
NONE = {name: ends[:1] for name, ends in ENDS.items()}  # no sequence


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"dropout_p": 0.5, "seed": torch.tensor([1, 2])}, r"seed must have shape \(\), got \(2,\)"),
        ({"dropout_p": 0.5, "seed": torch.tensor(1.0)}, "seed must be one of"),
        (PACKED | {"cu_seqlens_q": ENDS["cu_seqlens_q"]}, "cu_seqlens_q and cu_seqlens_k go together"),
        ({"cu_seqlens_k": ENDS["cu_seqlens_k"]}, "cu_seqlens_q and cu_seqlens_k go together"),
        ({"q": torch.zeros(4, 5, 8)}, "query must have 4 dimensions"),
        (
            {"q": torch.zeros(2, 4, 5, 0), "k": torch.zeros(2, 2, 7, 0)},
            "query must have 4 dimensions, the last of 1 to",
        ),
        ({"k": torch.zeros(2, 0, 7, 8), "v": torch.zeros(2, 0, 7, 8)}, "query must have a multiple of key's 0 heads"),
        (PACKED | ENDS | {"cu_seqlens_k": torch.tensor([0, 3, 7])}, r"cu_seqlens_k must have shape \(2,\), got \(3,\)"),
        (PACKED | ENDS | {"cu_seqlens_q": torch.tensor([0.0, 5.0])}, "cu_seqlens_q must be one of"),
        (PACKED | {name: ends[:0] for name, ends in ENDS.items()}, "lengths must lie in"),
        (PACKED | NONE | {"max_seqlen_q": 2**30}, r"lengths must lie in \[0, 2\*\*30\), got 1073741824 and 7"),
        (PACKED | NONE | {"max_seqlen_k": 2**30}, r"lengths must lie in \[0, 2\*\*30\), got 5 and 1073741824"),
        (PACKED | ENDS | {"max_seqlen_q": -1}, "lengths must lie in"),
        (PACKED | ENDS | {"key_lengths": torch.tensor([7])}, "packed calls take neither bias, keep nor key_lengths"),
        ({"bias": torch.zeros(2, 4, 5)}, "bias must broadcast to"),
        ({"keep": torch.ones(1, 1, 5, 7, dtype=torch.uint8)}, "keep must be one of"),
        ({"key_lengths": torch.tensor([1.0, 2.0])}, "key_lengths must be one of"),
    ],
)
def test_what_the_operator_refuses_is_said(changed, sentence):
    with pytest.raises(ValueError, match=f"attention_fwd_triton: {sentence}"):
        direct("triton", **changed)


SAME = {
    "lengths of a column": {"key_lengths": torch.tensor([[7, 1], [3, 1]])[:, 0]},
    "a seed and no dropout": {"seed": SEED, "key_lengths": torch.tensor([7, 3])},
}


@pytest.mark.parametrize("name", SAME)
def test_what_is_the_same_call(name):
    plain = direct("triton", key_lengths=torch.tensor([7, 3]))
    for found, expected in zip(direct("triton", **SAME[name]), plain, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("queries", [5, 9])  # fewer and more than keys
def test_the_largest_window(queries):
    q, k, v = qkv(queries=queries)
    found, expected = (direct("triton", q, k, v, window=window * 2) for window in ([-(2**63), 2**63 - 1], [-99, 99]))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_ends_of_a_column():
    q, k, v = (torch.randn(*t.shape) for t in PACKED.values())
    turned = {name: torch.stack([ends, ends + 1], 1)[:, 0] for name, ends in ENDS.items()}
    for found, expected in zip(direct("triton", q, k, v, **turned), direct("triton", q, k, v, **ENDS), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", ["bias", "keep"])
def test_every_second_column_of_pairs(kind):
    wide = torch.randn(2, 1, 1, 32)
    pairs = (wide if kind == "bias" else wide > 0)[..., ::2]
    q, k, v = qkv(keys=16)
    found, expected = (direct("triton", q, k, v, **{kind: t}) for t in (pairs, pairs.contiguous()))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_keys_that_the_first_query_of_a_tile_does_not_see():
    """A row of a keep matrix that stands for all queries: later ones see what the band hides from the first."""
    keep = (torch.arange(7) > 0).expand(2, 1, 1, 7)
    q, k, v = qkv()
    found, expected = (
        direct("triton", q, k, v, keep=t, window=[-99, 0, -99, 99])
        for t in (keep, keep.expand(2, 1, 5, 7).contiguous())
    )
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
