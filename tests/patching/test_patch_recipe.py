"""Hand-written layers in the style of the tutorials, fused by declarations and by a recipe function."""

import copy
import math
import re

import pytest
import torch
from torch import nn

import tfm_kernels as tfk
from tests.patching.models import assert_same_results
from tfm_kernels.patching import registry


class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, heads, dropout=0.0):
        super().__init__()
        self.heads, self.d_k = heads, d_model // heads
        self.w_q, self.w_k, self.w_v, self.w_o = (nn.Linear(d_model, d_model) for _ in range(4))
        self.dropout = nn.Dropout(dropout)

    def forward(self, q, k, v, mask=None):
        q, k, v = (
            layer(t).view(t.shape[0], -1, self.heads, self.d_k).transpose(1, 2)
            for layer, t in ((self.w_q, q), (self.w_k, k), (self.w_v, v))
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        x = self.dropout(scores.softmax(-1)) @ v
        return self.w_o(x.transpose(1, 2).contiguous().view(x.shape[0], -1, self.heads * self.d_k))


class AttentionWithWeights(MultiHeadAttention):
    def forward(self, q, k, v, mask=None):
        q, k, v = (
            layer(t).view(t.shape[0], -1, self.heads, self.d_k).transpose(1, 2)
            for layer, t in ((self.w_q, q), (self.w_k, k), (self.w_v, v))
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        weights = (scores if mask is None else scores.masked_fill(mask == 0, -1e9)).softmax(-1)
        return self.w_o((weights @ v).transpose(1, 2).flatten(2)), weights


class LayerNorm(nn.Module):
    def __init__(self, size, eps=1e-12):
        super().__init__()
        self.gamma, self.beta, self.eps = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size)), eps

    def forward(self, x):
        var, mean = x.var(-1, keepdim=True), x.mean(-1, keepdim=True)
        return self.gamma * (x - mean) / torch.sqrt(var + self.eps) + self.beta


class FeedForward(nn.Module):
    def __init__(self, d_model, d_ff, dropout=0.0):
        super().__init__()
        self.fc1, self.fc2, self.dropout = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model), nn.Dropout(dropout)

    def forward(self, x):
        return self.fc2(self.dropout(torch.relu(self.fc1(x))))


class ConvolutionFeedForward(nn.Module):
    def __init__(self, d_model, d_ff):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(d_model, d_ff, 1), nn.Conv1d(d_ff, d_model, 1)

    def forward(self, x):
        return self.conv2(torch.relu(self.conv1(x.transpose(1, 2)))).transpose(1, 2)


class Residual(nn.Module):
    def __init__(self, sublayer, d_model, dropout=0.0, norm=LayerNorm):
        super().__init__()
        self.sublayer, self.norm, self.dropout = sublayer, norm(d_model), nn.Dropout(dropout)

    def forward(self, x, *args):
        return self.norm(x + self.dropout(self.sublayer(x, *args)))


class SublayerConnection(nn.Module):
    def __init__(self, size, dropout=0.0):
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(size), nn.Dropout(dropout)

    def forward(self, x, sublayer):
        return self.norm(x + self.dropout(sublayer(x)))


class SelfAttention(nn.Module):
    def __init__(self, d_model, heads):
        super().__init__()
        self.attention = MultiHeadAttention(d_model, heads)

    def forward(self, x, mask=None):
        return self.attention(x, x, x, mask)


class Encoder(nn.Module):
    def __init__(self, d_model=16, heads=4, layers=2):
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(layers):
            self.layers.append(Residual(SelfAttention(d_model, heads), d_model))
            self.layers.append(Residual(FeedForward(d_model, 32), d_model))
        self.last = SublayerConnection(d_model)
        self.ffn = ConvolutionFeedForward(d_model, 32)

    def forward(self, x, mask=None):
        for i, layer in enumerate(self.layers):
            x = layer(x, mask) if i % 2 == 0 else layer(x)
        return self.last(x, self.ffn)


@pytest.fixture
def declared():
    """The declarations a user writes, taken back after the test."""
    before = registry.registered()
    patching = tfk.patching
    patching.declare_attention(
        MultiHeadAttention, query="w_q", key="w_k", value="w_v", out="w_o", heads="heads", dropout="dropout"
    )
    patching.declare_feed_forward(FeedForward, first="fc1", second="fc2", dropout="dropout")
    patching.declare_feed_forward(ConvolutionFeedForward, first="conv1", second="conv2")
    patching.declare_layer_norm(LayerNorm, weight="gamma", bias="beta", unbiased=True)
    patching.declare_residual(Residual, norm="norm", dropout="dropout", sublayer="sublayer")
    patching.declare_residual(SublayerConnection, norm="norm", dropout="dropout")
    yield
    registry._recipes[:] = before


def inputs(mask=True):
    torch.manual_seed(1)
    x = torch.randn(3, 7, 16, dtype=torch.float64)
    keep = (torch.arange(7) < torch.tensor([4, 7, 2])[:, None])[:, None, None, :] if mask else None
    return lambda m: m(x.to(next(m.parameters())), keep)


def test_hand_written_encoder(declared):
    torch.manual_seed(0)
    model = Encoder()
    for p in model.parameters():  # gammas of 1 and betas of 0 would hide mistakes
        nn.init.normal_(p, std=0.3)
    kinds = (MultiHeadAttention, FeedForward, ConvolutionFeedForward, LayerNorm, Residual, SublayerConnection)
    with tfk.patch(model) as report:
        replaced = {entry.name for entry in report.replaced}
        assert {name for name, module in model.named_modules() if isinstance(module, kinds)} <= replaced
    assert_same_results(model, inputs())
    assert_same_results(model, inputs(mask=False))


