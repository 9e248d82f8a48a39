"""What trials of declarations find beyond the numbers of a few rows, and which calls the fused code then leaves."""

import copy
import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tfm_kernels as tfk
from tests.patching.models import assert_as_exact_as_before, assert_same_results, results
from tests.patching.test_patch_declaration import recipes  # noqa: F401
from tests.patching.test_patch_declared_trials import notes

WIDTH, HEADS = 32, 4
DECLARED = dict(query="q", key="k", value="v", out="o", heads=HEADS)


pytestmark = pytest.mark.usefixtures("recipes")


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def heads(x):
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


class Attention(nn.Module):
    """Keep masks of any number of axes that broadcast, dropout on the weights."""

    def __init__(self, p=0.5):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.drop = nn.Dropout(p)

    def scores(self, x):
        return heads(self.q(x)) @ heads(self.k(x)).mT / math.sqrt(WIDTH // HEADS)

    def mixed(self, weights, x):
        return self.o((weights @ heads(self.v(x))).transpose(1, 2).flatten(2))

    def forward(self, x, mask=None):
        scores = self.scores(x)
        scores = scores if mask is None else scores.masked_fill(self.shown(mask) == 0, -1e9)
        return self.mixed(self.drop(scores.softmax(-1)), x)

    def shown(self, mask):
        return mask


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x):
        return self.b(F.gelu(self.a(x)))


def attention(cls, **more):
    tfk.patching.declare_attention(cls, **{**DECLARED, "dropout": "drop", **more})
    return cls()


def feed_forward(cls):
    tfk.patching.declare_feed_forward(cls, first="a", second="b", activation="gelu")
    return cls()


def assert_left(model, *given, **more):
    """The forward runs, and the report says so; with ``more`` arguments of ``torch.autocast``."""
    stock = copy.deepcopy(model)
    with tfk.patch(model, backend="cpu") as report, torch.autocast("cpu", **(more or {"enabled": False})):
        assert any(entry.name == "" and entry.replaced for entry in report.entries), str(report)
        got, wanted = model(*given), stock(*given)
        assert report.fallbacks
    for mine, theirs in zip(*((r if isinstance(r, tuple) else (r,)) for r in (got, wanted)), strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)


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


class Weights(Attention):
    def forward(self, x):
        weights = self.scores(x).softmax(-1)
        return self.mixed(self.drop(weights), x), weights


