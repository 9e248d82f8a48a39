"""ffn's compiled kernels, Triton's and csrc/cuda's: every tile, cut sums, exact sums, dropout masks."""

import pytest
import torch

from tests.ffn_semantics import (  # noqa: F401  (some of the tests that every backend has)
    block,
    test_dropout_masks_are_those_of_the_other_backends,
    test_nothing_of_something,
    test_small_integers_are_exact,
    test_views_give_the_bits_of_contiguous_tensors,
)
from tfm_kernels.testing import assert_contract
from tfm_kernels.triton import _gemm, _launch, ffn_fwd
from tfm_kernels.triton._activation import RELU


@pytest.mark.parametrize(
    "dtype, gated", [(torch.bfloat16, True), (torch.float16, False), (torch.float32, False)], ids=str
)
def test_largest_tiles_and_few_programs(dtype, gated, monkeypatch, gpu):
    """A GPU of one multiprocessor takes the largest tile, and several to a program."""
    monkeypatch.setattr(_launch, "MULTIPROCESSORS", {9: 1})
    assert_contract("ffn", block(200, 40, 320, 72, dtype, gated), "triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cut_sums(dtype, monkeypatch, gpu):
    monkeypatch.setattr(_gemm, "LEAST_K", 64)
    assert_contract("ffn", block(300, 16, 24, 8, dtype, gated=True), "triton")


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("width", [2048, 2047])
def test_float32_is_summed_in_two_levels(width, gated, gpu):
    """Of one sign, what is rounded grows with every term: a chain of them errs several times as much."""
    g = torch.Generator().manual_seed(width)
    x, *weights = (torch.rand(8, width, generator=g) for _ in range(3))
    w1, gate = weights
    _, preact = ffn_fwd.ffn_fwd(
        x, w1, None, torch.zeros(width, 8), None, gate if gated else None, RELU.value, 0.0, None, None, True
    )
    columns = torch.cat(weights) if gated else w1
    exact, chain = x.double() @ columns.double().T, torch.zeros(8, len(columns))
    for k in range(width):  # a term's product is exact in float64, as in an fma
        chain = (chain.double() + torch.outer(x[:, k].double(), columns[:, k].double())).float()
    error = lambda p: (p.double() - exact).norm().item()
    assert 0 < error(preact) < error(chain) / 2


@pytest.mark.parametrize("activation", ["gelu_tanh", "silu"])
def test_slopes_far_out(activation, backend):
    """Where 1 - sigmoid is nothing, and a division may be off."""
    given = block(20, 8, 24, 8, torch.float32)
    assert_contract("ffn", given | {"x": 200 * given["x"], "activation": activation}, backend)
