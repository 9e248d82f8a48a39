"""What a trial of a declaration did not see, or did to the module, until a module of that kind was declared."""

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tfm_kernels as tfk
from tests.patching.attentions import HEADS, WIDTH
from tests.patching.test_patch_declaration import recipes  # noqa: F401
from tests.patching.test_patch_declared_trials import notes

pytestmark = pytest.mark.usefixtures("recipes")
X = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(0))


class Perceptron(nn.Module):
    def __init__(self, width=WIDTH, name="gelu"):
        super().__init__()
        self.a, self.b, self.drop, self.name = nn.Linear(width, 32), nn.Linear(32, width), nn.Dropout(0.1), name

    def forward(self, x):
        return self.b(self.act(self.a(x)))

    def act(self, hidden):
        return getattr(F, self.name)(hidden)


def feed_forward(cls, **more):
    tfk.patching.declare_feed_forward(cls, **{"first": "a", "second": "b", "activation": "gelu", **more})


class Attention(nn.Module):
    def __init__(self, causal=True):
        super().__init__()
        self.heads, self.qkv, self.out = HEADS, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def split(self, x):
        return self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)

    def merge(self, y):
        return self.out(y.transpose(1, 2).flatten(-2))

    def forward(self, x):
        return self.merge(F.scaled_dot_product_attention(*self.split(x)))


def attention(cls, **more):
    tfk.patching.declare_attention(cls, qkv="qkv", out="out", heads="heads", **more)


class Wrapper(nn.Module):
    def __init__(self, norm=None, dtype=torch.float32):
        super().__init__()
        self.norm, self.drop = norm or nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.to(dtype)

    def forward(self, x, y):
        return self.norm(x + y)


def test_a_module_that_copies_itself_by_itself_is_not_changed():
    class Shared(Perceptron):
        def __deepcopy__(self, memo):
            return self

    class Holder(Perceptron):
        def __init__(self):
            super().__init__()
            self.a = Frozen(WIDTH, 32)

    class Frozen(nn.Linear):
        def __deepcopy__(self, memo):
            return self

    for cls in (Shared, Holder):
        feed_forward(cls, dropout="drop")
        module = cls().eval()
        before = {name: value.clone() for name, value in module.state_dict().items()}
        note = notes(tfk.patch(module))[""]
        assert note == "because a copy of it, to be tried, would share parts with it"
        assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
        assert module.drop.p == 0.1 and not module.training


def test_what_cannot_be_copied_is_left_as_it_is():
    class Locked(Perceptron):
        def __init__(self):
            super().__init__()
            self.lock = threading.Lock()

    feed_forward(Locked)
    assert notes(tfk.patch(Locked()))[""].startswith("because its copy could not be tried: TypeError: cannot pickle")


def made(causal):
    class Made(Attention):
        def forward(self, x):
            return self.merge(F.scaled_dot_product_attention(*self.split(x), is_causal=causal))

    return Made


def test_classes_of_one_name_have_a_declaration_each():
    first, second = made(True), made(False)
    attention(first, causal=True)
    modules = [first(), second()]
    wanted = [module(X) for module in modules]
    assert notes(tfk.patch(modules[0]))[""] == "fused attention"
    attention(second)
    assert notes(tfk.patch(modules[1]))[""] == "fused attention"
    for module, y in zip(modules, wanted, strict=True):
        for each in (module, copy.deepcopy(module)):
            torch.testing.assert_close(each(X), y)


def test_a_refused_declaration_leaves_a_patched_module_as_it_was():
    cls = made(True)
    attention(cls, causal=True)
    module = cls()
    wanted = module(X)
    tfk.patch(module)
    attention(cls)
    with pytest.raises(ValueError, match="those of causal=True"):
        tfk.patch(module)
    torch.testing.assert_close(module(X), wanted)
    assert tfk.unpatch(module) and torch.equal(module(X), wanted)


def test_buffers_are_told_apart_by_all_they_hold():
    class Masked(Attention):
        def __init__(self, mask):
            super().__init__()
            self.register_buffer("mask", mask)

        def forward(self, x):
            keep = self.mask[: x.shape[1], : x.shape[1]]
            return self.merge(F.scaled_dot_product_attention(*self.split(x), attn_mask=keep))

    attention(Masked, causal=True)
    whole = torch.ones(128, 128, dtype=torch.bool)
    report = tfk.patch(nn.Sequential(Masked(whole.tril()), Masked(whole.triu())))
    assert notes(report)["0"] == "fused attention" and "not true of it" in notes(report)["1"]


