"""Forwards that a trial refuses, or leaves as they are, for more than the numbers of a few rows."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tfm_kernels as tfk
from tests.patching.models import assert_same_results
from tests.patching.test_patch_declaration import recipes  # noqa: F401
from tests.patching.test_patch_declared_found import (
    WIDTH,
    Attention,
    FeedForward,
    Weights,
    assert_left,
    attention,
    feed_forward,
)
from tests.patching.test_patch_declared_trials import notes

pytestmark = pytest.mark.usefixtures("recipes")


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


class Second(Attention):
    """A second argument that is no mask."""

    def forward(self, x, context=None):
        return super().forward(x if context is None else context)


class NeedsMask(Attention):
    def forward(self, x, mask):
        return self.mixed(self.drop(self.scores(x).masked_fill(mask == 0, -1e9).softmax(-1)), x)


class DropsResult(NeedsMask):
    def forward(self, x, mask):
        return self.drop(self.mixed(self.scores(x).masked_fill(mask == 0, -1e9).softmax(-1), x))


class Windowed(Attention):
    """Causal, but for keys more than seven places back; not for more than 40 tokens."""

    def forward(self, x):
        seen = torch.ones(40, 40).tril().triu(-7)[: x.shape[1], : x.shape[1]]
        return self.mixed(self.drop(self.scores(x).masked_fill(seen == 0, -1e9).softmax(-1)), x)


class Detached(Attention):
    def forward(self, x):
        return self.mixed(self.drop(self.scores(x.detach()).softmax(-1)), x)


class Depth(Attention):
    def forward(self, x):
        y = self.mixed(self.drop(self.scores(x).softmax(-1)), x)
        return 0 * y if self.training and random.random() < 0.01 else y


REFUSED = {
    "no mask": (Second, {}, "must take a mask of mask='keep' and mask_axis=None as its 'context', got an error for "
                "each that was tried: with arguments=\\('x', None\\) its own code runs"),
    "dropout that needs a mask": (NeedsMask, {"dropout": None}, "must drop elements by no dropout alone"),
    "dropout of the result": (DropsResult, {}, "in training must drop by 'drop' what is declared"),
    "window": (Windowed, {"causal": True}, "got other numbers of 33 tokens: a window"),
    "detached": (Detached, {}, "must pass on the gradients of what is declared, got others"),
    "weights": (Weights, {"weights": True}, "got those without: weights='before_dropout' says so"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_is_refused(case):
    cls, more, says = REFUSED[case]
    with pytest.raises(ValueError, match=f"^declare_attention: {cls.__name__}.forward .*{says}"):
        tfk.patch(attention(cls, **more))


class Rolls(FeedForward):
    def forward(self, x):
        return super().forward(torch.cat((x[..., :16], x.roll(1, -2)[..., 16:]), -1))


class Broadcasts(FeedForward):
    def forward(self, x):
        return super().forward(x[:1].expand_as(x))


class Cuts(FeedForward):
    def forward(self, x):
        return super().forward(x.detach())


class CutsAll(FeedForward):
    @torch.no_grad()
    def forward(self, x):
        return super().forward(x)


@pytest.mark.parametrize("cls", [Rolls, Broadcasts, Cuts, CutsAll])
def test_a_block_that_mixes_rows_or_cuts_gradients_is_refused(cls):
    with pytest.raises(ValueError, match=f"{cls.__name__}.forward must (give b|pass on the gradients)"):
        tfk.patch(feed_forward(cls))


def test_what_draws_elsewhere_is_left_as_it_is():
    assert notes(tfk.patch(attention(Depth)))[""].startswith("because its forward draws numbers of another generator")


def test_an_argument_that_is_no_mask_is_left_to_the_forward():
    model, x = attention(Second, arguments=("x", None)).eval(), torch.randn(2, 5, WIDTH)
    assert_same_results(model, lambda m: m(x.to(m.o.weight)), backend="cpu")
    assert_left(model, x, torch.randn(2, 5, WIDTH))


class Keeps(FeedForward):
    def forward(self, x):
        self.hidden = F.gelu(self.a(x))
        return self.b(self.hidden)


class Counts(FeedForward):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.calls += 1
        return super().forward(x)


@pytest.mark.parametrize(("cls", "name"), [(Keeps, "hidden"), (Counts, "calls")])
def test_a_block_that_keeps_something_is_left_as_it_is(cls, name):
    model = feed_forward(cls)
    assert notes(tfk.patch(model))[""] == f"because its forward writes {name}, which the fused one does not"
    assert name == "calls" or not hasattr(model, name)
    assert name == "hidden" or model.calls == 0


class Registered(nn.Module):
    """Whose subclasses must give a name that nobody else has."""

    known: dict = {}

    def __init_subclass__(cls, *, name, **told):
        super().__init_subclass__(**told)
        assert name not in Registered.known
        Registered.known[name] = cls


class RegisteredBlock(Registered, FeedForward, name="block"):
    pass


class RegisteredSequence(nn.Sequential):
    derived: list = []

    def __init_subclass__(cls):
        RegisteredSequence.derived.append(cls)


def test_fused_classes_are_in_no_registry_of_the_users():
    model = nn.ModuleList(
        [feed_forward(RegisteredBlock), RegisteredSequence(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))]
    )
    assert {"0", "1"} <= {entry.name for entry in tfk.patch(model).replaced}
    assert Registered.known == {"block": RegisteredBlock} and RegisteredSequence.derived == []

    class Later(RegisteredSequence):
        pass

    assert RegisteredSequence.derived == [Later] and "__init_subclass__" not in RegisteredBlock.__dict__


def test_an_epsilon_in_a_buffer_compiles():
    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))
            self.register_buffer("eps", torch.tensor(1e-3))

        def forward(self, x):
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight

    tfk.patching.declare_rms_norm(Norm)
    model, x = Norm(), torch.randn(3, WIDTH)
    wanted = model(x)
    with tfk.patch(model) as report:
        torch.testing.assert_close(model(x), wanted)
        assert not report.fallbacks
        torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(x), wanted)
