"""The linear layers of a decoding step: ops.linear where nobody could tell, and else the layer itself."""

import pytest
import torch
from torch import nn

import tfm_kernels as tfk
from tfm_kernels.nn import _projection


@pytest.fixture
def taken(monkeypatch):
    """How often ops.linear was called."""
    calls = []

    def linear(*arguments, **options):
        calls.append(arguments)
        return original(*arguments, **options)

    original = tfk.ops.linear
    monkeypatch.setattr(_projection.ops, "linear", linear)
    return calls


@pytest.fixture
def layer():
    torch.manual_seed(0)
    return nn.Linear(16, 24)


X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_a_plain_layer_is_read(taken, layer):
    torch.testing.assert_close(_projection.through(layer, X), layer(X))
    assert len(taken) == 1


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@torch.no_grad()
def test_what_is_more_than_a_layer_is_called(taken, layer):
    doubled, seen = Doubled(16, 24), []
    assert torch.equal(_projection.through(doubled, X), doubled(X))
    layer.register_forward_hook(lambda *_: seen.append(1))
    _projection.through(layer, X)
    assert seen == [1] and not taken


@torch.no_grad()
def test_autocast_is_left_to_torch(taken, layer):
    with torch.autocast("cpu", torch.bfloat16):
        assert _projection.through(layer, X).dtype == torch.bfloat16
    assert not taken


@torch.no_grad()
@pytest.mark.parametrize(("backend", "count"), [("cpu", 1), ("aten", 1), ("triton", 0), ("cuda", 0)])
def test_a_forced_backend_without_these_kernels_changes_nothing(taken, layer, backend, count):
    with tfk.use_backend(backend):
        torch.testing.assert_close(_projection.through(layer, X), layer(X))
    assert len(taken) == count


def test_gradients_flow(layer):
    _projection.through(layer, X).sum().backward()
    assert layer.weight.grad is not None


def decoded():
    """Four tokens behind each of eight prompts, by two layers."""
    torch.manual_seed(0)
    config = tfk.models.CausalLanguageConfig(50, 2, d_model=16, nhead=2, dim_feedforward=32)
    model = tfk.models.CausalLanguageModel(config)
    return model, lambda: tfk.generate(model, torch.randint(1, 50, (8, 3)), 4)


def test_decoding_takes_it(taken):
    """The projections of the prompts, and the output; those of the later steps belong to attention_step."""
    decoded()[1]()
    projections, output, steps = 2 * 2, 1, 3
    assert len(taken) == projections + output + steps * output


def test_a_watched_projection_is_called_at_every_step(taken):
    model, decode = decoded()
    seen = []
    model.encoder.layers[1].self_attn.out_proj.register_forward_hook(lambda *_: seen.append(1))
    decode()
    projections, output, steps = 2 * 2, 1, 3
    assert len(seen) == 1 + steps
    assert len(taken) == projections - 1 + output + steps * (output + 1)  # of the watched layer q, k and v are read
