"""Declared classes whose forward writes what its module holds: they are left alone, and the report says what it is."""

import copy
import functools
import logging

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tfm_kernels as tfk

WIDTH = 32


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.register_buffer("mean", torch.zeros(64))
        self.kept, self.losses = {"deep": {}}, []

    def keep(self, h):
        """What a subclass writes."""

    def forward(self, x):
        h = F.gelu(self.a(x))
        self.keep(h)
        return self.b(h)


class Clamps(FeedForward):
    def forward(self, x):
        with torch.no_grad():
            self.a.weight.clamp_(-0.05, 0.05)
        return super().forward(x)


class Normalises(FeedForward):
    def forward(self, x):
        self.a.weight.data = F.normalize(self.a.weight.data, dim=-1)
        return super().forward(x)


class InDict(FeedForward):
    def keep(self, h):
        self.kept["deep"]["hidden"] = h


class InList(FeedForward):
    def keep(self, h):
        self.losses.append(h.abs().mean())


class Twice(FeedForward):
    """The second tensor may lie where the first did."""

    def keep(self, h):
        self.h = h + 1
        self.h = h.clone()


class ByData(FeedForward):
    def keep(self, h):
        if self.training:
            self.mean.data.mul_(0.9).add_(0.1 * h.detach().flatten(0, -2).mean(0))


class WithGradients(FeedForward):
    def keep(self, h):
        if self.training and torch.is_grad_enabled():
            self.mean.mul_(0.9).add_(0.1 * h.detach().flatten(0, -2).mean(0))


class Counter:
    def __init__(self):
        self.calls = 0


class InAnObject(FeedForward):
    def __init__(self):
        super().__init__()
        self.counter = Counter()

    def keep(self, h):
        self.counter.calls += 1


class Deep(InAnObject):
    def __init__(self):
        super().__init__()
        self.counter.of = {"ffn": {"norms": []}}

    def keep(self, h):
        self.counter.of["ffn"]["norms"].append(1)


class Slots:
    __slots__ = ("__calls",)

    def __init__(self):
        self.calls = 0

    @property
    def calls(self):
        return self.__calls

    @calls.setter
    def calls(self, number):
        self.__calls = number


class InSlots(InAnObject):
    def __init__(self):
        super().__init__()
        self.counter = Slots()


class InAnArray(FeedForward):
    def __init__(self):
        super().__init__()
        self.seen = np.zeros(1)

    def keep(self, h):
        self.seen += 1


class OnALayer(FeedForward):
    def __init__(self):
        super().__init__()
        self.a.register_buffer("largest", torch.zeros(()))

    def keep(self, h):
        self.a.largest.copy_(torch.maximum(self.a.largest, h.detach().abs().max()))


class Rolls(FeedForward):
    """Rows change places, which leaves their sum."""

    def keep(self, h):
        self.b.weight.data.copy_(self.b.weight.data.roll(1, 0))


class Loudest(FeedForward):
    """It has seen larger numbers than a trial's rows give."""

    def __init__(self):
        super().__init__()
        self.loudest = 3.0

    def keep(self, h):
        self.loudest = max(self.loudest, float(h.detach().abs().max()))


class Calibrates(FeedForward):
    def keep(self, h):
        if not self.mean.any():
            self.mean.copy_(h.detach().flatten(0, -2).mean(0))


class OfMany(FeedForward):
    def __init__(self):
        super().__init__()
        self.counts = {number: [] for number in range(5000)}

    def keep(self, h):
        self.counts[4000].append(1)


class TakesAway(FeedForward):
    def keep(self, h):
        self.__dict__.pop("losses", None)


class OfTwoAxes(FeedForward):
    """As an expert, which is given its tokens alone."""

    def forward(self, x):
        tokens, width = x.shape
        self.losses.append(tokens)
        return super().forward(x)


def left(cls, x, what):
    """A patched module of a class gives what its own code does, and the report says why."""
    torch.manual_seed(0)
    model = cls()
    stock = copy.deepcopy(model)
    report = tfk.patch(model)
    assert f"its forward writes {what}, which the fused one does not" in str(report)
    torch.testing.assert_close(model(x), stock(x))
    return model, stock


