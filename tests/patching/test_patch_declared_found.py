"""What trials of declarations find beyond the numbers of a few rows, and which calls the fused code then leaves."""

import copy
import math

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


class OnlyPadding(Attention):
    """Keep masks of shape (B, 1, 1, Tk) alone."""

    def shown(self, mask):
        assert mask.shape[1:3] == (1, 1)
        return mask


class Named(ByRank):
    """Reads masks of two axes as (B, Tk), or as (Tq, Tk), as its attribute says."""

    def __init__(self, keys):
        super().__init__()
        self.keys = keys

    def shown(self, mask):
        return mask if mask.dim() == 2 and not self.keys else super().shown(mask)


def test_masks_of_one_row_for_all_queries():
    model, x = attention(OnlyPadding).eval(), torch.randn(2, 6, WIDTH)
    mask = torch.ones(2, 1, 1, 6, dtype=torch.bool)
    mask[1, ..., 4:] = False
    assert_same_results(model, lambda m: m(x.to(m.o.weight), mask), backend="cpu")


def test_what_is_found_of_one_module_says_nothing_of_others():
    """Nor do modules that were refused, or are in another model; a copy and a pickle keep what was found."""
    tfk.patching.declare_attention(Named, **DECLARED, dropout="drop", mask_axis="batch")
    x, mask = torch.randn(6, 6, WIDTH), torch.ones(6, 6).tril()
    both = nn.ModuleList([Named(keys=True), Named(keys=False)]).eval()
    tfk.patch(Named(keys=True))
    for first in (both, copy.deepcopy(both)):
        with tfk.patch(first) as report:
            for model in (first, copy.deepcopy(first)):
                for module in model:
                    module(x, mask)
            assert list(report.fallbacks) == ["0"]


class Uncastable(Attention):
    def _apply(self, fn, recurse=True):
        raise RuntimeError("is not to be cast")


def test_a_module_that_refuses_to_be_cast():
    model, x = attention(Uncastable).eval(), torch.randn(2, 5, WIDTH)
    wanted = model(x)
    with tfk.patch(model) as report:
        torch.testing.assert_close(model(x), wanted)
        assert notes(report)[""] == "fused attention" and not report.fallbacks


class Remembers(nn.LayerNorm):
    def forward(self, x):
        self.last = x.std()
        return super().forward(x)


def test_what_a_called_child_keeps_is_its_own():
    class Normed(FeedForward):
        def __init__(self):
            super().__init__()
            self.norm = Remembers(WIDTH)

        def forward(self, x):
            return super().forward(self.norm(x))

    tfk.patching.declare_feed_forward(Normed, first="a", second="b", activation="gelu", norm="norm")
    model = Normed()
    assert notes(tfk.patch(model))[""] == "feed-forward"
    model(torch.randn(2, WIDTH))
    assert model.norm.last > 0


class OwnPrecision(Attention):
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return super().forward(x.float())


class OwnPrecisionBlock(FeedForward):
    @torch.autocast("cpu", enabled=False)
    def forward(self, x):
        return super().forward(x.float())


class Weights(Attention):
    def forward(self, x):
        weights = self.scores(x).softmax(-1)
        return self.mixed(self.drop(weights), x), weights


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
        assert_same_results(model.eval(), lambda m: m(x.to(m.o.weight))[part], backend="cpu")
    stock = copy.deepcopy(model)
    with tfk.patch(model.train(), backend="cpu") as report:
        (first, weights), (second, _) = model(x.float()), model(x.float())
        torch.testing.assert_close(weights, stock.eval()(x.float())[1])
        assert not torch.equal(first, second) and not report.fallbacks
    with pytest.raises(ValueError, match="weights must be True, False or 'before_dropout', got 'after'"):
        attention(Weights, weights="after")


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
