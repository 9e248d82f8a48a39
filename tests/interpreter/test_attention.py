"""Attention's Triton kernels, interpreted: the numeric contract, masks, padding, dropout, tracing, refusals."""

import pytest
import torch

import tfm_kernels as tfk
from tests import attention_checks as checks
from tests.attention_checks import ATTENTION, DTYPES, HIDDEN_TAIL, MASKS, NAN, OPS, REFUSED, qkv
from tests.cases import report_case

# float32 is multiplied without matrix units: its many small tiles take the interpreter half a minute
HEAVY = (pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16, torch.float16)
MOST = 8  # what a quick case may cost
FIRST = {"attention": 330, "attention_varlen": 60}


def cost(case):
    """Tiles of pairs that a case has at most; float32 has smaller ones."""
    small = 8 if case.levels["dtype"] == "f32" else 1
    if case.op == "attention_varlen":
        pairs = {"tiles": 6, "many": 13}.get(case.levels["segments"], 4)
        return small * pairs * case.levels["heads"][0] // 4
    (queries, keys), (batch, heads, _) = case.levels["lengths_qk"], case.levels["heads"]
    return small * batch * heads * -(-queries // 64) * -(-keys // 64)


def marked(index, case):
    slow = index >= FIRST[case.op] or cost(case) > MOST
    return pytest.param(case, id=case.id, marks=pytest.mark.slow if slow else ())


def numbered():
    for op in OPS:
        yield from enumerate(case for case in ATTENTION if case.op == op)


@pytest.mark.parametrize("case", [marked(index, case) for index, case in numbered()])
def test_contract(case):
    report_case(case, "triton").raise_broken()


def test_there_are_enough_cases():
    quick = [case for index, case in numbered() if not marked(index, case).marks]
    assert len(quick) >= 150 and len(ATTENTION) >= 500
    checks.every_level(quick)


@pytest.mark.parametrize("dtype", HEAVY, ids=str)
@pytest.mark.parametrize("width, value_width", [(96, 96), (200, 200), (256, 256), (129, 31), (1, 256)])
def test_wide_heads(width, value_width, dtype):
    checks.wide_heads("triton", width, value_width, dtype)


@pytest.mark.parametrize("dtype", HEAVY, ids=str)
def test_many_tiles(dtype):
    checks.many_tiles("triton", dtype)


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("mask", MASKS)
def test_who_sees_whom(mask, p):
    checks.who_sees_whom("triton", mask, p)


@pytest.mark.parametrize("kind", [*HIDDEN_TAIL, "bias"])
@pytest.mark.parametrize("bad", [NAN, float("inf")])
def test_what_lies_in_padding_changes_no_bit(kind, bad):
    checks.what_lies_in_padding_changes_no_bit("triton", kind, bad)


def test_nan_where_it_is_seen():
    checks.nan_where_it_is_seen("triton")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_see_nothing(dtype):
    checks.rows_that_see_nothing("triton", dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_least_finite_bias_gives_the_mean(dtype):
    checks.the_least_finite_bias_gives_the_mean("triton", dtype)


@pytest.mark.parametrize("scale", [0.0, 1e-40, -1.0])
@pytest.mark.parametrize("with_bias", [False, True])
def test_scale(scale, with_bias):
    checks.scale("triton", scale, with_bias)


@pytest.mark.parametrize("shape", [(2, 4, 0, 7), (2, 4, 5, 0), (0, 4, 5, 7)], ids=str)
def test_nothing_in_nothing_out(shape):
    checks.nothing_in_nothing_out("triton", shape)


@pytest.mark.parametrize("p", [2.0**-33, 0.1, 0.5, 0.9999, 1.0])
@pytest.mark.parametrize("keys", [7, 64, 130])
def test_dropout_masks_are_those_of_the_other_backends(keys, p):
    checks.dropout_masks("triton", keys, p)


def test_packed_dropout_is_the_padded_calls():
    checks.packed_dropout_is_the_padded_calls("triton")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views_give_the_bits_of_contiguous_tensors(dtype):
    checks.views("triton", dtype)


def test_batch_and_heads_are_independent_and_padding_is_unread():
    checks.batch_and_heads_are_independent_and_padding_is_unread("triton")


def test_opcheck():
    checks.opcheck("triton")


def test_compiled():
    checks.compiled("triton")


def test_traced_for_a_gpu_that_is_not_there():
    checks.traced_for_a_gpu_that_is_not_there("triton")


def test_backward_of_another_backend():
    checks.backward_of_another("triton")


@pytest.mark.parametrize("index", range(len(REFUSED)))
def test_the_operator_itself_refuses_what_would_read_outside(index):
    with pytest.raises(ValueError, match="attention_fwd_triton: "):
        REFUSED[index]("triton")


def test_wrong_lengths_read_nothing_outside():
    checks.wrong_lengths_read_nothing_outside("triton")


@pytest.mark.parametrize(
    "call, why",
    [
        (lambda: tfk.ops.attention(*(t.double() for t in qkv()), backend="triton"), "has no float64 kernels"),
        (lambda: tfk.ops.attention(*qkv(width=257), backend="triton"), "at most 256, got 257"),
    ],
)
def test_what_it_cannot_is_said(call, why):
    with pytest.raises(tfk.BackendError, match=why):
        call()
    words = tfk.explain("attention", *qkv())
    assert "-> cpu" in words and "not yet proven on a GPU" in words