@pytest.mark.parametrize(
    "cls, what",
    [
        (Clamps, "a.weight"), (Normalises, "a.weight"), (InDict, "kept"), (InList, "losses"), (Twice, "h"),
        (ByData, "mean"), (WithGradients, "mean"), (InAnObject, "counter"), (TakesAway, "losses"), (Deep, "counter"),
        (InSlots, "counter"), (InAnArray, "seen"), (OnALayer, "a.largest"), (Rolls, "b.weight"), (Loudest, "loudest"),
        (Calibrates, "mean"), (OfMany, "counts"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)  # fmt: skip
def test_feed_forward(cls, what):
    tfk.patching.declare_feed_forward(cls, first="a", second="b", activation="gelu")
    model, stock = left(cls, torch.randn(2, 5, WIDTH), what)
    sizes = [[len(kept) for kept in (getattr(m, "losses", ()), m.kept["deep"])] for m in (model, stock)]
    assert sizes[0] == sizes[1]
    assert torch.equal(model.mean, stock.mean)


def test_rows_of_two_axes_are_looked_at_too():
    tfk.patching.declare_feed_forward(OfTwoAxes, first="a", second="b", activation="gelu")
    model, _ = left(OfTwoAxes, torch.randn(5, WIDTH), "losses")
    assert model.losses == [5]


def test_values_that_are_written_as_they_were():
    """No reason to leave a module: an attribute that is given the number that it has."""

    class Plain(FeedForward):
        def __init__(self):
            super().__init__()
            self.scale = 0.5

        def keep(self, h):
            self.scale = 0.25 * 2

    tfk.patching.declare_feed_forward(Plain, first="a", second="b", activation="gelu")
    assert [entry.note for entry in tfk.patch(Plain()).replaced][:1] == ["feed-forward"]


class Logs(FeedForward):
    """A logger keeps which levels it writes."""

    def __init__(self):
        super().__init__()
        self.log = logging.getLogger(f"{__name__}.{id(self)}")

    def keep(self, h):
        self.log.debug("%s", h.shape)


class Enters(FeedForward):
    def __init__(self):
        super().__init__()
        self.context = torch.no_grad()

    def keep(self, h):
        with self.context:
            h.mean()


class ComputesOnce(FeedForward):
    """And holds a number that is not equal to itself, and itself."""

    def __init__(self):
        super().__init__()
        self.device, self.best, self.circle = torch.device("cpu"), float("nan"), [self]

    @functools.cached_property
    def half(self):
        return self.a.in_features // 2

    def keep(self, h):
        assert 2 * self.half == self.a.in_features
        self.device = h.device


@pytest.mark.parametrize("cls", [Logs, Enters, ComputesOnce])
def test_what_nobody_reads_is_no_reason(cls):
    tfk.patching.declare_feed_forward(cls, first="a", second="b", activation="gelu")
    assert tfk.patch(cls()).replaced[0].note == "feed-forward"


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.register_buffer("entropy", torch.zeros(()))
        self.register_buffer("table", None)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in (self.q(x), self.k(x), self.v(x)))
        weights = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
        self.keep(weights)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


class Measures(Attention):
    def keep(self, weights):
        if self.training:
            self.entropy.mul_(0.9).sub_(0.1 * (weights * weights.log()).detach().sum(-1).mean())


class ClampsProjection(Attention):
    def keep(self, weights):
        with torch.no_grad():
            self.q.weight.clamp_(-0.05, 0.05)


class Pictures(Attention):
    def keep(self, weights):
        self.weights, self.table = weights, torch.arange(weights.shape[-1])


@pytest.mark.parametrize("cls, what", [(Measures, "entropy"), (ClampsProjection, "q.weight")])
def test_attention(cls, what):
    tfk.patching.declare_attention(cls, query="q", key="k", value="v", out="o", heads=4)
    model, stock = left(cls, torch.randn(2, 5, WIDTH), what)
    assert torch.equal(model.entropy, stock.entropy) and torch.equal(model.q.weight, stock.q.weight)


def test_attention_may_keep_pictures_and_tables():
    tfk.patching.declare_attention(Pictures, query="q", key="k", value="v", out="o", heads=4)
    assert tfk.patch(Pictures()).replaced[0].note == "fused attention"


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.full((WIDTH,), 3.0)), nn.Parameter(torch.zeros(WIDTH))
        self.eps = 1e-5

    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-1, 1)
        return F.layer_norm(x, (WIDTH,), self.weight, self.bias, self.eps)


class OfRows(nn.Module):
    """An RMSNorm of tokens alone that counts them."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps, self.seen = nn.Parameter(torch.ones(WIDTH)), 1e-6, 0

    def forward(self, x):
        tokens, _ = x.shape
        self.seen += tokens
        return F.rms_norm(x, (WIDTH,), self.weight, self.eps)


def test_norms():
    tfk.patching.declare_layer_norm(Norm)
    left(Norm, torch.randn(3, WIDTH), "weight")
    tfk.patching.declare_rms_norm(OfRows)
    model, _ = left(OfRows, torch.randn(3, WIDTH), "seen")
    assert model.seen == 3
