"""The projections of fused blocks: an nn.Linear by whatever way is fastest, for every number of rows and dtype."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tfm_kernels.patching.linear import linear

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def layer_and_input(rows, dtype=torch.float32, bias=True):
    torch.manual_seed(0)
    return nn.Linear(24, 40, bias).to(dtype), torch.randn(rows, 24).to(dtype)


def error(y, x, layer):
    bias = None if layer.bias is None else layer.bias.double()
    exact = F.linear(x.double(), layer.weight.double(), bias)
    return float((y.double() - exact).norm() / exact.norm().clamp_min(1e-300))


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 15, 16, 63, 64, 200])
def test_product(rows, dtype):
    for bias in (True, False):
        layer, x = layer_and_input(rows, dtype, bias)
        y = linear(x, layer)
        assert y.dtype == dtype and y.shape == (rows, 40)
        assert error(y, x, layer) <= 1.1 * error(layer(x), x, layer) + torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("wanted", [w for w in itertools.product((False, True), repeat=3) if any(w)], ids=str)
def test_gradients_reach_whatever_wants_one(wanted, dtype):
    """Also where the bias alone is trained."""
    layer, x = layer_and_input(100, dtype)
    leaves = [t.requires_grad_(want) for t, want in zip((x, layer.weight, layer.bias), wanted, strict=True)]
    leaves = [t for t in leaves if t.requires_grad]
    grads = torch.autograd.grad(linear(x, layer).sum(), leaves)
    for given, expected in zip(grads, torch.autograd.grad(layer(x).sum(), leaves), strict=True):
        torch.testing.assert_close(given, expected)
