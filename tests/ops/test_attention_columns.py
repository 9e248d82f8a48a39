"""Keep matrices that leave one run of keys, or several, in each head: what lies outside is not touched."""

import pytest
import torch

import tfm_kernels as tfk
from tfm_kernels.testing import assert_contract

RUNS = {  # (first, end) of the keys that each of four heads sees
    "front": [(0, 9), (0, 17), (0, 40), (0, 70)],
    "back": [(61, 70), (33, 70), (1, 70), (0, 70)],
    "middle": [(5, 6), (20, 50), (3, 69), (64, 66)],
    "none": [(0, 0), (10, 20), (70, 70), (0, 70)],
}


@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("queries", [1, 5, 40])
@pytest.mark.parametrize("runs", RUNS, ids=str)
def test_runs_of_keys_that_differ_from_head_to_head(runs, queries, key_heads):
    make = torch.Generator().manual_seed(3)
    query = torch.randn(2, 4, queries, 24, generator=make)
    key, value = (torch.randn(2, key_heads, 70, 24, generator=make) for _ in range(2))
    keep = torch.zeros(2, 4, 1, 70, dtype=torch.bool)
    for head, (first, end) in enumerate(RUNS[runs]):
        keep[0, head, :, first:end] = True
        keep[1, 3 - head, :, first:end] = True
    assert_contract("attention", {"query": query, "key": key, "value": value, "mask": tfk.Mask.keep(keep)}, "cpu")
    by_pair = keep.expand(2, 4, queries, 70).clone()
    by_pair[:, :, queries // 2, ::2] = False
    assert_contract("attention", {"query": query, "key": key, "value": value, "mask": tfk.Mask.keep(by_pair)}, "cpu")
