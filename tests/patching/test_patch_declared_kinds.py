"""Classes of several kinds of modules under one declaration, and forwards of other shapes than it says."""

import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tfm_kernels as tfk
from tests.patching.attentions import HEADS, WIDTH
from tests.patching.models import assert_same_results
from tests.patching.test_patch_declaration import recipes  # noqa: F401
from tests.patching.test_patch_declared_gates import Swapped
from tests.patching.test_patch_declared_trials import notes

pytestmark = pytest.mark.usefixtures("recipes")


class Chosen(nn.Module):
    """Its activation is an attribute, or one of an object's."""

    def __init__(self, name):
        super().__init__()
        self.a, self.b, self._name = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), name

    def forward(self, x):
        return self.b(getattr(F, getattr(self._name, "name", self._name))(self.a(x)))


def test_modules_of_a_class_that_differ_in_what_they_hold_are_each_tried():
    """One of which the declaration is not true is refused, and left as it is beside one of which it is."""
    tfk.patching.declare_feed_forward(Chosen, first="a", second="b", activation="gelu")
    with pytest.raises(ValueError, match="Chosen.forward must give .*, got other numbers.*, in '0'$"):
        tfk.patch(nn.Sequential(Chosen("relu")))
    config = types.SimpleNamespace(name="relu")
    for modules in ((Chosen("relu"), Chosen("gelu")), (Chosen("gelu"), Chosen("relu")), (Chosen(config),)):
        model = nn.Sequential(*modules)
        report = tfk.patch(model)
        for module, name in zip(modules, ("0", "1"), strict=False):
            true = module._name == "gelu"
            assert (notes(report)[name] == "feed-forward") == true
            assert (
                true or "what was declared is not true of it: declare_feed_forward: Chosen.for" in notes(report)[name]
            )
    config.name = "gelu"
    assert notes(tfk.patch(model))["0"] == "feed-forward"
    config.name = "relu"
    assert notes(tfk.patch(model))["0"].startswith("because what was declared is not true of it")


class Two(nn.Module):
    """Gives something beside the result."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), nn.LayerNorm(WIDTH)


class TwoOfPerceptron(Two):
    def forward(self, x):
        return self.b(F.relu(self.a(x))), x


class TwoOfNorm(Two):
    def forward(self, x):
        return self.norm(x), x


class TwoOfResidual(Two):
    def forward(self, x, sublayer):
        return self.norm(x + sublayer(x)), x


TWO = {
    TwoOfPerceptron: lambda p, cls: p.declare_feed_forward(cls, first="a", second="b"),
    TwoOfNorm: lambda p, cls: p.declare_layer_norm(cls, weight="norm.weight", bias="norm.bias", eps="norm.eps"),
    TwoOfResidual: lambda p, cls: p.declare_residual(cls, norm="norm"),
}


@pytest.mark.parametrize("cls", TWO)
def test_a_forward_that_gives_two_is_refused(cls):
    TWO[cls](tfk.patching, cls)
    with pytest.raises(ValueError, match=rf"{cls.__name__}.forward must give a tensor, got a tuple of 2$"):
        tfk.patch(cls())


class Channels(nn.Module):
    """LayerNorm of (B, C, H, W) over C, in the style of ConvNeXt."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.weight, self.bias, self.eps = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width)), 1e-6

    def forward(self, x):
        x = x.permute(0, 2, 3, 1)
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps).permute(0, 3, 1, 2)


class SecondAxis(Channels):
    def forward(self, x):
        return F.layer_norm(x.transpose(1, -1), x.shape[1:2], self.weight, self.bias, self.eps).transpose(1, -1)


class Images(Channels):
    """One over the last axis, of four alone."""

    def forward(self, x):
        b, h, w, c = x.shape
        return F.layer_norm(x.reshape(-1, c), (c,), self.weight, self.bias, self.eps).view(b, h, w, c)


class Matrices(Channels):
    """One over the last axis, of two alone."""

    def forward(self, x):
        rows, width = x.shape
        return F.layer_norm(x, (width,), self.weight, self.bias, self.eps)


class Five(Channels):
    def forward(self, x):
        a, b, c, d, e = x.shape
        return F.layer_norm(x, (e,), self.weight, self.bias, self.eps)


@pytest.mark.parametrize("cls", [Channels, SecondAxis])
def test_a_norm_over_another_axis_is_refused(cls):
    """Though it refuses ordinary rows: it would take the last axis where both are as long."""
    tfk.patching.declare_layer_norm(cls)
    with pytest.raises(ValueError, match=rf"{cls.__name__}.forward must give .*, got other numbers"):
        tfk.patch(cls())


