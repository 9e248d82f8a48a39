"""torch.func on layers of the project: automatic choice gives it PyTorch's own operators, and nothing else changes."""

from contextlib import nullcontext

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

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


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_forward_mode(name, norm_first, masked, x):
    """PyTorch's layers have it where their attention is the written-out one, which is asked for here alone."""
    told = {"src_key_padding_mask": PADDING} if masked else {}
    model, stock, live = MODELS[name](norm_first), layer(norm_first), ~PADDING if masked else PADDING >= 0
    parameters = {key: value.detach() for key, value in stock.named_parameters()}
    tangents = {key: torch.ones_like(value) / 8 for key, value in parameters.items()}
    prefix = next(iter(model.state_dict())).removesuffix(next(iter(parameters)))

    def run(module, prefix):
        given = lambda p, x: functional_call(module, {prefix + key: value for key, value in p.items()}, (x,), told)
        return jvp(lambda p, x: given(p, x)[live], (parameters, x), (tangents, torch.ones_like(x)))

    with sdpa_kernel(SDPBackend.MATH):
        expected = run(stock, "")
    for found, wanted in zip(run(model, prefix), expected, strict=True):
        assert_same_in_float64(found, wanted)


def patched_ffn():
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.0), nn.Linear(32, 16)).requires_grad_(False)
    assert "replaced" in str(tfk.patch(model))
    return model


CRITERION = tfk.nn.LinearCrossEntropyLoss(16, 9).requires_grad_(False)
INT8 = MATRIX.clamp(-1, 1).mul(127).to(torch.int8), torch.full((16,), 0.01)
IDS = torch.randint(9, (3, 7), generator=torch.Generator().manual_seed(5))
ENDS = torch.tensor([0, 9, 12, 21], dtype=torch.int32)
KEEP = torch.ones(7, 7, dtype=torch.bool).tril().index_fill(0, torch.tensor(2), False)  # the third sees nothing
CALLS = {
    "attention": lambda x: tfk.ops.attention(x[:, None], x[:, None], x[:, None]),
    "attention in groups": lambda x: tfk.ops.attention(x[:, None].expand(-1, 2, -1, -1), x[:, None], x[:, None]),
    "causal attention": lambda x: tfk.ops.attention(x[:, None], x[:, None], x[:, None], tfk.Mask.causal()),
    "attention under a mask": lambda x: tfk.ops.attention(x[:, None], x[:, None], x[:, None], KEEP),
    "attention with a bias": lambda x: tfk.ops.attention(*[x[:, None]] * 3, bias=x[:1, None, :, :7]),
    "dropout in attention": lambda x: tfk.ops.attention(*[x[:, None]] * 3, dropout_p=0.5, seed=torch.tensor(3)),
    "attention of packed rows": lambda x: tfk.ops.attention_varlen(*[x.reshape(21, 1, 16)] * 3, *[ENDS] * 2, 9, 9),
    "layer_norm": lambda x: tfk.ops.layer_norm(x),
    "add_layer_norm": lambda x: tfk.ops.add_layer_norm(x, x.flip(0))[0],
    "rms_norm": lambda x: tfk.ops.rms_norm(x),
    "ffn": lambda x: tfk.ops.ffn(x, MATRIX, None, MATRIX, None, activation="gelu"),
    "linear": lambda x: tfk.ops.linear(x, MATRIX),
    "int8_ffn": lambda x: tfk.ops.int8_ffn(x, *INT8, None, *INT8, None, activation="silu", dynamic=True),
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


@pytest.mark.parametrize("outer", ["forward", "reverse", "reverse by PyTorch"])
@pytest.mark.parametrize(
    "name", ["attention", "causal attention", "attention under a mask", "attention of packed rows"]
)
def test_products_with_second_derivatives(name, outer, x):
    """By forward or reverse mode over reverse mode, as by the reference's graph of a graph."""
    call = lambda x: CALLS[name](x).square().sum()
    if outer == "forward":
        _, found = jvp(grad(call), (x,), (x.cos(),))
    else:
        with sdpa_kernel(SDPBackend.MATH) if outer == "reverse by PyTorch" else nullcontext():
            found = grad(lambda x: (grad(call)(x) * x.detach().cos()).sum())(x)
    with tfk.use_backend("reference"):
        _, expected = torch.autograd.functional.hvp(call, x, x.cos())
    assert_same_in_float64(found, expected)


def test_a_named_backend_says_why_it_cannot(x):
    with pytest.raises(tfk.BackendError, match="backend 'cpu' cannot run this call: a transform of torch.func"):
        vmap(lambda t: tfk.ops.layer_norm(t, backend="cpu"))(x)
