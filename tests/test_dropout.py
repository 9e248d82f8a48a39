"""The portable random rule: known answers, and the same draws from torch and from C++."""

import math

import pytest
import torch

import tfm_kernels as tfk
from tfm_kernels import dropout

# Random123's known-answer vectors for philox4x32-10: counter, key, output.
KNOWN_ANSWERS = [
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize("counter, key, output", KNOWN_ANSWERS)
def test_known_answers(counter, key, output):
    words = dropout.philox(tuple(torch.tensor(c) for c in counter), tuple(torch.tensor(k) for k in key))
    assert tuple(int(word) for word in words) == output


def test_counter_layout():
    seed, row = 0x299F31D0A4093822, 0x13198A2E85A308D3
    key = (torch.tensor(seed & 0xFFFFFFFF), torch.tensor(seed >> 32))
    blocks = [
        dropout.philox(tuple(torch.tensor(c) for c in (block, row & 0xFFFFFFFF, row >> 32, 0)), key) for block in (0, 1)
    ]
    expected = [int(word) for block in blocks for word in block][:7]
    assert dropout.draws(torch.tensor(seed), torch.tensor([row]), 7).tolist() == [expected]


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("rows", [[0, 1, 2], [2**32 - 1, 2**32, 2**40 + 7]])
@pytest.mark.parametrize("columns", [1, 3, 4, 63, 64, 65, 200])
def test_cpp_draws_the_same(seed, rows, columns):
    """add_layer_norm's z shows the mask: z = dropout(1)."""
    rows = torch.tensor(rows)
    x = torch.ones(len(rows), columns)
    _, z = tfk.ops.add_layer_norm(
        x, torch.zeros_like(x), dropout_p=0.37, seed=torch.tensor(seed), dropout_rows=rows, backend="cpu"
    )
    keep = dropout.keep_mask(torch.tensor(seed), 0.37, rows, columns)
    assert torch.equal(z != 0, keep)
    assert torch.equal(z[keep], torch.full_like(z[keep], 1.0 / (1.0 - 0.37)))


def shown_masks(seed, p, rows, columns):
    """What each kernel that drops leaves of ones: a norm's z, ffn's hidden activation, attention's weights."""
    ones, eye = torch.ones(rows, columns), torch.eye(columns)
    drops = {"dropout_p": p, "seed": seed, "backend": "cpu"}
    yield tfk.ops.add_layer_norm(ones, torch.zeros_like(ones), **drops)[1] != 0
    yield tfk.ops.ffn(ones[:, :1], eye[:, :1] * 0 + 1, None, eye, None, **drops) != 0
    zeros = torch.zeros(1, 1, max(rows, columns), 1)
    yield tfk.ops.attention(zeros[:, :, :rows], zeros[:, :, :columns], eye[None, None], **drops)[0, 0] != 0


@pytest.mark.parametrize("rows", [5, 70])
def test_a_draw_that_is_the_bound_is_kept(rows):
    """And dropped by the next larger p; a p beside 1 drops all."""
    seed = torch.tensor(20261121)
    draws = dropout.draws(seed, torch.arange(rows), 66)
    p = int(draws[3, 41]) / 2**32
    for larger in (p, math.nextafter(p, 1.0)):
        keep = dropout.keep_mask(seed, larger, torch.arange(rows), 66)
        assert keep[3, 41] == (larger == p)
        assert all(torch.equal(mask, keep) for mask in shown_masks(seed, larger, rows, 66))
    assert not any(mask.any() for mask in shown_masks(seed, 1 - 2.0**-40, rows, 66))


def test_keep_rate_by_row_and_column():
    n, p = 512, 0.1
    keep = dropout.keep_mask(torch.tensor(1234), p, torch.arange(n), n).double()
    sigma = (p * (1 - p)) ** 0.5
    for mean, count in ((keep.mean(), n * n), (keep.mean(0), n), (keep.mean(1), n)):
        assert (((mean - (1 - p)) / (sigma / count**0.5)).abs() < 4.5).all()


def test_threshold_and_scale_at_the_ends():
    assert dropout.threshold(0.0) == 0 and dropout.threshold(1.0) == 2**32
    assert dropout.keep_scale(0.0) == 1.0 and dropout.keep_scale(1.0) == 0.0
    assert dropout.threshold(2.0**-40) == 1


def test_seed_follows_manual_seed():
    torch.manual_seed(7)
    first, second = dropout.draw_seed("cpu"), dropout.draw_seed("cpu")
    torch.manual_seed(7)
    assert torch.equal(first, dropout.draw_seed("cpu")) and not torch.equal(first, second)
    assert first.dtype == torch.int64 and first.shape == ()


def test_attention_rows():
    assert dropout.attention_rows(2, 3, 4, "cpu")[1, 2, 3] == (1 * 3 + 2) * 4 + 3