@pytest.mark.parametrize("width", [WIDTH, 2000])
@pytest.mark.parametrize("cls", [Images, Matrices])
def test_a_norm_of_a_number_of_axes(cls, width):
    tfk.patching.declare_layer_norm(cls)
    model, x = cls(width), torch.randn(*((2, 3, 5, width) if cls is Images else (4, width)))
    wanted = model(x)
    with tfk.patch(model) as report:
        assert notes(report)[""] == "layer_norm"
        torch.testing.assert_close(model(x), wanted)


@pytest.mark.parametrize("cls, width", [(Five, WIDTH), (Channels, 2000)])
def test_a_forward_that_refuses_all_rows_is_left_as_it_is(cls, width):
    tfk.patching.declare_layer_norm(cls)
    note = notes(tfk.patch(cls(width)))[""]
    assert note.startswith("because its forward could not be tried: "), note


class Normalized(nn.Module):
    """In the style of lucidrains: a row of zeros is 0."""

    def __init__(self):
        super().__init__()
        self.g = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x):
        return F.normalize(x, dim=-1) * WIDTH**0.5 * self.g


def test_rows_of_zeros():
    tfk.patching.declare_rms_norm(Normalized, weight="g", eps=0.0)
    with pytest.raises(ValueError, match="got numbers for a row of zeros, which this gives none: eps_outside says"):
        tfk.patch(Normalized())
    tfk.patching.declare_rms_norm(Normalized, weight="g", eps=0.0, eps_outside=1e-12)
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    x[1] = 0
    assert_same_results(nn.Sequential(Normalized()), lambda m: m[0](x.to(m[0].g)))


@pytest.mark.parametrize("drop", [nn.Dropout1d, nn.AlphaDropout, nn.FeatureAlphaDropout])
def test_a_dropout_of_another_kind_is_left_as_it_is(drop):
    class Post(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.drop = nn.LayerNorm(WIDTH), drop(0.5)
            self.a, self.b = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    class Wrapped(Post):
        def forward(self, x, sublayer):
            return self.norm(x + self.drop(sublayer(x)))

    class Block(Post):
        def forward(self, x):
            return self.b(self.drop(F.relu(self.a(x))))

    tfk.patching.declare_residual(Wrapped, norm="norm", dropout="drop")
    tfk.patching.declare_feed_forward(Block, first="a", second="b", dropout="drop")
    for cls in (Wrapped, Block):
        assert notes(tfk.patch(cls()))[""] == f"because its drop is {drop.__name__}, not Dropout"


def test_a_residual_of_what_a_sublayer_gave():
    """AddNorm(x, y), in the style of Dive into Deep Learning."""

    class AddNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.dropout, self.ln = nn.Dropout(0.0), nn.LayerNorm(WIDTH)

        def forward(self, X, Y):
            return self.ln(self.dropout(Y) + X)

    class Other(AddNorm):
        def forward(self, X, Y):
            return self.ln(self.dropout(Y) - X)

    for cls in (AddNorm, Other):
        tfk.patching.declare_residual(cls, norm="ln", dropout="dropout")
    x, y = (torch.randn(2, 5, WIDTH, dtype=torch.float64) for _ in range(2))
    model = nn.ModuleList([AddNorm()])
    assert_same_results(model, lambda m: m[0](x.to(m[0].ln.weight), y.to(m[0].ln.weight)), backend="cpu")
    with tfk.patch(model) as report:
        model[0](x.float(), Y=y.float())
        assert notes(report)["0"] == "dropout, sum and norm in one pass" and not report.fallbacks
    with pytest.raises(ValueError, match="Other.forward must give ln.*, got other numbers"):
        tfk.patch(Other())


class UnitOffset(nn.Module):
    """In the style of Gemma: its weight is the distance from 1."""

    def __init__(self, mean=False):
        super().__init__()
        self.weight, self.mean = nn.Parameter(0.3 * torch.randn(WIDTH)), mean
        self.bias = nn.Parameter(torch.randn(WIDTH)) if mean else None

    def forward(self, x):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        weight = 1.0 + self.weight.to(wide.dtype)
        if self.mean:
            return F.layer_norm(wide, (WIDTH,), weight, self.bias.to(wide.dtype), 1e-6).to(x.dtype)
        return (F.rms_norm(wide, (WIDTH,), eps=1e-6) * weight).to(x.dtype)


@pytest.mark.parametrize("mean", [False, True], ids=["rms", "layer"])
def test_a_weight_may_be_the_distance_from_one(mean):
    declare = tfk.patching.declare_layer_norm if mean else tfk.patching.declare_rms_norm
    declare(UnitOffset, eps=1e-6)
    with pytest.raises(ValueError, match="UnitOffset.forward must give .*, got other numbers"):
        tfk.patch(UnitOffset(mean))
    declare(UnitOffset, eps=1e-6, unit_offset=True)
    torch.manual_seed(0)
    model, x = nn.Sequential(UnitOffset(mean)), torch.randn(3, 5, WIDTH, dtype=torch.float64)
    assert_same_results(model, lambda m: m[0](x.to(m[0].weight)), backend="cpu")
    with tfk.patch(model.bfloat16()) as report:
        model(x.bfloat16())
        assert not report.fallbacks and len(report.replaced) >= 1


def test_an_eps_of_none_is_that_of_the_dtype():
    class OfTheDtype(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.rand(WIDTH)), None

        def forward(self, x):
            return F.rms_norm(x, (WIDTH,), self.weight, self.eps)

    x = torch.randn(3, 5, WIDTH, dtype=torch.float64) * 1e-4
    for eps in ("eps", None):
        tfk.patching.declare_rms_norm(OfTheDtype, eps=eps)
        assert_same_results(nn.Sequential(OfTheDtype()), lambda m: m[0](x.to(m[0].weight)), backend="cpu")


class NormedHeads(nn.Module):
    """In the style of timm."""

    def __init__(self, norm=nn.LayerNorm):
        super().__init__()
        self.heads, width = HEADS, WIDTH // HEADS
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.q_norm, self.k_norm = norm(width), norm(width)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)
        return self.proj(y.transpose(1, 2).flatten(-2))


