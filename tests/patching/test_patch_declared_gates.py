"""Declared feed-forward blocks with a gate: one layer or two, with and without biases, either half activated."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tfm_kernels as tfk
from tests.patching.attentions import WIDTH
from tests.patching.models import assert_same_results
from tests.patching.test_patch_declaration import recipes  # noqa: F401
from tests.patching.test_patch_declared_trials import notes

pytestmark = pytest.mark.usefixtures("recipes")


class Gated(nn.Module):
    """Its gate has a bias, as DINOv2's."""

    def __init__(self, packed, bias=True, act=F.silu):
        super().__init__()
        self.packed, self.act, self.w3 = packed, act, nn.Linear(32, WIDTH)
        self.w1, self.w2 = nn.Linear(WIDTH, 64 if packed else 32, bias), nn.Linear(WIDTH, 32, bias)

    def forward(self, x):
        a, b = self.w1(x).chunk(2, -1) if self.packed else (self.w1(x), self.w2(x))
        return self.w3(self.act(a) * b)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "apart"])
def test_a_gate_with_a_bias(packed):
    gate = "w1" if packed else "w2"
    tfk.patching.declare_feed_forward(Gated, first="w1", second="w3", gate=gate, activation="silu")
    with pytest.raises(ValueError, match="Gated.forward must give"):
        tfk.patch(Gated(packed, True, F.relu))
    for bias in (True, False):
        model, x = Gated(packed, bias), torch.randn(2, 5, WIDTH)
        assert_same_results(model, lambda m: m(x.to(m.w3.weight)), backend="cpu")
        with tfk.patch(model) as report:
            model(x)
            assert notes(report)[""] == "feed-forward" and not report.fallbacks


class Swapped(nn.Module):
    """GEGLU, in the style of lucidrains: the second half of the product is activated."""

    def __init__(self):
        super().__init__()
        self.w12, self.w3 = nn.Linear(WIDTH, 64), nn.Linear(32, WIDTH)

    def forward(self, x):
        a, b = self.w12(x).chunk(2, -1)
        return self.w3(a * F.gelu(b))


def test_the_second_half_of_a_packed_gate_may_be_activated():
    names = dict(first="w12", second="w3", gate="w12", activation="gelu")
    tfk.patching.declare_feed_forward(Swapped, **names)
    wanted = "got other numbers: those of activation='gelu' and activated='second'$"
    with pytest.raises(ValueError, match=rf"must give w3\(gelu\(a\) \* b, a and b = .*{wanted}"):
        tfk.patch(Swapped())
    tfk.patching.declare_feed_forward(Swapped, **names, activated="second")
    torch.manual_seed(0)
    model, x = nn.Sequential(Swapped()), torch.randn(3, 5, WIDTH, dtype=torch.float64)
    assert_same_results(model, lambda m: m[0](x.to(m[0].w12.weight)), backend="cpu")
    with torch.no_grad():
        wanted = model(x.float())
        for scheme in ("int8_weight_only", "int8_dynamic"):
            quantized = copy.deepcopy(model)
            tfk.quantize(quantized, scheme)
            rounded = quantized(x.float())
            with tfk.patch(quantized) as report:
                torch.testing.assert_close(quantized(x.float()), rounded)
            assert notes(report)["0"] == "feed-forward" and not torch.equal(rounded, wanted)
    for given in ({"gate": "w3"}, {"gate": None}):
        with pytest.raises(ValueError, match="activated must be 'first' where gate is not first, 'w12', got 'second'"):
            tfk.patching.declare_feed_forward(Swapped, **{**names, **given}, activated="second")


class OfTwo(nn.Module):
    """Of two layers that give a gate its factors, the second in the order of its attributes is activated."""

    def __init__(self):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x):
        return self.down(self.up(x) * F.gelu(self.gate(x), approximate="tanh"))


@pytest.mark.parametrize(
    "names, hint",
    [
        ({"first": "gate", "gate": "up"}, "those of activation='gelu_tanh'"),
        ({"first": "up", "gate": "gate"}, "those of activation='gelu_tanh', first='gate' and gate='up'"),
        (
            {"first": "up"},
            r"activation \(one of relu, gelu, gelu_tanh, silu\), gate, norm and the order of the layers say which",
        ),
    ],
)
def test_what_is_right_is_said(names, hint):
    tfk.patching.declare_feed_forward(OfTwo, **names, second="down", activation="silu")
    with pytest.raises(ValueError, match=f"got other numbers: {hint}$"):
        tfk.patch(OfTwo())
