"""The norms' CPU kernels at the edges: rows longer than what is summed at a time or lies on the stack, roots of 0."""

import pytest
import torch

import tfm_kernels as tfk
from tfm_kernels import dropout
from tfm_kernels.testing import assert_contract

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SEED = torch.tensor(20261121)


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [5000, 9001])
def test_long_rows(dtype, width):
    """More than 2048 numbers are summed in several parts; a thread's rows are too long for its stack from 4096 on."""
    x, residual = randn(3, width, dtype=dtype), randn(3, width, dtype=dtype, seed=1)
    w, b = randn(width, dtype=dtype, seed=2), randn(width, dtype=dtype, seed=3)
    assert_contract("layer_norm", {"x": x, "weight": w, "bias": b}, "cpu")
    assert_contract("rms_norm", {"x": x, "weight": w}, "cpu")
    dropped = {"dropout_p": 0.3, "seed": SEED}
    assert_contract("add_layer_norm", {"x": x, "residual": residual, "weight": w, "bias": b, **dropped}, "cpu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("eps_outside", [2.0**-13, 0.001, 0.5])
def test_the_gradient_where_nothing_but_what_is_outside_of_the_root_is_left(dtype, eps_outside):
    """The root of a row of equal numbers is 0, and so is its gradient; 1 - eps_outside * rstd is 0, or nearly."""
    x = torch.full((2, 24), 3.0, dtype=dtype)
    assert_contract("layer_norm", {"x": x, "eps": 0.0, "eps_outside": eps_outside}, "cpu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_no_gradient_of_a_dropped_element_passes(dtype, bad):
    keep = dropout.keep_mask(SEED, 0.5, torch.arange(4), 16)
    x, residual, dy = (randn(4, 16, dtype=dtype, seed=i) for i in range(3))
    for norm in (tfk.ops.add_layer_norm, tfk.ops.add_rms_norm):
        found = []
        for at_dropped in (0.0, bad):
            leaf = x.clone().requires_grad_()
            outputs = norm(leaf, residual, dropout_p=0.5, seed=SEED, backend="cpu")
            dz = torch.ones_like(x).masked_fill(~keep, at_dropped)
            found += torch.autograd.grad(outputs, leaf, (dy, dz))
        assert torch.equal(*found) and (found[1][~keep] == 0).all()
