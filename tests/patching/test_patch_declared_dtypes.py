"""Declared classes in several dtypes: forwards that cast, norms that widen, and what 16 bits would hide."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tfm_kernels as tfk
from tests.patching.attentions import HEADS, WIDTH
from tests.patching.models import assert_as_exact
from tests.patching.test_patch_declaration import recipes  # noqa: F401
from tests.patching.test_patch_declared_trials import notes
from tests.patching.test_patch_declared_unseen import Attention, Perceptron, X, attention, feed_forward

pytestmark = pytest.mark.usefixtures("recipes")


class WidensHeads(Attention):
    """Its norms give float32, as those that multiply by a float32 weight do."""

    def __init__(self, cast):
        super().__init__()
        self.q_norm, self.k_norm, self.cast = Root(WIDTH // HEADS), Root(WIDTH // HEADS), cast

    def forward(self, x):
        q, k, v = self.split(x)
        q, k = self.q_norm(q), self.k_norm(k)
        return self.merge(F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v) if self.cast else
                          F.scaled_dot_product_attention(q, k, v))  # fmt: skip


class Root(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


@pytest.mark.parametrize("cast", [False, True])
def test_norms_of_heads_that_widen(cast):
    attention(WidensHeads, query_norm="q_norm", key_norm="k_norm")
    torch.manual_seed(0)
    model, x = WidensHeads(cast), X
    if cast:
        model.bfloat16()
        for norm in (model.q_norm, model.k_norm):
            norm.float()
        x = X.bfloat16()
    exact = {"output": copy.deepcopy(model).double()(x.double())}
    patched = copy.deepcopy(model)
    assert notes(tfk.patch(patched))[""] == "fused attention"
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=not cast):
        found, stock = ({"output": each(x).double()} for each in (patched, model))
    assert_as_exact(found, stock, exact)


def test_forwards_that_cast_what_they_are_given():
    class Casts(Perceptron):
        def forward(self, x):
            return super().forward(x.to(self.a.weight.dtype))

    class CastsAttention(Attention):
        def forward(self, x):
            return super().forward(x.to(self.qkv.weight.dtype))

    feed_forward(Casts)
    attention(CastsAttention)
    for cls in (Casts, CastsAttention):
        model = cls().bfloat16()
        wanted = model(X)
        with tfk.patch(model) as report:
            assert notes(report)[""] in ("feed-forward", "fused attention")
            assert torch.equal(model(X), wanted) and model(X.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("width", [64, 1024, 2048])
def test_either_gelu_is_told_from_the_other(width):
    class Tanh(Perceptron):
        def act(self, hidden):
            return F.gelu(hidden, approximate="tanh")

    feed_forward(Tanh)
    with pytest.raises(ValueError, match="Tanh.forward must give .*, got other numbers"):
        tfk.patch(Tanh(width))
    feed_forward(Tanh, activation="gelu_tanh")
    assert notes(tfk.patch(Tanh(width)))[""] == "feed-forward"


def test_16_bits_show_which_variance_a_norm_has():
    class Std(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias, self.eps = nn.Parameter(torch.ones(64)), nn.Parameter(torch.zeros(64)), 1e-6

        def forward(self, x):
            return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + self.eps) * self.weight + self.bias

    outside = {"eps": 0.0, "eps_outside": "eps"}
    tfk.patching.declare_layer_norm(Std, **outside)
    with pytest.raises(ValueError, match="Std.forward must give"):
        tfk.patch(Std().bfloat16())
    tfk.patching.declare_layer_norm(Std, **outside, unbiased=True)
    assert notes(tfk.patch(Std().bfloat16()))[""] == "layer_norm"
