"""FeedForward against its children called one after another, and which activations are fused."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tfm_kernels as tfk
from tfm_kernels.nn.ffn import activation_name, feed_forward

from .twins import BACKENDS, assert_same, label, pairwise, randn


class Composed(nn.Module):
    """The block as its formula says it."""

    def __init__(self, block, act):
        super().__init__()
        self.linear1, self.gate, self.linear2, self.act = block.linear1, block.gate, block.linear2, act

    def forward(self, x):
        hidden = self.act(self.linear1(x))
        return self.linear2(hidden if self.gate is None else hidden * self.gate(x))


FORMULAS = {"relu": F.relu, "gelu": F.gelu, "gelu_tanh": functools.partial(F.gelu, approximate="tanh"), "silu": F.silu}
CASES = pairwise(
    backend=BACKENDS,
    dtype=[torch.float64, torch.float32],
    activation=list(FORMULAS),
    gated=[False, True, "biased"],
    bias=[True, False],
    shape=[(12,), (5, 12), (2, 5, 12), (0, 12)],
)


@pytest.mark.parametrize("case", CASES, ids=label)
def test_formula(case):
    options = {name: case[name] for name in ("backend", "dtype", "activation", "bias")}
    gate = {"gated": bool(case["gated"]), "gate_bias": case["gated"] == "biased"}
    block = tfk.nn.FeedForward(12, 20, 0.0, **options, **gate)
    assert list(block.state_dict()) == [
        *(["linear1.weight"] + ["linear1.bias"] * case["bias"]),
        *(["gate.weight"] * gate["gated"] + ["gate.bias"] * gate["gate_bias"]),
        *(["linear2.weight"] + ["linear2.bias"] * case["bias"]),
    ]
    assert_same(Composed(block, FORMULAS[case["activation"]]), block, [randn(*case["shape"])])


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_only_in_training_and_by_the_projects_rule(backend):
    block = tfk.nn.FeedForward(12, 20, 0.5, dtype=torch.float64, backend=backend)
    x = randn(7, 12)
    torch.manual_seed(3)
    y = block(x)
    torch.manual_seed(3)
    keep = tfk.dropout.keep_mask(tfk.dropout.draw_seed("cpu"), 0.5, torch.arange(7), 20)
    torch.testing.assert_close(y, block.linear2(F.relu(block.linear1(x)) * keep * 2))
    assert not torch.equal(block(x), block(x))
    block.eval()
    torch.testing.assert_close(block(x), block.linear2(F.relu(block.linear1(x))))
    block.dropout.train()  # Monte-Carlo dropout: the child's own mode counts
    assert not torch.equal(block(x), block(x))


FUSED = [
    (F.relu, "relu"), (torch.relu, "relu"), (nn.ReLU(), "relu"), (nn.ReLU(inplace=True), "relu"), (F.gelu, "gelu"),
    (nn.GELU(), "gelu"), (nn.GELU("tanh"), "gelu_tanh"), (functools.partial(F.gelu, approximate="tanh"), "gelu_tanh"),
    (functools.partial(F.gelu, approximate="none"), "gelu"), (F.silu, "silu"), (nn.SiLU(), "silu"),
    (torch.tanh, None), (nn.Tanh(), None), (lambda p: p.relu(), None), (F.leaky_relu, None), (nn.ReLU6(), None),
    (functools.partial(F.relu, inplace=True), None), (nn.Softplus(), None), (F.elu, None),
]  # fmt: skip


@pytest.mark.parametrize(("activation", "name"), FUSED, ids=lambda value: str(value)[:30])
def test_which_activations_are_fused(activation, name):
    assert activation_name(activation) == name
    block = tfk.nn.FeedForward(12, 20, 0.0, activation, dtype=torch.float64, backend="cpu")
    x = randn(5, 12)
    torch.testing.assert_close(block(x), block.linear2(activation(block.linear1(x))))


def test_a_hooked_activation_is_called():
    block = tfk.nn.FeedForward(12, 20, 0.0, nn.ReLU(), backend="cpu")
    seen = []
    block.activation.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    block(randn(5, 12, dtype=torch.float32))
    assert seen == [(5, 20)]


def test_named_backend_runs_or_says_why():
    block = tfk.nn.FeedForward(12, 20, backend="cuda")
    with pytest.raises(tfk.BackendError, match="ffn"):
        block(randn(5, 12, dtype=torch.float32))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_what_torch_casts(backend, dtype):
    block = tfk.nn.FeedForward(12, 20, 0.0, "gelu", gated=True, gate_bias=True, backend=backend)
    x = randn(6, 12, dtype=torch.float32).requires_grad_()
    with torch.autocast("cpu", dtype=dtype):
        y, expected = block(x), Composed(block, F.gelu)(x)
    assert y.dtype == expected.dtype == dtype
    torch.testing.assert_close(y, expected, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)
    y.float().sum().backward()
    assert x.grad.dtype == block.linear1.weight.grad.dtype == torch.float32
    with torch.autocast("cpu", dtype=dtype):  # float64 is never cast
        assert block.double()(x.double()).dtype == torch.float64


def test_a_bias_of_no_gate_is_refused():
    with pytest.raises(ValueError, match="gate_bias must be False without a gate, got True: gated=True adds one"):
        tfk.nn.FeedForward(12, 20, gate_bias=True)


def test_gate_of_another_class_is_called():
    class Ones(nn.Linear):
        def forward(self, input):
            return torch.ones(*input.shape[:-1], self.out_features, dtype=input.dtype)

    block = tfk.nn.FeedForward(12, 20, 0.0, gated=True, dtype=torch.float64)
    x = randn(5, 12)
    y = feed_forward(x, block.linear1, F.relu, block.dropout, block.linear2, "cpu", Ones(12, 20))
    torch.testing.assert_close(y, block.linear2(F.relu(block.linear1(x))))
