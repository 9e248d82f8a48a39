"""One query, which reads keys and values where they lie; and who is chosen where there are few."""

import importlib

import pytest
import torch

import tfm_kernels as tfk
from tfm_kernels.testing import assert_contract

ATTENTION = importlib.import_module("tfm_kernels.ops.attention")  # tfk.ops.attention is the function
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# (batch, heads, key heads, keys, D, Dv): whole vectors, parts of one, less than one; more keys than a tile holds
SIZES = [(2, 4, 4, 70, 64, 64), (1, 4, 2, 33, 40, 24), (2, 2, 1, 5, 3, 7), (1, 2, 2, 1100, 80, 65)]


def one_query(batch, heads, key_heads, keys, width, value_width, dtype):
    make = torch.Generator().manual_seed(7)
    rows = lambda time, count, last: torch.randn(batch, time, count, last, generator=make).to(dtype).transpose(1, 2)
    return {
        "query": rows(1, heads, width),
        "key": rows(keys, key_heads, width),
        "value": rows(keys, key_heads, value_width),
    }


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_query_holds_the_contract(dtype, sizes):
    assert_contract("attention", one_query(*sizes, dtype), "cpu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("extra", ["lengths", "keep", "bias", "dropout"])
def test_one_query_with_all_that_a_call_may_have(dtype, extra):
    batch, heads, _, keys, *_ = sizes = (2, 4, 2, 70, 40, 24)
    inputs = one_query(*sizes, dtype)
    if extra == "lengths":
        inputs["mask"] = tfk.Mask.lengths(torch.tensor([70, 19]))
    elif extra == "keep":
        inputs["mask"] = tfk.Mask.keep(
            torch.arange(keys).view(1, 1, 1, keys) % 3 != torch.arange(batch).view(-1, 1, 1, 1)
        )
    elif extra == "bias":
        inputs["bias"] = torch.randn(1, heads, 1, keys, generator=torch.Generator().manual_seed(1)).to(dtype)
    else:
        inputs |= {"dropout_p": 0.3, "seed": torch.tensor(11)}
    assert_contract("attention", inputs, "cpu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_query_never_reads_what_is_hidden(dtype):
    inputs = one_query(2, 4, 4, 70, 40, 24, dtype)
    mask = tfk.Mask.lengths(torch.tensor([70, 19]))
    clean = tfk.ops.attention(**inputs, mask=mask, backend="cpu")
    for name in ("key", "value"):
        inputs[name][1, :, 19:] = float("nan")
    assert torch.equal(tfk.ops.attention(**inputs, mask=mask, backend="cpu"), clean)


@pytest.mark.parametrize(
    "dtype, tiles, training, queries, chosen",
    [
        (torch.float32, False, False, 47, "aten"),
        (torch.float32, False, False, 48, "cpu"),
        (torch.float32, True, True, 47, "aten"),
        (torch.float32, True, True, 48, "cpu"),
        (torch.bfloat16, False, False, 1, "cpu"),
        (torch.bfloat16, True, False, 47, "aten"),
        (torch.bfloat16, True, False, 48, "cpu"),
        (torch.bfloat16, True, True, 7, "aten"),
        (torch.bfloat16, True, True, 8, "cpu"),
        (torch.float16, True, False, 2, "cpu"),
    ],
)
def test_small_plain_calls_are_left_to_pytorch(monkeypatch, dtype, tiles, training, queries, chosen):
    monkeypatch.setattr(ATTENTION._library, "bf16_tiles", tiles)
    monkeypatch.setattr(ATTENTION._library, "nearest", ATTENTION._library.XEON)
    q, k, v = (torch.zeros(1, 2, queries, 8, dtype=dtype, requires_grad=training) for _ in range(3))
    plain = ATTENTION.describe(q, k, v)
    assert ATTENTION.prefer(plain)[0] == chosen
    for masked in (tfk.Mask.causal(), tfk.Mask.lengths(torch.tensor([queries]))):
        assert ATTENTION.prefer(ATTENTION.describe(q, k, v, masked))[0] == "cpu"
