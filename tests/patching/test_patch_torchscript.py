"""Models that hold what TorchScript has compiled: it is left alone, and all else is patched."""

import copy
import warnings

import pytest
import torch
from torch import nn

import tfm_kernels as tfk
from tests.patching import attentions

WIDTH = 32


def _compiled(module, *traced):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.trace(module, traced) if traced else torch.jit.script(module)


class Block(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.first, self.second, self.act = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH), act

    def forward(self, x):
        return self.second(self.act(self.first(x)))


tfk.patching.declare_feed_forward(Block, first="first", second="second", activation="gelu")

MODELS = {
    "an activation": lambda: nn.Sequential(nn.Linear(WIDTH, 64), _compiled(nn.GELU()), nn.Linear(64, WIDTH)),
    "a declared block's activation": lambda: Block(_compiled(nn.GELU())),
    "a block": lambda: nn.Sequential(_compiled(Block(nn.GELU())), nn.LayerNorm(WIDTH)),
    "a traced layer": lambda: nn.Sequential(
        _compiled(nn.Linear(WIDTH, WIDTH), torch.zeros(1, WIDTH)), nn.Linear(WIDTH, 8)
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_part(name):
    model = MODELS[name]()
    stock, x = copy.deepcopy(model), torch.randn(4, WIDTH)
    report = tfk.patch(model)
    told = {
        entry.note for entry in report.entries if isinstance(model.get_submodule(entry.name), torch.jit.ScriptModule)
    }
    assert told == {"because TorchScript has compiled it"}
    assert any(entry.replaced for entry in report.entries)
    torch.testing.assert_close(model(x), stock(x))


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = _compiled(Block(nn.GELU()))

    def forward(self, x):
        return self.inner.second(self.inner.act(self.inner.first(x)))


tfk.patching.declare_feed_forward(Around, first="inner.first", second="inner.second", activation="gelu")


def test_what_is_declared_lies_inside():
    model, x = Around(), torch.randn(4, WIDTH)
    stock = copy.deepcopy(model)
    assert not any(entry.replaced for entry in tfk.patch(model).entries)
    torch.testing.assert_close(model(x), stock(x))


def test_a_whole_model():
    model = _compiled(Block(nn.GELU()))
    report = tfk.patch(model)
    assert not any(entry.replaced for entry in report.entries)
    assert model(torch.randn(4, WIDTH)).shape == (4, WIDTH)


def test_a_layer_whose_attention_is_compiled():
    """PyTorch's own compiled attention cannot be called without weights, as a fused layer calls it."""
    for cls in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer):
        layer = cls(WIDTH, 4, 64, batch_first=True)
        layer.self_attn = _compiled(layer.self_attn)
        model = nn.ModuleDict({"layer": layer.eval()})
        report = tfk.patch(model)
        told = {entry.name: entry.note for entry in report.entries}
        assert told["layer"] == "because TorchScript has compiled its self_attn", cls
    with torch.no_grad():
        assert model["layer"].norm1(torch.randn(2, 5, WIDTH)).shape == (2, 5, WIDTH)


def test_a_projection_of_declared_attention():
    class Attention(attentions.CausalSelfAttention):
        pass

    tfk.patching.declare_attention(Attention, **attentions.NANO)
    model = Attention().eval()
    model.c_proj = _compiled(model.c_proj)
    stock, x = copy.deepcopy(model), torch.randn(2, 5, 16)
    assert tfk.patch(model).entries[0].replaced
    torch.testing.assert_close(model(x), stock(x))


def test_prove_says_what_it_cannot_follow():
    model = nn.Sequential(_compiled(nn.Linear(WIDTH, WIDTH)), nn.LayerNorm(WIDTH))
    with pytest.raises(ValueError, match="prove: TorchScript has compiled 0, whose gradients cannot be had in float64"):
        tfk.prove(model, torch.randn(2, WIDTH))
    constants = nn.Sequential(torch.jit.freeze(model[0].eval()), nn.LayerNorm(WIDTH))
    with pytest.raises(ValueError, match="^prove: 0, compiled by TorchScript, cannot run in float64; prove the model"):
        tfk.prove(constants, torch.randn(2, WIDTH))
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    assert tfk.prove(model, torch.randn(2, WIDTH)).passed
