"""same_dropout(): PyTorch's dropouts drop what the fused operations drop, element by element."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tfm_kernels as tfk
from tfm_kernels import dropout
from tfm_kernels.testing import same_dropout

P = 0.3


def expected(rows, columns, p=P):
    """The mask of the first dropout after manual_seed(0)."""
    torch.manual_seed(0)
    return dropout.keep_mask(dropout.draw_seed("cpu"), p, torch.arange(rows), columns)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dropout_takes_the_mask_of_the_rule_and_keeps_its_arithmetic(mode, dtype):
    x = torch.randn(2, 3, 7).to(dtype)
    torch.manual_seed(0)
    with same_dropout(), mode():
        y = F.dropout(x, P)
    keep = expected(6, 7).view(x.shape)
    assert torch.equal(y != 0, keep)
    if mode is not torch.inference_mode:  # there PyTorch's own decomposition rounds once less
        assert torch.equal(y, x * keep.to(dtype).div(1 - P))


def test_its_gradient_has_the_same_mask():
    x = torch.ones(4, 9, requires_grad=True)
    torch.manual_seed(0)
    with same_dropout():
        F.dropout(x, P).sum().backward()
    assert torch.equal(x.grad != 0, expected(4, 9))


def test_the_operator_of_a_gpu():
    torch.manual_seed(0)
    with same_dropout():
        y, keep = torch.ops.aten.native_dropout(torch.ones(4, 9), 0.5, True)
    assert torch.equal(keep, expected(4, 9, 0.5)) and torch.equal(y, keep * 2.0)


def test_attention_drops_what_the_fused_attention_drops():
    q, k, v = (torch.randn(2, 3, 5, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    torch.manual_seed(0)
    with same_dropout():
        stock = F.scaled_dot_product_attention(q, k, v, dropout_p=P, is_causal=True)
    stock_grads = torch.autograd.grad(stock.sum(), (q, k, v))
    torch.manual_seed(0)
    fused = tfk.ops.attention(q, k, v, tfk.Mask.causal(), dropout_p=P, backend="reference")
    torch.testing.assert_close(stock, fused, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(stock_grads, torch.autograd.grad(fused.sum(), (q, k, v)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("need_weights", [False, True])
def test_the_module_of_attention_too(need_weights):
    x = torch.randn(2, 5, 8)
    module = nn.MultiheadAttention(8, 2, dropout=P, batch_first=True)
    module.in_proj_weight.data[16:] = 0.0
    module.in_proj_bias.data[16:] = 1.0
    module.out_proj.weight.data = torch.eye(8)
    torch.manual_seed(0)
    with same_dropout():
        out, _ = module(x, x, x, need_weights=need_weights)
    torch.manual_seed(0)
    q, k = (t.view(2, 5, 2, 4).transpose(1, 2) for t in F.linear(x, module.in_proj_weight[:16]).split(8, -1))
    fused = tfk.ops.attention(q, k, torch.ones_like(k), dropout_p=P, backend="reference")
    torch.testing.assert_close(out, fused.transpose(1, 2).flatten(2), rtol=1e-5, atol=1e-6)


def test_a_chain_of_dropouts_draws_its_seeds_in_order():
    x, w1, w2 = torch.randn(6, 8), torch.randn(16, 8), torch.randn(8, 16)
    torch.manual_seed(0)
    with same_dropout():
        stock = x + F.dropout(F.dropout(F.relu(x @ w1.T), P) @ w2.T, P)
    torch.manual_seed(0)
    y = tfk.ops.ffn(x, w1, None, w2, None, activation="relu", dropout_p=P, backend="reference")
    _, fused = tfk.ops.add_layer_norm(y, x, dropout_p=P, backend="reference")
    torch.testing.assert_close(stock, fused, rtol=1e-5, atol=1e-5)


def test_nothing_to_drop():
    state = torch.get_rng_state()
    with same_dropout():
        assert torch.equal(F.dropout(torch.ones(3), 0.0), torch.ones(3))
        assert torch.equal(F.dropout(torch.ones(3), 1.0), torch.zeros(3))
        assert torch.equal(F.dropout(torch.ones(3), P, training=False), torch.ones(3))
    assert torch.equal(state, torch.get_rng_state())
    with same_dropout():
        assert F.dropout(torch.ones(0, 4), 0.5).shape == (0, 4) and F.dropout(torch.tensor(1.0), 0.5).shape == ()


@pytest.mark.parametrize(("p", "train"), [(0.0, True), (1.0, True), (P, False)])
def test_the_gpus_operator_draws_no_seed_for_nothing(p, train, monkeypatch):
    monkeypatch.setattr(dropout, "draw_seed", None)
    state = torch.get_rng_state()
    with same_dropout():
        y, keep = torch.ops.aten.native_dropout(torch.ones(4, 9), p, train)
    assert torch.equal(y, torch.full((4, 9), float(p < 1.0))) and keep.dtype == torch.bool
    assert torch.equal(state, torch.get_rng_state())