def test_queries_and_keys_of_each_head_may_be_normed():
    names = dict(qkv="qkv", out="proj", heads="heads")
    tfk.patching.declare_attention(NormedHeads, **names, query_norm="q_norm")
    with pytest.raises(
        ValueError, match=r"must give proj\(the heads of softmax\(scale q_norm\(q\) k\^T\) v\), got oth"
    ):
        tfk.patch(NormedHeads())
    tfk.patching.declare_attention(NormedHeads, **names, query_norm="q_norm", key_norm="k_norm")
    torch.manual_seed(0)
    x = torch.randn(3, 5, WIDTH, dtype=torch.float64)
    for norm in (nn.LayerNorm, nn.Identity):
        model = nn.Sequential(NormedHeads(norm))
        assert_same_results(model, lambda m: m[0](x.to(m[0].qkv.weight)), backend="cpu")
    seen = []
    model = NormedHeads()
    model.q_norm.register_forward_hook(lambda *args: seen.append(1))
    with tfk.patch(model) as report:
        model(x.float())
        assert seen == [1] and not report.fallbacks and notes(report)[""] == "fused attention"


def test_arguments_of_every_kind():
    """By place alone, by name alone, and behind a decorator that hides them."""

    class ByPlace(NormedHeads):
        def forward(self, x, /, mask=None):
            return super().forward(x)

    class ByName(Swapped):
        def forward(self, *, hidden):
            return super().forward(hidden)

    class Hidden(Swapped):
        def forward(self, *args):
            return super().forward(*args)

    class NormByName(UnitOffset):
        def forward(self, *, hidden):
            return super().forward(hidden)

    norms = dict(query_norm="q_norm", key_norm="k_norm")
    tfk.patching.declare_attention(ByPlace, qkv="qkv", out="proj", heads="heads", arguments=("x", None), **norms)
    for cls in (ByName, Hidden):
        tfk.patching.declare_feed_forward(
            cls, first="w12", second="w3", gate="w12", activation="gelu", activated="second"
        )
    tfk.patching.declare_rms_norm(NormByName, eps=1e-6, unit_offset=True)
    torch.manual_seed(0)
    x = torch.randn(3, 5, WIDTH)
    for cls in (ByPlace, ByName, Hidden, NormByName):
        model = cls()
        given = ((), {"hidden": x}) if cls in (ByName, NormByName) else ((x,), {})
        wanted = model(*given[0], **given[1])
        with tfk.patch(model) as report:
            torch.testing.assert_close(model(*given[0], **given[1]), wanted)
            assert not notes(report)[""].startswith("because") and not report.fallbacks