def test_a_norm_that_is_not_as_declared_is_not_fused_with_its_sum():
    class Norm(nn.Module):
        def __init__(self, shift=0.0):
            super().__init__()
            self.weight, self.bias, self.eps = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH)), 1e-5
            self.shift = shift

        def forward(self, x):
            return F.layer_norm(x, (WIDTH,), self.weight, self.bias, self.eps) + self.shift

    tfk.patching.declare_layer_norm(Norm)
    tfk.patching.declare_residual(Wrapper, norm="norm")
    model = nn.ModuleList([Wrapper(Norm()), Wrapper(Norm(1.0))])
    wanted = [module(X, X.flip(0)) for module in model]
    report = notes(tfk.patch(model))
    assert report["0"].startswith("dropout, sum") and "what was declared of its norm is not true" in report["1"]
    for module, y in zip(model, wanted, strict=True):
        torch.testing.assert_close(module(X, X.flip(0)), y)


OTHER_SUMS = {
    "x": lambda x, y: x, "y": lambda x, y: y, "3x + y": lambda x, y: 3 * x + y, "x - y / 2": lambda x, y: x - y / 2,
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", OTHER_SUMS)
def test_other_sums_are_refused_in_every_dtype(name, dtype):
    class Other(Wrapper):
        def forward(self, x, y):
            return self.norm(OTHER_SUMS[name](x, y))

    tfk.patching.declare_residual(Other, norm="norm")
    for norm in (nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH, eps=0.0)):
        with pytest.raises(ValueError, match="Other.forward must give norm.x . dropout.sublayer.x..., got other num"):
            tfk.patch(Other(norm, dtype))


class WritesAttention(Attention):
    def forward(self, x):
        x += 1.0
        return super().forward(x)


class WritesPerceptron(Perceptron):
    def forward(self, x):
        x *= 2.0
        return super().forward(x)


class WritesNorm(nn.LayerNorm):
    def forward(self, x):
        x -= x.mean(-1, keepdim=True)
        return F.layer_norm(x, (WIDTH,), self.weight, self.bias, self.eps)


@pytest.mark.parametrize(
    "make",
    [
        lambda: (attention(WritesAttention), WritesAttention())[1],
        lambda: (feed_forward(WritesPerceptron), WritesPerceptron())[1],
        lambda: (tfk.patching.declare_layer_norm(WritesNorm), WritesNorm(WIDTH))[1],
    ],
    ids=["attention", "feed-forward", "norm"],
)
def test_a_forward_that_writes_into_its_input_is_refused(make):
    with pytest.raises(ValueError, match="forward must leave what it is given as it is"):
        tfk.patch(make())


class TwiceAttention(Attention):
    def forward(self, x):
        q, k, v = self.split(x)
        weights = self.drop((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1))
        return self.drop(self.merge(weights @ v))


class DropsValues(Attention):
    def forward(self, x):
        q, k, v = self.split(x)
        return self.merge(F.scaled_dot_product_attention(q, k, self.drop(v)))


class DropsBefore(Perceptron):
    def act(self, hidden):
        return F.gelu(self.drop(hidden))


class DropsAfter(Perceptron):
    def act(self, hidden):
        return self.drop(F.gelu(hidden))


class DropsAsOnAGpu(Perceptron):
    """F.dropout there is this operator, which gives what it drew beside the result."""

    def __init__(self, before):
        super().__init__()
        self.before, self.p = before, 0.1

    def act(self, hidden):
        drop = lambda t: torch.native_dropout(t, self.p, True)[0] if self.training and self.p else t
        return F.gelu(drop(hidden)) if self.before else drop(F.gelu(hidden))


class AttendsAsOnAGpu(Attention):
    """Fused attention draws inside of one operator, as a mode sees it."""

    def forward(self, x):
        return self.merge(attend(*self.split(x), self.drop.p if self.training else 0.0)[0])


@torch.library.custom_op("tfm_kernels_tests::attend", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p), q.new_zeros(1)


def test_random_numbers_inside_of_attention_are_believed():
    attention(AttendsAsOnAGpu, dropout="drop")
    assert notes(tfk.patch(AttendsAsOnAGpu()))[""] == "fused attention"


def test_dropout_is_seen_in_either_form():
    feed_forward(DropsAsOnAGpu, dropout="p")
    with pytest.raises(ValueError, match="in another place or twice"):
        tfk.patch(DropsAsOnAGpu(before=True))
    assert notes(tfk.patch(DropsAsOnAGpu(before=False)))[""] == "feed-forward"


