"""The tutorials' own classes: accelerated by declarations, proven equal; and the same functions as our models."""

import copy
import math
from collections import Counter

import pytest
import torch
from torch import nn

import tfm_kernels as tfk
from tfm_kernels.patching import registry
from tfm_kernels.testing.float64 import assert_same_in_float64

from .layers import (
    ConvolutionFeedForward,
    FeedForward,
    LayerNorm,
    MultiHeadAttention,
    PositionalEncoding,
    ResidualConnection,
    ScaledDotProductAttention,
    VisibleAttention,
)
from .models import CharacterModel, EncoderDecoder, PostNormEncoder

V = 29


@pytest.fixture
def declared():
    """What a user of these classes writes before patching, taken back after the test."""
    before = registry.registered()
    names = {"query": "w_q", "key": "w_k", "value": "w_v", "out": "w_o", "heads": "heads"}
    tfk.patching.declare_attention(MultiHeadAttention, **names, dropout="attention.dropout")
    tfk.patching.declare_attention(VisibleAttention, **names, weights=True)
    tfk.patching.declare_feed_forward(FeedForward, first="fc1", second="fc2", dropout="dropout")
    tfk.patching.declare_feed_forward(ConvolutionFeedForward, first="conv1", second="conv2", dropout="dropout")
    tfk.patching.declare_layer_norm(LayerNorm, weight="gamma", bias="beta", unbiased=True)
    tfk.patching.declare_residual(ResidualConnection, norm="norm", dropout="dropout", sublayer="sublayer")
    yield
    registry._recipes[:] = before


def ids(*lengths, seed=1):
    found = torch.randint(1, V, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(seed))
    return found.masked_fill(torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None], 0)


def build(cls, *args, **kwargs):
    """A model whose norms and biases are not those of the start, so that none can be left out unseen."""
    torch.manual_seed(0)
    model = cls(*args, **kwargs)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, parameter.detach().mean().round().item(), 0.2)
    return model.eval()


def pre_norm(dropout=0.0):
    return build(EncoderDecoder, V, V, dropout=dropout), (ids(6, 4, 7), ids(5, 6, 3, seed=2))


def post_norm(dropout=0.0):
    keep = (torch.arange(7) < torch.tensor([4, 7, 2])[:, None])[:, None, None, :]
    x = torch.randn(3, 7, 32, generator=torch.Generator().manual_seed(3)).requires_grad_()
    return build(PostNormEncoder, dropout=dropout), (x, keep)


def character(dropout=0.0):
    return build(CharacterModel, V, dropout=dropout), (ids(8, 8),)


PARTS = {pre_norm: (6, 4, 12, 0), post_norm: (2, 2, 4, 4), character: (2, 2, 4, 0)}  # replaced, by kind


