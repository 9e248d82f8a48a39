"""The projections of fused blocks: an nn.Linear by whatever way is fastest, for every number of rows and dtype."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tfm_kernels import _library
from tfm_kernels.patching import onednn
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
@pytest.mark.parametrize("rows", [0, 1, 15, 16, 63, 64, 200, 500])
def test_product(rows, dtype):
    for bias in (True, False):
        layer, x = layer_and_input(rows, dtype, bias)
        y = linear(x, layer)
        assert y.dtype == dtype and y.shape == (rows, 40)
        assert error(y, x, layer) <= 1.1 * error(layer(x), x, layer) + torch.finfo(dtype).eps


@torch.no_grad()
@pytest.mark.skipif(not onednn.AVAILABLE, reason="this build of PyTorch has no oneDNN product")
@pytest.mark.parametrize("x", [torch.randn(500, 24), torch.randn(24, 500).t(), torch.randn(24).expand(500, 24)],
                         ids=["rows", "columns", "one row"])  # fmt: skip
def test_many_rows_take_onednns_product(x, monkeypatch):
    monkeypatch.setattr(_library, "nearest", _library.XEON)
    layer, _ = layer_and_input(1)
    before = error(layer(x), x, layer)
    for weight in (layer.weight, layer.weight.t().contiguous().t()):
        layer.weight = nn.Parameter(weight)
        with monkeypatch.context() as patch:
            patch.setattr(F, "linear", lambda *given: pytest.fail("F.linear was called"))
            y = linear(x, layer)
        assert y.is_contiguous() and error(y, x, layer) <= 1.1 * before + torch.finfo(torch.float32).eps


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


@pytest.mark.parametrize("recorded", [False, True], ids=["inference", "gradient"])
@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("dtype, low", [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16)], ids=str)
def test_autocast_goes_before_the_emulated_type(dtype, low, rows, recorded, monkeypatch):
    monkeypatch.setattr(onednn, "EMULATED", {torch.bfloat16, torch.float16})
    layer, x = layer_and_input(rows, dtype)
    with torch.set_grad_enabled(recorded), torch.autocast("cpu", low):
        y, expected = linear(x, layer), layer(x)
    assert y.dtype == expected.dtype == low and torch.equal(y, expected)


@torch.no_grad()
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_is_bound_to_no_range_of_rows(strict, monkeypatch):
    monkeypatch.setattr(onednn, "EMULATED", {torch.float16})
    layer, x = layer_and_input(40, torch.float16)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return linear(x, self.layer)

    rows = torch.export.Dim("rows", min=2, max=4096)
    program = torch.export.export(Block(), (x,), dynamic_shapes=({0: rows},), strict=strict).module()
    for n in (2, 15, 16, 40):
        torch.testing.assert_close(program(x[:n]), layer(x[:n]))
    fixed = torch.export.export(Block(), (x,), strict=strict)
    assert any(node.target is torch.ops.aten.linear.default and node.meta["val"].dtype == torch.float32
               for node in fixed.graph.nodes), "a known number of rows is widened"  # fmt: skip