@pytest.mark.parametrize(
    "make",
    [
        lambda: (attention(TwiceAttention, out_dropout="drop"), TwiceAttention())[1],
        lambda: (attention(DropsValues, dropout="drop"), DropsValues())[1],
        lambda: (feed_forward(DropsBefore, dropout="drop"), DropsBefore())[1],
    ],
    ids=["twice", "values", "before"],
)
def test_dropout_in_another_place_is_refused(make):
    with pytest.raises(
        ValueError, match="in training must drop by 'drop' what is declared, got others dropped, in anoth"
    ):
        tfk.patch(make())


def test_dropout_in_its_place_is_taken():
    feed_forward(DropsAfter, dropout="drop")
    attention(TwiceAttention, dropout="drop", out_dropout="drop")
    assert notes(tfk.patch(DropsAfter()))[""] == "feed-forward"
    assert notes(tfk.patch(TwiceAttention()))[""] == "fused attention"


def test_masks_of_two_axes_are_tried_beside_others():
    class Padded(Attention):
        def forward(self, x, mask=None):
            if mask is not None and mask.dim() == 2:
                mask = mask[:, None, None]
            return self.merge(F.scaled_dot_product_attention(*self.split(x), attn_mask=mask))

    attention(Padded, mask="sdpa")
    with pytest.raises(ValueError, match="with a mask of two axes: mask_axis='keys' says that it is"):
        tfk.patch(Padded())
    attention(Padded, mask="sdpa", mask_axis="keys")
    model, keep = Padded(), torch.ones(2, 5, dtype=torch.bool)
    keep[0, 3:] = False
    wanted = model(X, keep)
    with tfk.patch(model) as report:
        torch.testing.assert_close(model(X, keep), wanted)
        assert not report.fallbacks


def test_a_sublayer_that_gives_two_is_called_once():
    class Two(Wrapper):
        def forward(self, x, sublayer):
            y = sublayer(x)
            return self.norm(x + (y[0] if isinstance(y, tuple) else y))

    class Child(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.sub = nn.LayerNorm(WIDTH), Pair()

        def forward(self, x, mask):
            return self.norm(x + self.sub(x, mask)[0])

    class Pair(nn.Linear):
        def __init__(self):
            super().__init__(WIDTH, WIDTH)

        def forward(self, x, mask):
            return F.linear(x, self.weight, self.bias), None

    tfk.patching.declare_residual(Two, norm="norm")
    tfk.patching.declare_residual(Child, norm="norm", sublayer="sub")
    calls = []
    model = Two()
    wanted = model(X, lambda t: (t * 2, None))
    tfk.patch(model)
    torch.testing.assert_close(model(X, lambda t: (calls.append(1), (t * 2, None))[1]), wanted)
    assert calls == [1]
    assert notes(tfk.patch(Child()))[""] == "because its sub gives a tuple, not a tensor"


def test_a_sum_of_other_things_than_rows_is_the_forwards():
    class Optional(Wrapper):
        def forward(self, x, y):
            return self.norm(x if y is None else x + y)

    tfk.patching.declare_residual(Optional, norm="norm")
    model = Optional()
    given = (None, 0.5, X > 0, torch.arange(WIDTH), X)
    wanted = [model(X, y) for y in given]
    assert notes(tfk.patch(model))[""].startswith("dropout, sum")
    for y, expected in zip(given, wanted, strict=True):
        torch.testing.assert_close(model(X, y), expected)


def test_a_residual_of_an_unknown_norm_is_left_as_it_is():
    class Derived(nn.LayerNorm):
        pass

    tfk.patching.declare_residual(Wrapper, norm="norm")
    for norm in (Derived(WIDTH), nn.LayerNorm((5, WIDTH))):
        note = notes(tfk.patch(Wrapper(norm)))[""]
        assert (
            note == f"because its norm is {type(norm).__name__}, not a norm of the last axis that is known or declared"
        )


def test_a_trial_draws_nothing_from_numpy():
    numpy = pytest.importorskip("numpy")

    class Draws(Perceptron):
        def forward(self, x):
            numpy.random.rand()
            return super().forward(x)

    feed_forward(Draws)
    numpy.random.seed(0)
    wanted = numpy.random.rand()
    numpy.random.seed(0)
    note = notes(tfk.patch(Draws()))[""]
    assert note == "because its forward draws numbers of another generator than torch's"
    assert numpy.random.rand() == wanted