def test_compiles_and_copies(declared):
    torch.manual_seed(0)
    model, run = Encoder(layers=1), inputs()
    wanted = run(model)
    with tfk.patch(model):
        torch.testing.assert_close(run(copy.deepcopy(model)), wanted)
        torch.testing.assert_close(run(torch.compile(model, fullgraph=True, backend="aot_eager")), wanted)


def test_a_row_that_sees_nothing_gives_the_bias_not_a_mean(declared):
    torch.manual_seed(0)
    model, x = MultiHeadAttention(16, 4), torch.randn(1, 3, 16)
    with tfk.patch(model):
        out = model(x, x, x, torch.zeros(1, 1, 3, 3))
    torch.testing.assert_close(out, model.w_o.bias.expand(1, 3, 16))


@pytest.mark.parametrize("backend", ["reference", "aten"])
def test_weights_are_returned(backend):
    torch.manual_seed(0)
    before = registry.registered()
    tfk.patching.declare_attention(
        AttentionWithWeights, query="w_q", key="w_k", value="w_v", out="w_o", heads=4, weights=True
    )
    try:
        model = AttentionWithWeights(16, 4)
        x = torch.randn(2, 5, 16, dtype=torch.float64)
        causal = torch.ones(1, 5, 5).tril()

        def run(m):
            t = x.to(m.w_q.weight)
            return torch.cat([part.flatten() for part in m(t, t, k_v(t), mask=causal)])

        k_v = lambda t: t
        assert_same_results(model, run, backend=backend)
    finally:
        registry._recipes[:] = before


def test_recipe_as_a_function():
    before = registry.registered()

    @tfk.patching.recipe(FeedForward, what="feed-forward by hand", covers=("fc1", "fc2"))
    def fused(self, x):
        if x.dim() != 3:
            return NotImplemented
        w = (self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias)
        return tfk.ops.ffn(x, *w, backend=tfk.patching.backend(self))

    try:
        torch.manual_seed(0)
        model, x = FeedForward(16, 32), torch.randn(2, 5, 16)
        wanted = model(x)
        with tfk.patch(model) as report:
            assert [str(entry) for entry in report.entries][0].endswith("replaced: feed-forward by hand")
            torch.testing.assert_close(model(x), wanted)
            torch.testing.assert_close(model(x[0]), wanted[0])
            handle = model.fc1.register_forward_hook(lambda *a: None)
            torch.testing.assert_close(model(x), wanted)
            handle.remove()
            assert report.fallbacks == {"": {"its recipe does not serve this call": 1, "fc1 has hooks": 1}}
        derived = type("Derived", (FeedForward,), {})(16, 32)
        assert not tfk.patch(derived).entries[0].replaced
    finally:
        registry._recipes[:] = before


def test_bad_declarations():
    with pytest.raises(TypeError, match="recipe: cls must be a subclass of torch.nn.Module, got 3"):
        tfk.patching.recipe(3)
    with pytest.raises(TypeError, match="declare_layer_norm: cls must be a subclass"):
        tfk.patching.declare_layer_norm(int)
    with pytest.raises(ValueError, match="mask must be one of keep, hide, add, sdpa, got 'show'"):
        tfk.patching.declare_attention(
            MultiHeadAttention, query="w_q", key="w_k", value="w_v", out="w_o", heads=4, mask="show"
        )
    with pytest.raises(ValueError, match="mask_axis must be one of batch, heads, keys, got 'rows'"):
        tfk.patching.declare_attention(
            MultiHeadAttention, query="w_q", key="w_k", value="w_v", out="w_o", heads=4, mask_axis="rows"
        )
    for names in ({"query": "w_q"}, {"query": "w_q", "key": "w_k", "value": "w_v", "qkv": "w_q"}, {}):
        wanted = f"query, key and value must name a child each, or query and kv, or qkv alone, got {names}"
        with pytest.raises(ValueError, match=f"declare_attention: {re.escape(wanted)}$"):
            tfk.patching.declare_attention(MultiHeadAttention, **names, out="w_o", heads=4)
    for arguments in (("q", "k", None, "mask"), ("q", "k", "v"), ("q", "k", "v", "mask")):
        wanted = rf"arguments must be names \(input, mask\), got {re.escape(str(arguments))}"
        with pytest.raises(ValueError, match=wanted):
            tfk.patching.declare_attention(MultiHeadAttention, qkv="w_q", out="w_o", heads=4, arguments=arguments)
    with pytest.raises(ValueError, match="no default for, got .*, without 'k'; a class that takes more is written as"):
        tfk.patching.declare_attention(MultiHeadAttention, qkv="w_q", out="w_o", heads=4, arguments=("q", "mask"))
    with pytest.raises(ValueError, match="forward must have an argument 'keys'"):
        tfk.patching.declare_attention(
            MultiHeadAttention, query="w_q", key="w_k", value="w_v", out="w_o", heads=4,
            arguments=("q", "keys", "v", None),
        )  # fmt: skip
    with pytest.raises(TypeError, match="register_recipe: recipe must be a Recipe, got str"):
        tfk.patching.register_recipe("bert")


def test_a_class_of_a_file_that_is_no_module_of_the_process():
    """As a command's target is loaded: nothing may look for its file in sys.modules."""
    cls = type("Odd", (nn.Module,), {"__module__": "no_such_module", "forward": lambda self, x: self.inner(x)})
    model = cls()
    model.inner = nn.LayerNorm(4)
    with tfk.patch(model) as report:
        assert [entry.name for entry in report.replaced] == ["inner"]
        model(torch.randn(2, 4))
