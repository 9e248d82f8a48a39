"""What a declaration says of masks, and what it names that is not there."""

import copy
import math
import re

import pytest
import torch
from torch import nn

import tfm_kernels as tfk
from tests.patching.models import assert_same_results, compare, results
from tests.patching.test_patch_recipe import FeedForward, LayerNorm, MultiHeadAttention, Residual, SublayerConnection
from tfm_kernels.patching import hand_written, registry


class MultiHeadedAttention(nn.Module):
    """In the style of The Annotated Transformer: the mask has a batch and no heads, which the forward puts in."""

    def __init__(self, h, d_model, dropout=0.0):
        super().__init__()
        self.d_k, self.h, self.attn = d_model // h, h, None
        self.linears, self.dropout = nn.ModuleList(nn.Linear(d_model, d_model) for _ in range(4)), nn.Dropout(dropout)

    def forward(self, query, key, value, mask=None):
        if mask is not None:
            mask = mask.unsqueeze(1)
        B = query.size(0)
        q, k, v = (
            layer(t).view(B, -1, self.h, self.d_k).transpose(1, 2)
            for layer, t in zip(self.linears, (query, key, value), strict=False)
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        self.attn = (scores if mask is None else scores.masked_fill(mask == 0, -1e9)).softmax(-1)
        x = self.dropout(self.attn) @ v
        return self.linears[-1](x.transpose(1, 2).contiguous().view(B, -1, self.h * self.d_k))


ANNOTATED = dict(query="linears.0", key="linears.1", value="linears.2", out="linears.3", heads="h", dropout="dropout")


@pytest.fixture
def recipes(monkeypatch):
    """Takes back what a test declares."""
    monkeypatch.setattr(hand_written, "_norms", dict(hand_written._norms))
    before = registry.registered()
    yield
    registry._recipes[:] = before


@pytest.mark.parametrize("rows", [3, 4])  # as many as heads, and not
@pytest.mark.parametrize("queries", [1, 7])
def test_a_mask_whose_first_axis_is_the_batch(recipes, rows, queries):
    x = torch.randn(rows, 7, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    keep = (torch.arange(7) < torch.tensor([4, 7, 2, 5])[:rows, None])[:, None]
    keep = keep & torch.ones(queries, 7, dtype=torch.bool).tril(7 - queries)
    tfk.patching.declare_attention(MultiHeadedAttention, **ANNOTATED, mask_axis="batch")
    for mask in (keep, keep.long(), None):
        torch.manual_seed(0)
        model = MultiHeadedAttention(4, 16)
        run = lambda m, mask=mask: m(*[x.to(m.linears[0].weight)] * 3, mask)
        assert_same_results(model, run)
    tfk.patching.declare_attention(MultiHeadedAttention, **ANNOTATED)
    with pytest.raises(ValueError, match=r"got other numbers with a mask: those of mask_axis='batch'$"):
        tfk.patch(model)


def test_a_mask_whose_first_axis_is_the_heads(recipes):
    torch.manual_seed(0)
    model, x = MultiHeadAttention(16, 4), torch.randn(3, 7, 16, dtype=torch.float64)
    keep = torch.rand(4, 7, 7) < 0.5
    keep |= torch.eye(7, dtype=torch.bool)
    declaration = dict(query="w_q", key="w_k", value="w_v", out="w_o", heads="heads")
    tfk.patching.declare_attention(MultiHeadAttention, **declaration, mask_axis="heads")
    run = lambda m: m(*[x.to(m.w_q.weight)] * 3, keep)
    assert_same_results(model, run)
    tfk.patching.declare_attention(MultiHeadAttention, **declaration)
    with tfk.patch(model, backend="reference"):
        got = r"have a first axis of 1, got \(4, 7, 7\): declare mask_axis='batch' or 'heads' to say"
        with pytest.raises(ValueError, match=f"declare_attention: mask must be 2-D or 4-D, or {got}"):
            run(model)


class Named(nn.Module):
    """A post-norm block whose parts call each other by the names of their arguments, which are their own."""

    def __init__(self):
        super().__init__()
        self.norm, self.feed_forward = Norm(16), Perceptron(16, 32)
        self.wrapped, self.outer = Wrapped(Perceptron(16, 32)), SublayerConnection(16)

    def forward(self, x):
        x = self.norm(inp=self.feed_forward(hidden=x) + x)
        x = self.outer(x, sublayer=self.feed_forward)
        x = self.outer(sublayer=self.feed_forward, x=x)
        return self.wrapped(states=x, scale=0.5)


class Norm(LayerNorm):
    def forward(self, inp):
        return super().forward(inp)


class Perceptron(FeedForward):
    def forward(self, hidden, scale=1.0):
        return super().forward(hidden) * scale


class Wrapped(nn.Module):
    def __init__(self, sublayer):
        super().__init__()
        self.sublayer, self.norm = sublayer, Norm(16)

    def forward(self, states, **others):
        return self.norm(states + self.sublayer(states, **others))


def test_calls_by_keyword(recipes):
    tfk.patching.declare_layer_norm(Norm, weight="gamma", bias="beta", unbiased=True)
    tfk.patching.declare_feed_forward(Perceptron, first="fc1", second="fc2")
    tfk.patching.declare_residual(Wrapped, norm="norm", sublayer="sublayer")
    tfk.patching.declare_residual(SublayerConnection, norm="norm", dropout="dropout")
    torch.manual_seed(0)
    x, model = torch.randn(3, 7, 16, dtype=torch.float64), Named()
    run = lambda m: m(x.to(m.norm.gamma))
    exact = results(model.double(), run)
    with tfk.patch(model, backend="reference") as report:
        compare(results(model, run), exact, 1e-9)
        told = {"its recipe does not serve this call": 1}  # what its second argument says is nobody's to know
        assert report.fallbacks == {"wrapped.sublayer": told}


def test_a_call_that_cannot_be_bound_is_the_original_forwards(recipes):
    tfk.patching.declare_layer_norm(Norm, weight="gamma", bias="beta", unbiased=True)
    tfk.patching.declare_residual(SublayerConnection, norm="norm", dropout="dropout")
    x = torch.randn(3, 16)
    for model, args, kwargs in (
        (Norm(16), (x,), {"inp": x}),
        (Norm(16), (), {}),
        (Norm(16), (), {"input": x}),
        (SublayerConnection(16), (x,), {}),
        (SublayerConnection(16), (x, torch.relu), {"scale": 1.0}),
    ):
        with pytest.raises(TypeError) as stock:
            model(*args, **kwargs)
        with tfk.patch(model, backend="reference"), pytest.raises(TypeError, match=re.escape(str(stock.value))):
            model(*args, **kwargs)


def test_a_residual_without_a_place_for_its_sublayer_is_refused(recipes):
    wanted = "declare_residual: sublayer must name a child where Norm.forward has no second argument, got None; its"
    with pytest.raises(ValueError, match=re.escape(f"{wanted} arguments are ('inp',)")):
        tfk.patching.declare_residual(Norm, norm="norm")


WRONG = {  # a declaration -> what patch says of it
    "declare_attention: key must name a child of MultiHeadedAttention, got 'linears.7'; linears has 0, 1, 2, 3": (
        lambda p: p.declare_attention(MultiHeadedAttention, **{**ANNOTATED, "key": "linears.7"})
    ),
    "declare_attention: out must name a child of MultiHeadedAttention, got 'attn'; it has linears, dropout": (
        lambda p: p.declare_attention(MultiHeadedAttention, **{**ANNOTATED, "out": "attn"})
    ),
    "declare_attention: heads must name an attribute of MultiHeadedAttention, got 'heads'; it has d_k, h, attn, ": (
        lambda p: p.declare_attention(MultiHeadedAttention, **{**ANNOTATED, "heads": "heads"})
    ),
    "declare_attention: dropout must name an attribute of MultiHeadedAttention, got 'drop'; it has ": (
        lambda p: p.declare_attention(MultiHeadedAttention, **{**ANNOTATED, "dropout": "drop"})
    ),
    "declare_feed_forward: first must name a child of FeedForward, got 'w_1'; it has fc1, fc2, dropout": (
        lambda p: p.declare_feed_forward(FeedForward, first="w_1", second="fc2")
    ),
    "declare_layer_norm: weight must name an attribute of LayerNorm, got 'a_2'; it has eps, gamma, beta": (
        lambda p: p.declare_layer_norm(LayerNorm, weight="a_2", bias="beta")
    ),
    "declare_residual: sublayer must name a child of Residual, got 'layer'; it has sublayer, norm, dropout": (
        lambda p: p.declare_residual(Residual, norm="norm", sublayer="layer")
    ),
    "recipe: covers must name a child of FeedForward, got 'fc3'; it has fc1, fc2, dropout": (
        lambda p: p.recipe(FeedForward, covers=("fc1", "fc3"))(lambda self, x: NotImplemented)
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_declaration_of_what_is_not_there_is_refused_by_patch(recipes, message):
    model = nn.ModuleList([nn.LayerNorm(16), MultiHeadedAttention(4, 16), Residual(FeedForward(16, 32), 16)])
    WRONG[message](tfk.patching)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        tfk.patch(model)
    assert tfk.unpatch(model) == 0


class StdNorm(LayerNorm):
    """The Annotated Transformer's, whose eps stands outside of the root."""

    def forward(self, x):
        return self.gamma * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + self.eps) + self.beta


class RMSNorm(nn.Module):
    """As hand-written Llamas have it: in float32, and rounded to the input's dtype before the weight."""

    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.scale, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        wide = x.float() if x.dtype.itemsize < 4 else x
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).type_as(x) * self.scale


class RootNorm(RMSNorm):
    """As the paper's own code has it: over the root of the mean square, and eps."""

    def forward(self, x):
        return self.scale * x / (x.norm(dim=-1, keepdim=True) * x.shape[-1] ** -0.5 + self.eps)


class OneMoreNorm(RMSNorm):
    def forward(self, x):
        return super().forward(x) / self.scale * (1 + self.scale)


class AddAndNorm(nn.Module):
    """A residual of the post-norm kind around any norm."""

    def __init__(self, norm, dropout=0.0):
        super().__init__()
        self.norm, self.dropout = norm, nn.Dropout(dropout)

    def forward(self, x, sublayer):
        return self.norm(x + self.dropout(sublayer(x)))


def declare_norms():
    """Every kind of norm there is a declaration for."""
    outside = {"eps": 0.0, "eps_outside": "eps"}
    tfk.patching.declare_layer_norm(StdNorm, weight="gamma", bias="beta", unbiased=True, **outside)
    tfk.patching.declare_rms_norm(RMSNorm, weight="scale")
    tfk.patching.declare_rms_norm(RootNorm, weight="scale", **outside)
    tfk.patching.declare_residual(AddAndNorm, norm="norm", dropout="dropout")


NORMS = {
    "std": lambda: StdNorm(16, 1e-6), "large eps": lambda: StdNorm(16, 0.5), "rms": lambda: RMSNorm(16),
    "root": lambda: RootNorm(16), "torch": lambda: nn.RMSNorm(16),
}  # fmt: skip


@pytest.mark.parametrize("name", NORMS)
def test_norms_alone_and_behind_a_sum(recipes, name):
    declare_norms()
    torch.manual_seed(0)
    norm, linear = NORMS[name](), nn.Linear(16, 16)
    for parameter in norm.parameters():
        nn.init.normal_(parameter, 1.0)
    x = torch.randn(3, 7, 16, dtype=torch.float64)
    x[0, 0], x[0, 1] = x[0, 0] * 1e-6, 2.0
    model = nn.ModuleList([norm, AddAndNorm(norm), linear])
    run = lambda m: m[1](m[0](x.to(m[2].weight)), m[2])
    with tfk.patch(model) as patched:
        replaced = {entry.name for entry in patched.replaced}
        assert {"0", "1"} <= replaced, replaced
    assert_same_results(model, run)


@pytest.mark.parametrize("name", [name for name in NORMS if name != "torch"])
def test_a_norm_of_another_dtype_than_its_parameters_gives_that_of_its_forward(recipes, name):
    """Which promotes, or does not: under autocast and in models that keep their norms in float32."""
    declare_norms()
    wrapper = AddAndNorm(NORMS[name]()).eval()
    x, same = torch.randn(2, 16, dtype=torch.bfloat16), lambda x: x
    expected = wrapper.norm(x), wrapper(x, same)
    with tfk.patch(wrapper):
        found = wrapper.norm(x), wrapper(x, same)
    for got, wanted in zip(found, expected, strict=True):
        assert got.dtype == wanted.dtype and torch.equal(got, wanted)


@pytest.mark.parametrize("name", ["std", "rms"])
def test_a_norm_takes_what_inference_mode_made_with_gradients(recipes, name):
    """As its own code does, which keeps no x for the backward; PyTorch's norms, and ours, would refuse it."""
    declare_norms()
    norm = NORMS[name]()
    patched = copy.deepcopy(norm)
    tfk.patch(patched)
    with torch.inference_mode():
        x = torch.randn(3, 16)
    for each in (norm, patched):
        each(x).square().sum().backward()
    for wanted, got in zip(norm.parameters(), patched.parameters(), strict=True):
        assert torch.equal(got.grad, wanted.grad)


class PreNorm(SublayerConnection):
    def forward(self, x, sublayer):
        return x + self.dropout(sublayer(self.norm(x)))


class Gelu(FeedForward):
    def forward(self, x):
        return self.fc2(self.dropout(nn.functional.gelu(self.fc1(x))))


OTHER_NUMBERS = {
    "activation": (lambda p: p.declare_feed_forward(Gelu, first="fc1", second="fc2", dropout="dropout"), Gelu),
    "eps outside": (lambda p: p.declare_layer_norm(StdNorm, weight="gamma", bias="beta", unbiased=True), StdNorm),
    "eps inside": (
        lambda p: p.declare_layer_norm(Norm, weight="gamma", bias="beta", eps=0.0, eps_outside="eps", unbiased=True),
        Norm,
    ),
    "one more": (lambda p: p.declare_rms_norm(OneMoreNorm, weight="scale"), OneMoreNorm),
    "no root": (lambda p: p.declare_rms_norm(RootNorm, weight="scale"), RootNorm),
    "biased": (lambda p: p.declare_layer_norm(Norm, weight="gamma", bias="beta"), Norm),
    "pre-norm": (lambda p: p.declare_residual(PreNorm, norm="norm", dropout="dropout"), PreNorm),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", OTHER_NUMBERS)
def test_a_declaration_of_other_numbers_is_refused_by_patch(recipes, case, dtype):
    declare, cls = OTHER_NUMBERS[case]
    declare(tfk.patching)
    model, state = nn.Sequential(cls(16, {StdNorm: 1e-6, Gelu: 32}.get(cls, 0.1))).to(dtype), torch.get_rng_state()
    with pytest.raises(ValueError, match=rf"^declare_\w+: {cls.__name__}.forward must give .*, got other numbers: "):
        tfk.patch(model)
    assert tfk.unpatch(model) == 0 and torch.equal(state, torch.get_rng_state()) and model[0].training


class Dropping(nn.Linear):
    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


@pytest.mark.parametrize("named", [None, "dropout"])
def test_a_dropout_that_no_declaration_names_is_refused_by_patch(recipes, named):
    """It was left out in training; one that acts elsewhere acted on the hidden activation."""

    class Outer(FeedForward):
        def forward(self, x):
            return self.last(self.fc2(self.dropout(torch.relu(self.fc1(x)))))

    tfk.patching.declare_feed_forward(Outer, first="fc1", second="fc2", dropout=named)
    block = Outer(16, 32, 0.5)
    block.last = nn.Dropout(0.5 if named else 0.0)
    says = "no dropout" if named is None else "'dropout'"
    with pytest.raises(ValueError, match=f"must drop elements by {says} alone, as declared, got some dropped else"):
        tfk.patch(nn.Sequential(block).eval())
    assert not block.training and not block.dropout.training
    block.last.p = 0.0
    block.dropout.p = 0.5 if named else 0.0
    assert len(tfk.patch(nn.Sequential(block)).replaced) >= 3 and block.dropout.training is False
    tfk.unpatch(block)
    block.fc1 = Dropping(16, 32)  # a layer's own, as an adapter has it, is the layer's to apply
    tfk.patch(nn.Sequential(block))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_right_declarations_are_taken_in_every_dtype(recipes, dtype):
    declare_norms()
    tfk.patching.declare_layer_norm(LayerNorm, weight="gamma", bias="beta", unbiased=True)
    tfk.patching.declare_residual(SublayerConnection, norm="norm", dropout="dropout")
    tfk.patching.declare_feed_forward(Gelu, first="fc1", second="fc2", activation="gelu", dropout="dropout")
    for eps in (0.0, 1e-12, 1e-5):
        for width in (1, 2, 17, 768):
            parts = [LayerNorm(width, eps), SublayerConnection(width, 0.5), Gelu(width, 8, 0.5)]
            parts += [StdNorm(width, eps), RMSNorm(width, eps), RootNorm(width, eps), AddAndNorm(RMSNorm(width), 0.5)]
            model = nn.ModuleList(parts).to(dtype)
            for parameter in model.parameters():
                nn.init.normal_(parameter)
            replaced = {entry.name for entry in tfk.patch(model).replaced}
            assert {str(number) for number in range(len(parts))} <= replaced
    assert len(tfk.patch(nn.ModuleList([LayerNorm(16), SublayerConnection(16)]).to("meta")).replaced) >= 3
