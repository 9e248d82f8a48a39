"""No byte outside of a tensor is touched, offsets beyond 2**31 elements arrive, and no schedule changes a bit.

What the kernels write (results, partial sums) lies between protected pages in every test of this folder.
"""

import pytest
import torch

from tests.fences import fenced, huge
from tfm_kernels.ops.layer_norm import BWD, FWD

SEED = torch.tensor(77)
FAR = 2**31 + 4096  # elements between two rows
SHAPES = [(1, 1), (3, 63), (5, 200), (17, 72), (3, 515), (5, 1024), (2, 1025), (3, 1544), (1, 8193), (2, 16392)]


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def both_ways(backend, x, residual, weight, bias, dy, dz, seed, numbers):
    y, z, mean, rstd = FWD[backend](x, residual, weight, bias, 1e-5, 1e-3, False, False, 0.4, seed, numbers)
    return y, z, *BWD[backend](dy, dz, z, mean, rstd, weight, bias, 1e-3, False, False, 0.4, seed, numbers, True, True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_byte_outside(shape, dtype):
    """Every argument ends at a protected page."""
    rows, width = shape
    x, residual, dy, dz = (fenced(randn(*shape, dtype=dtype, seed=seed)) for seed in range(4))
    weight, bias = (fenced(randn(width, dtype=dtype, seed=seed)) for seed in (4, 5))
    arguments = x, residual, weight, bias, dy, dz, fenced(SEED), fenced(torch.arange(rows) * 3)
    tolerance = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 16 * torch.finfo(dtype).eps}
    for a, b in zip(both_ways("cuda", *arguments), both_ways("cpu", *arguments), strict=True):
        torch.testing.assert_close(a, b, **tolerance)


@pytest.fixture(scope="module")
def space():
    """Room for a tensor of more than 2**31 elements, taken up only where it is written."""
    return huge(FAR + 2**17, torch.float16)


@pytest.mark.parametrize("width", [96, 1100, 16400])
def test_arguments_with_far_rows(space, width):
    def apart(t):
        return space.as_strided((2, width), (FAR, 1)).copy_(t)

    x, residual, dy, dz = (randn(2, width, dtype=torch.float16, seed=seed) for seed in range(4))
    weight = randn(width, seed=4)

    def forward(x, residual):
        return FWD["cuda"](x, residual, weight, None, 1e-5, 1e-3, False, False, 0.4, SEED, None)

    expected = y, z, mean, rstd = forward(x, residual)
    assert not y.isnan().any()
    for name in range(2):  # one after the other: they share the space
        given = [apart(t) if index == name else t for index, t in enumerate((x, residual))]
        for a, b in zip(forward(*given), expected, strict=True):
            assert torch.equal(a, b)

    def backward(dy, dz, z):
        return BWD["cuda"](dy, dz, z, mean, rstd, weight, None, 1e-3, False, False, 0.4, SEED, None, True, True)

    expected = backward(dy, dz, z)
    for name in range(3):
        given = [apart(t) if index == name else t for index, t in enumerate((dy, dz, z))]
        for a, b in zip(backward(*given), expected, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("shape", [(70, 40), (37, 700), (9, 1200), (5, 16400)], ids=str)
def test_no_schedule_changes_a_bit(shape, simt):
    """16 random orders of threads and of up to 7 blocks at once; sums over 7 blocks are made by two last ones."""
    x, residual, dy, dz = (randn(*shape, seed=seed) for seed in range(4))
    arguments = x, residual, *randn(2, shape[1], seed=4), dy, dz, SEED, None
    simt.configure(0, multiprocessors=7, resident=1)
    expected = both_ways("cuda", *arguments)
    for seed in range(1, 17):
        simt.configure(seed, multiprocessors=7, resident=1 + seed % 7)
        for a, b in zip(both_ways("cuda", *arguments), expected, strict=True):
            assert torch.equal(a, b), f"seed {seed}"


@pytest.mark.parametrize("blocks", [1, 2, 3, 4, 5, 16, 17, 30])
def test_sums_over_any_number_of_blocks(blocks, simt):
    simt.configure(blocks, multiprocessors=blocks, resident=3)
    x, residual, dy, dz = (randn(40, 48, seed=seed) for seed in range(4))
    arguments = x, residual, *randn(2, 48, seed=4), dy, dz, SEED, None
    for a, b in zip(both_ways("cuda", *arguments), both_ways("cpu", *arguments), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
