"""No byte outside of a tensor is touched, offsets beyond 2**31 elements arrive, and no schedule changes a bit.

What the kernels write lies between protected pages in every test of this folder.
"""

import pytest
import torch

from tests.attention_memory import (
    ANYWHERE,
    BIASES,
    FAR,
    SEED,
    SIZES,
    apart,
    assert_no_byte_outside,
    assert_no_byte_outside_of_packed_tensors,
    both,
    both_of,
    randn,
    two_sequences,
)
from tests.fences import huge

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("sizes", [*SIZES, (40, 35, 136, 200)], ids=str)
@pytest.mark.parametrize("bias_shape", BIASES)
def test_no_byte_outside(bias_shape, sizes, dtype):
    assert_no_byte_outside("cuda", bias_shape, sizes, dtype)


def test_no_byte_outside_of_packed_tensors():
    assert_no_byte_outside_of_packed_tensors("cuda")


@pytest.fixture(scope="module")
def space():
    """Room for a tensor of more than 2**31 elements, taken up only where it is written."""
    return huge(FAR + 2**17, torch.float16)


@pytest.mark.parametrize("name", ["query", "key", "value", "bias", "keep", "dout"])
def test_sequences_far_apart(name, space):
    """Each argument in turn has more than 2**31 elements between its two sequences."""
    given = two_sequences()
    expected = both_of("cuda", given)
    given[name] = apart(space, given[name])
    for a, b in zip(both_of("cuda", given), expected, strict=True):
        assert torch.equal(a, b)


def everything(dtype, width):
    """Tiles hidden, cut and whole; keep, lengths, a band, bias, dropout, groups of heads."""
    shapes = (1, 2, 130, width), (1, 1, 100, width), (1, 1, 100, 40)
    tensors = [randn(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)]
    bias, dout = randn(1, 1, 130, 100, seed=4), randn(1, 2, 130, 40, dtype=dtype, seed=5)
    keep = torch.rand(1, 2, 130, 100, generator=torch.Generator().manual_seed(6)) < 0.5
    keep[:, :, :64, 32:] = False
    limits = [-70, 20, *ANYWHERE[2:]]
    return tensors, bias, keep, torch.tensor([95]), (None, None), (130, 100), limits, 0.3, SEED, dout, None


@pytest.mark.parametrize("width", [40, 130])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_schedule_changes_a_bit(dtype, width, simt):
    """Random orders of threads and of blocks: copies that are not waited for, or that come too early, change bits."""
    call = everything(dtype, width)
    simt.configure(0, multiprocessors=7, resident=1)
    expected = both("cuda", *call)
    plain = both("cuda", call[0], None, None, None, *call[4:6], ANYWHERE, 0.0, None, call[9], None)
    for seed in range(1, 10):
        simt.configure(seed, multiprocessors=7, resident=1 + seed % 5)
        for a, b in zip(both("cuda", *call), expected, strict=True):
            assert torch.equal(a, b), f"seed {seed}"
        again = both("cuda", call[0], None, None, None, *call[4:6], ANYWHERE, 0.0, None, call[9], None)
        for a, b in zip(again, plain, strict=True):
            assert torch.equal(a, b), f"seed {seed}"