REFUSED = {
    "no mask": (Second, {}, "must take a mask of mask='keep' and mask_axis=None as its 'context', got an error for "
                "each that was tried: with arguments=\\('x', None\\) its own code runs"),
    "dropout that needs a mask": (NeedsMask, {"dropout": None}, "must drop elements by no dropout alone"),
    "dropout of the result": (DropsResult, {}, "in training must drop by 'drop' what is declared"),
    "window": (Windowed, {"causal": True}, "got other numbers of 33 tokens: a window"),
    "detached": (Detached, {}, "must pass on the gradients of what is declared, got others"),
    "drawn elsewhere": (Depth, {}, "must draw by torch alone, got numbers of another generator"),
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


@pytest.mark.parametrize("cls", [Rolls, Broadcasts, Cuts])
def test_a_block_that_mixes_rows_or_cuts_gradients_is_refused(cls):
    with pytest.raises(ValueError, match=f"{cls.__name__}.forward must (give b|pass on the gradients)"):
        tfk.patch(feed_forward(cls))


def test_an_argument_that_is_no_mask_is_left_to_the_forward():
    model, x = attention(Second, arguments=("x", None)).eval(), torch.randn(2, 5, WIDTH)
    assert_same_results(model, lambda m: m(x.to(m.o.weight)), backend="cpu")
    assert_left(model, x, torch.randn(2, 5, WIDTH))


class ByRank(Attention):
    """(B, Tk) and (B, Tq, Tk), as BERT's."""

    def shown(self, mask):
        return mask[:, None, None] if mask.dim() == 2 else mask[:, None] if mask.dim() == 3 else mask


class Extended(Attention):
    """(B, Tk) of 1 and 0, or what is added to the scores, of four axes."""

    def forward(self, x, mask=None):
        scores = self.scores(x)
        if mask is not None:
            scores = scores + ((1.0 - mask[:, None, None].to(x.dtype)) * -1e4 if mask.dim() == 2 else mask)
        return self.mixed(self.drop(scores.softmax(-1)), x)


OF_AXES = {
    "batch": (ByRank, "batch", (6, 6, 6), (6, 6)),
    "batch, of four": (ByRank, "batch", (6, 1, 6, 6), (6, 6)),
    "keys": (ByRank, "keys", (6, 6), (6, 6, 6)),
    "keys, added where of four": (Extended, "keys", (6, 6), (6, 1, 6, 6)),
    "three of which one is 1": (Attention, None, (1, 6, 6), None),
    "two": (Attention, None, (6, 6), None),
}


@pytest.mark.parametrize("case", OF_AXES)
def test_masks_with_other_numbers_of_axes(case):
    """Fused where the trial found them right, and the forward's where it did not."""
    cls, axis, right, wrong = OF_AXES[case]
    model, x = attention(cls, mask_axis=axis).eval(), torch.randn(6, 6, WIDTH)
    mask = torch.rand(right) < 0.7
    mask[..., 0] = True
    assert_same_results(model, lambda m: m(x.to(m.o.weight), mask), backend="cpu")
    with tfk.patch(model) as report:
        model(x, mask)
        assert not report.fallbacks
    if wrong is not None:
        other = torch.rand(wrong) < 0.5
        assert_left(model, x, other.float() if cls is Extended else other)


class OwnPrecision(Attention):
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return super().forward(x.float())


class OwnPrecisionBlock(FeedForward):
    @torch.autocast("cpu", enabled=False)
    def forward(self, x):
        return super().forward(x.float())


class WideWeights(Attention):
    def forward(self, x):
        weights = self.scores(x).softmax(-1, dtype=torch.float32)
        return self.mixed(self.drop(weights).to(x.dtype), x), weights


class WideNorm(nn.Module):
    def forward(self, x):
        return F.rms_norm(x.float(), x.shape[-1:], eps=1e-6)


class WideProduct(WideNorm):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return super().forward(x) * self.weight


def test_a_forward_that_takes_no_part_in_autocast_is_left_to_itself_there():
    x = torch.randn(2, 5, WIDTH)
    for model in (attention(OwnPrecision, arguments=("x", None)).eval(), feed_forward(OwnPrecisionBlock)):
        plain = copy.deepcopy(model).double()
        plain.__class__ = type(model).__bases__[0]
        run = lambda m: m(x.to(next(m.parameters())))
        assert_as_exact_as_before(model, run, results(plain, run), backend="cpu")
        assert_left(model, x, dtype=torch.bfloat16)


def test_results_that_are_wide_in_16_bits_are_the_forwards():
    x = torch.randn(2, 5, WIDTH)
    model = attention(WideWeights, weights=True, dropout=None)
    model.drop.p = 0.0
    assert_left(model.bfloat16().eval(), x.bfloat16())
    tfk.patching.declare_rms_norm(WideNorm, weight=None, eps=1e-6)
    assert_left(WideNorm(), x.bfloat16())
    assert_left(WideNorm(), torch.arange(WIDTH))
    tfk.patching.declare_rms_norm(WideProduct, eps=1e-6)
    model = WideProduct()
    tfk.patch(model)
    assert model.bfloat16()(x.bfloat16()).dtype == torch.float32  # of float32 when it was patched


def test_weights_before_dropout():
    model = attention(Weights, weights="before_dropout")
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    for part in (0, 1):
        assert_same_results(model.eval(), lambda m: m(x.to(m.o.weight))[part], backend="cpu")  # noqa: B023
    stock = copy.deepcopy(model)
    with tfk.patch(model.train(), backend="cpu") as report:
        (first, weights), (second, _) = model(x.float()), model(x.float())
        torch.testing.assert_close(weights, stock.eval()(x.float())[1])
        assert not torch.equal(first, second) and not report.fallbacks
    with pytest.raises(ValueError, match="weights must be True, False or 'before_dropout', got 'after'"):
        attention(Weights, weights="after")


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


def test_a_parametrized_layer_computes_its_weight_once_a_call():
    model, x, count = attention(Attention).eval(), torch.randn(2, 5, WIDTH), []
    nn.utils.parametrizations.spectral_norm(model.q)
    with tfk.patch(model) as report:
        model.q.parametrizations.weight[0].register_forward_hook(lambda *_: count.append(1))
        model(x)
        assert len(count) == 1 and not report.fallbacks


def test_hooks_and_what_they_hold_are_not_copied_for_a_trial(tmp_path):
    with open(tmp_path / "log", "w") as log:  # which cannot be copied
        model = nn.Sequential(feed_forward(FeedForward))
        model[0].register_forward_hook(lambda *_, log=log: log.write("called\n") and None)
        model[0].log_to = None
        model[0].register_forward_pre_hook(Holding(log))
        with tfk.patch(model) as report:
            assert notes(report)["0"] == "feed-forward"
            model(torch.randn(2, WIDTH))


class Holding:
    def __init__(self, log):
        self.log = log

    def __call__(self, module, args):
        self.log.write("before\n")


def test_patched_in_inference_mode():
    tfk.patching.declare_attention(Attention, **DECLARED, dropout="drop")
    with torch.inference_mode():
        report = tfk.patch(nn.ModuleList([Attention(), feed_forward(FeedForward)]).eval())
    assert {"0", "1"} <= {entry.name for entry in report.replaced}


def test_a_number_must_be_one():
    class Buffered(Attention):
        def __init__(self):
            super().__init__()
            self.register_buffer("tril", torch.ones(8, 8).tril())

    with pytest.raises(ValueError, match=r"causal must name a number, got 'tril', a tensor of \(8, 8\)"):
        tfk.patch(attention(Buffered, causal="tril"))