@pytest.mark.parametrize("make", PARTS)
def test_patched_and_proven(make, declared):
    model, given = make()
    report = tfk.prove(model, given, steps=3)
    assert report.passed, report.table()
    attentions, feed_forwards, norms, residuals = PARTS[make]
    patched = copy.deepcopy(model)
    replaced = Counter(entry.kind for entry in tfk.patch(patched).entries if entry.replaced)
    assert replaced["MultiHeadAttention"] + replaced["VisibleAttention"] == attentions
    assert replaced["FeedForward"] + replaced["ConvolutionFeedForward"] == feed_forwards
    assert replaced["LayerNorm"] == norms and replaced["ResidualConnection"] == residuals
    tfk.unpatch(patched)
    first, second = (m(*given) for m in (model, patched))
    for a, b in zip(*(out if isinstance(out, tuple) else (out,) for out in (first, second)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("make", [pre_norm, post_norm])
def test_proven_in_training_with_dropout(make, declared):
    """Both models drop the same elements."""
    model, given = make(dropout=0.2)
    report = tfk.prove(model.train(), given, steps=1)
    assert report.passed, report.table()


def test_maps_of_the_patched_tutorials(declared):
    """What the fused layers attended to is what the tutorial's own softmax gives."""
    model, given = character()
    expected = model.double()(*given)[1].detach()
    tfk.patch(model)
    found = tfk.get_attention_maps(model, *given)
    assert list(found) == ["attentions.0", "attentions.1"]
    assert_same_in_float64(torch.stack(list(found.values())), expected)


@pytest.mark.parametrize("unbiased", [True, False])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_layer_norm_with_the_n_minus_1_variance(unbiased, backend):
    norm, x = build(LayerNorm, 24).double(), torch.randn(5, 24, dtype=torch.float64) * 3 + 1
    found = tfk.ops.layer_norm(x, norm.gamma, norm.beta, 1e-12, unbiased=unbiased, backend=backend)
    if unbiased:
        torch.testing.assert_close(found, norm(x), rtol=1e-11, atol=1e-12)
    else:  # torch's variance: the ratio of the two is sqrt((N - 1) / N)
        plain = (norm(x) - norm.beta) * math.sqrt(24 / 23) + norm.beta
        torch.testing.assert_close(found, plain, rtol=1e-10, atol=1e-11)
    constant = tfk.ops.layer_norm(torch.full((2, 24), 3.0), eps=1e-12, unbiased=unbiased, backend=backend)
    assert not constant.any()


def test_attention_is_ours():
    layer = build(MultiHeadAttention, 32, 4, 0.0).double()
    ours = tfk.nn.MultiheadAttention(32, 4, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        ours.in_proj_weight.copy_(torch.cat([layer.w_q.weight, layer.w_k.weight, layer.w_v.weight]))
        ours.in_proj_bias.copy_(torch.cat([layer.w_q.bias, layer.w_k.bias, layer.w_v.bias]))
        ours.out_proj.load_state_dict(layer.w_o.state_dict())
    q, k = torch.randn(2, 5, 32, dtype=torch.float64), torch.randn(2, 7, 32, dtype=torch.float64)
    keep = torch.arange(7) < torch.tensor([3, 0])[:, None]
    found = ours(q, k, k, key_padding_mask=~keep)[0]
    torch.testing.assert_close(found, layer(q, k, k, keep[:, None, None, :]), rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(found[1], layer.w_o.bias.expand(5, 32))  # a row that sees nothing (M1)


def test_the_worked_example_of_self_attention():
    """Three words of two features, by hand: scores, softmax, weighted sum."""
    x = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]]).double()
    out, weights = ScaledDotProductAttention(0.0)(x, x, x)
    first = torch.tensor([1.0, 0.0, 1.0]).double().div(math.sqrt(2)).exp()
    torch.testing.assert_close(weights[0, 0], first / first.sum())
    torch.testing.assert_close(out[0, 0], (first / first.sum()) @ x[0])
    torch.testing.assert_close(tfk.ops.attention(*[x[None]] * 3)[0], out, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("width", [16, 7])
def test_positions_are_ours(width):
    theirs, ours = PositionalEncoding(width, 0.0), tfk.nn.PositionalEncoding(width, 0.0)
    torch.testing.assert_close(ours.pe, theirs.pe, rtol=1e-5, atol=1e-6)


def test_the_encoder_decoder_is_our_translation_model():
    """With torch's variance in its norms, weight by weight, in float64."""
    seed, given = pre_norm()
    seed = seed.double()
    sizes = {"d_model": 32, "nhead": 4, "dim_feedforward": 48, "dropout": 0.0, "norm_first": True}
    sizes |= {"num_encoder_layers": 2, "num_decoder_layers": 2}
    config = tfk.models.TranslationConfig(V, V, **sizes, layer_norm_eps=1e-12)
    ours = tfk.models.TranslationTransformer(config, dtype=torch.float64).eval()
    for module in seed.modules():
        if isinstance(module, LayerNorm):
            module.forward = biased.__get__(module)
    state = {"embedding.tokens": seed.target, "source_embedding.tokens": seed.source, "output": seed.generator}
    for stack, names in (("encoder", ["self_attn"]), ("decoder", ["self_attn", "src_attn"])):
        theirs = getattr(seed, stack)
        for i, layer in enumerate(theirs.layers):
            here = f"transformer.{stack}.layers.{i}"
            for name in names:
                state[f"{here}.{name.replace('src_attn', 'multihead_attn')}"] = getattr(layer, name)
            state[f"{here}.linear1"], state[f"{here}.linear2"] = layer.feed_forward.conv1, layer.feed_forward.conv2
            state.update({f"{here}.norm{n + 1}": part.norm for n, part in enumerate(layer.sublayer)})
        state[f"transformer.{stack}.norm"] = theirs.norm
    ours.load_state_dict({k: v for name, part in state.items() for k, v in weights(name, part)}, strict=True)
    seed.position.pe = ours.embedding.positions.pe  # the same table, not rounded to float32 on the way
    live = given[1] != 0
    assert_same_in_float64(ours(*given)[live], seed(*given)[live])


def biased(self, x):
    return nn.functional.layer_norm(x, x.shape[-1:], self.gamma, self.beta, self.eps)


def weights(name, part):
    """(key, tensor) of one of the tutorial's modules under our names."""
    if isinstance(part, MultiHeadAttention):
        both = [part.w_q, part.w_k, part.w_v]
        yield f"{name}.in_proj_weight", torch.cat([layer.weight for layer in both])
        yield f"{name}.in_proj_bias", torch.cat([layer.bias for layer in both])
        yield f"{name}.out_proj.weight", part.w_o.weight
        yield f"{name}.out_proj.bias", part.w_o.bias
    elif isinstance(part, LayerNorm):
        yield f"{name}.weight", part.gamma
        yield f"{name}.bias", part.beta
    else:
        yield f"{name}.weight", part.weight.squeeze(-1) if part.weight.dim() == 3 else part.weight
        if getattr(part, "bias", None) is not None:
            yield f"{name}.bias", part.bias


def test_weights_are_not_shared_between_clones():
    model, _ = pre_norm()
    pointers = [p.data_ptr() for p in model.parameters()]
    assert len(set(pointers)) == len(pointers)
    with pytest.raises(ValueError, match="d_model 10 is no multiple of heads 4"):
        MultiHeadAttention(10, 4)


@pytest.mark.parametrize("make", [pre_norm, character])
def test_the_future_is_not_seen(make):
    model, given = make()
    changed = [*given[:-1], given[-1].clone()]
    changed[-1][:, -1] = given[-1][:, -1] % (V - 1) + 1
    first, second = (out[0] if isinstance(out, tuple) else out for out in (model(*given), model(*changed)))
    assert torch.equal(first[:, :-1], second[:, :-1])
