"""csrc/cuda/tile.cuh on the CPU: products of tiles against float64, however they lie, of sizes that fit no tile."""

import ctypes

import pytest
import torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # in the order of launch.h's DType
SIZES = [(64, 32, 32), (1, 1, 1), (7, 5, 3), (65, 33, 31), (63, 40, 100), (130, 17, 16), (8, 8, 200)]
EVERY = (1 << 32) - 1


def randn(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def padded(t):
    """With rows of whole packs of 16 bytes, which copies need; what is added is NaN."""
    lanes = 16 // t.element_size()
    whole = torch.full((t.shape[0], -(-t.shape[1] // lanes) * lanes), float("nan"), dtype=t.dtype)
    whole[:, : t.shape[1]] = t
    return whole


def gemm(simt, a, b, a_turned=False, b_turned=False, chosen=EVERY):
    """a (m, k) times b (n, k) turned, float32; ``chosen`` are the bits of each 32 of k that count, b_turned only."""
    (m, k), n = a.shape, b.shape[0]
    a, b = (padded(t.mT if turned else t) for t, turned in ((a, a_turned), (b, b_turned)))
    c = torch.full((m, n), float("nan"))
    call = simt.function("simt_gemm", ctypes.c_char_p)
    a_at, b_at, c_at = (ctypes.c_void_p(t.data_ptr()) for t in (a, b, c))
    options = int(a_turned), int(b_turned), ctypes.c_uint64(chosen)
    error = call(DTYPES.index(a.dtype), a_at, b_at, a.stride(0), b.stride(0), c_at, m, n, k, *options)
    assert error is None, error
    return c


def assert_near(found, a, b):
    a, b = a.double(), b.double()
    bound = 2 * a.shape[1] ** 0.5 * 2.0**-24 * (a.abs() @ b.abs().mT)
    assert ((found.double() - a @ b.mT).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products(size, dtype, simt):
    m, n, k = size
    a, b = randn(m, k, dtype=dtype), randn(n, k, dtype=dtype, seed=1)
    bits = {gemm(simt, a, b, *turned).numpy().tobytes() for turned in ((False, False), (True, False), (False, True))}
    found = gemm(simt, a, b, a_turned=True, b_turned=True)
    assert_near(found, a, b)
    assert bits == {found.numpy().tobytes()}  # how factors lie is all the same


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_are_not_chosen_count_for_nothing_whatever_they_hold(dtype, simt):
    a, b = randn(20, 64, dtype=dtype), randn(24, 64, dtype=dtype, seed=1)
    bits = 0b1010_0110_1000_0001_0111_1101_0010_1101
    counts = torch.tensor([bool(bits >> (i % 32) & 1) for i in range(64)])
    expected = gemm(simt, a * counts, b * counts)
    b[:, ~counts] = float("nan")
    assert torch.equal(gemm(simt, a, b, b_turned=True, chosen=bits), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_schedule_changes_a_bit(dtype, simt):
    """Copies are not there before they are waited for, and replace nothing that is still read."""
    a, b = randn(70, 170, dtype=dtype), randn(40, 170, dtype=dtype, seed=1)
    expected = gemm(simt, a, b)
    for seed in range(12):
        simt.configure(seed, resident=1 + seed % 3)
        assert torch.equal(gemm(simt, a, b), expected), f"seed {seed}"
