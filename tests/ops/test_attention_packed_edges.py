"""Packed attention on the CPU: segments of keys alone, threads that share keys, what the operator itself refuses."""

import pytest
import torch

from tests.threads import on_threads
from tfm_kernels.testing import assert_contract

FWD = torch.ops.tfm_kernels.attention_fwd_cpu
FAR = [-(2**62), 2**62, -(2**62), 2**62]


def packed(queries, keys, heads=2, key_heads=2):
    make = torch.Generator().manual_seed(3)
    ends = lambda lengths: torch.tensor([0, *lengths]).cumsum(0)
    return {
        "query": torch.randn(sum(queries), heads, 16, generator=make),
        "key": torch.randn(sum(keys), key_heads, 16, generator=make),
        "value": torch.randn(sum(keys), key_heads, 16, generator=make),
        "cu_seqlens_q": ends(queries),
        "cu_seqlens_k": ends(keys),
        "max_seqlen_q": max(queries),
        "max_seqlen_k": max(keys),
    }


@pytest.mark.parametrize("queries, keys", [((5, 0, 3), (5, 4, 3)), ((5, 3), (5, 0)), ((5, 0), (9, 70))])
def test_segments_without_queries_or_keys_behind_others(queries, keys):
    assert_contract("attention_varlen", packed(queries, keys), "cpu")


@pytest.mark.parametrize("key_heads", [2, 1])
def test_threads_that_share_the_keys(key_heads):
    with on_threads(4):
        assert_contract("attention_varlen", packed((90, 30), (600, 300), 2, key_heads), "cpu")


@pytest.mark.parametrize(
    "ends, longest", [([1, 2, 6], 6), ([0, 2, 5], 6), ([0, 7, 6], 7), ([0, 2, 6], 3), ([0, 6], 5), ([0, -1, 6], 7)]
)
def test_the_operator_refuses_segments_that_would_read_outside(ends, longest):
    q, right = torch.zeros(6, 2, 4), torch.tensor([0, 6] if len(ends) == 2 else [0, 3, 6])
    for cu_q, cu_k, max_q, max_k in ((torch.tensor(ends), right, longest, 6), (right, torch.tensor(ends), 6, longest)):
        with pytest.raises(RuntimeError, match="cu_seqlens must start at 0"):
            FWD(q, q, q, None, None, None, cu_q, cu_k, max_q, max_k, FAR, 1.0, 0.0, None, True)


def test_the_operator_refuses_lengths_that_would_read_outside():
    q, ends = torch.zeros(2, 1, 3, 4), torch.tensor([0, 3])
    for lengths in ([3, 4], [-1, 3]):
        with pytest.raises(RuntimeError, match="key_lengths must lie in"):
            FWD(q, q, q, None, None, torch.tensor(lengths), None, None, 3, 3, FAR, 1.0, 0.0, None, True)
    flat = torch.zeros(3, 1, 4)
    with pytest.raises(RuntimeError, match="packed calls take neither"):
        FWD(flat, flat, flat, None, None, torch.tensor([3]), ends, ends, 3, 3, FAR, 1.0, 0.0, None, True)
