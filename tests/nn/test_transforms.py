"""torch.func on layers of the project: automatic choice gives it PyTorch's own operators, and nothing else changes."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import nn
from torch.func import functional_call, grad, jvp, vmap

import tfm_kernels as tfk
from tfm_kernels.testing.float64 import assert_same_in_float64

MATRIX = torch.randn(16, 16, generator=torch.Generator().manual_seed(4)) / 4
PADDING = torch.arange(7)[None] >= torch.tensor([7, 4, 1])[:, None]  # (3, 7), True = ignore


def layer(norm_first=False):
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, norm_first=norm_first).double()


def ours(norm_first=False):
    made = tfk.nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, norm_first=norm_first).double()
    made.load_state_dict(layer(norm_first).state_dict())
    return made


def patched(norm_first=False):
    stack = nn.TransformerEncoder(layer(norm_first), 1, enable_nested_tensor=False)
    tfk.patch(stack)
    return stack


MODELS = {"nn": ours, "patch": patched}


@pytest.fixture
def x():
    return torch.randn(3, 7, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def loss(model, parameters, x, padding):
    """Of tokens alone: a packed stack gives 0 where there is padding."""
    y = functional_call(model, parameters, (x,), {"src_key_padding_mask": padding})
    return y.masked_fill(padding.unsqueeze(-1), 0.0).square().mean()


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_autograds(name, norm_first, x):
    model = MODELS[name](norm_first)
    parameters = {key: value.detach() for key, value in model.named_parameters()}
    model(x, src_key_padding_mask=PADDING)  # the choices of plain calls are known by now
    found = grad(loss, argnums=1)(model, parameters, x, PADDING)
    loss(model, dict(model.named_parameters()), x, PADDING).backward()
    for key, value in model.named_parameters():
        assert_same_in_float64(found[key], value.grad, key)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_each_sample(name, x):
    """As differential privacy and influence functions ask for them."""
    model = MODELS[name]()
    parameters = {key: value.detach() for key, value in model.named_parameters()}
    each = vmap(grad(lambda p, x, padding: loss(model, p, x[None], padding[None])), in_dims=(None, 0, 0))
    found = each(parameters, x, PADDING)
    for b in range(len(x)):
        alone = grad(loss, argnums=1)(model, parameters, x[b : b + 1], PADDING[b : b + 1])
        for key, value in alone.items():
            assert_same_in_float64(found[key][b], value, key)


def test_forward_mode(x):
    """Of what PyTorch has it for: its own attention on a CPU has none."""
    tangent = torch.ones_like(x)
    for found, expected in zip(
        jvp(tfk.nn.LayerNorm(16).double(), (x,), (tangent,)),
        jvp(nn.LayerNorm(16).double(), (x,), (tangent,)),
        strict=True,
    ):
        assert_same_in_float64(found, expected)
    with pytest.raises(NotImplementedError, match="forward AD"):
        jvp(layer(), (x,), (tangent,))


def patched_ffn():
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.0), nn.Linear(32, 16)).requires_grad_(False)
    assert "replaced" in str(tfk.patch(model))
    return model


CRITERION = tfk.nn.LinearCrossEntropyLoss(16, 9).requires_grad_(False)
INT8 = MATRIX.clamp(-1, 1).mul(127).to(torch.int8), torch.full((16,), 0.01)
IDS = torch.randint(9, (3, 7), generator=torch.Generator().manual_seed(5))
CALLS = {
    "layer_norm": lambda x: tfk.ops.layer_norm(x),
    "add_layer_norm": lambda x: tfk.ops.add_layer_norm(x, x.flip(0))[0],
    "rms_norm": lambda x: tfk.ops.rms_norm(x),
    "ffn": lambda x: tfk.ops.ffn(x, MATRIX, None, MATRIX, None, activation="gelu"),
    "linear": lambda x: tfk.ops.linear(x, MATRIX),
    "int8_ffn": lambda x: tfk.ops.int8_ffn(x, *INT8, None, *INT8, None, activation="silu"),
    "int8_linear dynamic": lambda x: tfk.ops.int8_linear(x, *INT8, dynamic=True),
    "int8_linear": lambda x: tfk.ops.int8_linear(x, MATRIX.clamp(-1, 1).mul(127).to(torch.int8), torch.ones(16)),
    "dropout before a norm": lambda x: tfk.ops.add_layer_norm(x, x.flip(0), dropout_p=0.5, seed=torch.tensor(3))[0],
    "dropout in an ffn": lambda x: tfk.ops.ffn(x, MATRIX, None, MATRIX, None, dropout_p=0.5, seed=torch.tensor(3)),
    "nn.LayerNorm": tfk.nn.LayerNorm(16).requires_grad_(False),
    "nn.RMSNorm": tfk.nn.RMSNorm(16).requires_grad_(False),
    "nn.FeedForward": tfk.nn.FeedForward(16, 32, 0.0).requires_grad_(False),
    "nn.LinearCrossEntropyLoss": lambda x: CRITERION(x, IDS),
    "patched FFN": patched_ffn(),
}


@pytest.mark.parametrize("grad_mode", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_forward_mode_without_gradients(name, grad_mode, x):
    """Nothing needs a gradient, and plain calls of the same shapes have been chosen for before."""
    call, x = CALLS[name], x.float()
    tangent = torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
    with torch.set_grad_enabled(grad_mode):
        plain = call(x)
        with forward_ad.dual_level():
            y, found = forward_ad.unpack_dual(call(forward_ad.make_dual(x, tangent)))
    leaf = x.clone().requires_grad_()
    out = call(leaf)
    seed = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    (dx,) = torch.autograd.grad(out, leaf, seed)
    torch.testing.assert_close(y, plain, rtol=1e-5, atol=1e-6)
    assert found is not None, "the tangent was dropped"
    torch.testing.assert_close((found * seed).sum(), (dx * tangent).sum(), rtol=1e-4, atol=1e-4)


def test_jacobians_of_both_modes_are_the_same(x):
    x = x[0, :2].float()
    tfk.ops.layer_norm(x)
    forward, reverse = (
        torch.autograd.functional.jacobian(tfk.ops.layer_norm, x, vectorize=True, strategy=strategy)
        for strategy in ("forward-mode", "reverse-mode")
    )
    assert forward.abs().sum() > 0
    torch.testing.assert_close(forward, reverse, rtol=1e-5, atol=1e-6)


def test_attention_keeps_or_refuses_a_tangent(x):
    """PyTorch's own attention on a CPU has no forward mode, and says so."""
    q = x[:, None].float()
    tfk.ops.attention(q, q, q)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(NotImplementedError, match="forward AD"):
            tfk.ops.attention(dual, dual, dual)


def test_a_named_backend_says_why_it_cannot(x):
    with pytest.raises(tfk.BackendError, match="backend 'cpu' cannot run this call: a transform of torch.func"):
        vmap(lambda t: tfk.ops.layer_norm(t, backend="cpu"))(x)
