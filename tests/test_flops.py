"""torch's counter of floating-point operations counts in our operators what it counts in PyTorch's own."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import tfm_kernels as tfk
from tfm_kernels import _flops

_flops.tell_torch()


def counted(run):
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "needs", [(), ("x",), ("w1", "b1"), ("b2",), ("w2",), ("gate", "x"), ("x", "w1", "w2", "gate")]
)
@pytest.mark.parametrize("gated", [False, True])
def test_ffn(gated, needs):
    """As the formula written in torch's functions, which compute no gradient that nobody asked for."""
    x, w1, w2, gate = torch.randn(6, 8), torch.randn(20, 8), torch.randn(10, 20), torch.randn(20, 8)
    given = {"x": x, "w1": w1, "b1": torch.randn(20), "w2": w2, "b2": torch.randn(10), "gate": gate if gated else None}
    for name in needs:
        if given[name] is not None:
            given[name].requires_grad_()

    def run(backend):
        y = tfk.ops.ffn(**given, backend=backend)
        if y.requires_grad:
            y.sum().backward()

    assert counted(lambda: run("cpu")) == counted(lambda: run("aten")) > 0


def test_ffn_again_for_a_gradient():
    x, w1, w2 = (torch.randn(shape, requires_grad=True) for shape in ((64, 8), (20, 8), (10, 20)))
    run = lambda again: tfk.ops.ffn(x, w1, None, w2, None, recompute=again, backend="cpu").sum().backward()
    assert counted(lambda: run(True)) - counted(lambda: run(False)) == 2 * 64 * 20 * 8


@pytest.mark.parametrize("heads", [4, 2])
def test_attention(heads):
    """As torch's fused attention, whose backward computes the scores once more."""
    q, k, v = (torch.randn(2, h, t, d, requires_grad=True) for h, t, d in ((4, 5, 8), (heads, 7, 8), (heads, 7, 6)))
    forward = counted(lambda: tfk.ops.attention(q, k, v, backend="cpu"))
    assert forward == 2 * 2 * 4 * 5 * 7 * (8 + 6)
    both = counted(lambda: tfk.ops.attention(q, k, v, backend="cpu").sum().backward())
    assert both - forward == 2 * 2 * 4 * 5 * 7 * (3 * 8 + 2 * 6)


def test_packed_attention_counts_what_sequences_see():
    q, k, v = (torch.randn(9, 4, 8, requires_grad=True) for _ in range(3))
    at = torch.tensor([0, 2, 9], dtype=torch.int32)
    run = lambda: tfk.ops.attention_varlen(q, k, v, at, at, 7, 7, backend="cpu")
    assert counted(run) == 4 * 4 * (2 * 2 + 7 * 7) * 8
    assert counted(lambda: run().sum().backward()) == 14 * 4 * (2 * 2 + 7 * 7) * 8


def test_packed_attention_of_fake_tensors_counts_at_most():
    with FakeTensorMode():
        q, at = torch.randn(9, 4, 8), torch.zeros(3, dtype=torch.int32)
        run = lambda: tfk.ops.attention_varlen(q, q, q, at, at, 7, 7, backend="cpu")
        assert counted(run) == 4 * 4 * 9 * 9 * 8


@pytest.mark.parametrize("wanted", [(), ("x",), ("weight",), ("x", "weight")])
def test_linear_cross_entropy(wanted):
    given = {"x": torch.randn(6, 8), "weight": torch.randn(11, 8), "target": torch.arange(6)}
    for name in wanted:
        given[name].requires_grad_()

    def run(backend):
        loss = tfk.ops.linear_cross_entropy(**given, backend=backend)
        if loss.requires_grad:
            loss.backward()

    product = 2 * 6 * 11 * 8
    assert counted(lambda: run("aten")) == product * (1 + len(wanted))
    assert counted(lambda: run("cpu")) == product * (1 + len(wanted) + bool(wanted))  # its logits are computed twice


def test_layers_of_8_bits():
    linear = nn.Linear(8, 16)
    model = nn.Sequential(copy.deepcopy(linear))
    tfk.quantize(model, "int8_weight_only")
    x = torch.randn(3, 8)
    with torch.no_grad():
        assert counted(lambda: model[0](x)) == counted(lambda: linear(x)) == 2 * 3 * 8 * 16


def test_patched_layers():
    """PyTorch's own attention on a CPU is not counted: its place is taken by what it multiplies."""
    torch.manual_seed(0)
    x, linear = torch.randn(2, 5, 16), nn.Linear(16, 48)
    stock = counted(lambda: linear(x[:1, 0]))
    with torch.no_grad(), tfk.patch(linear):
        assert counted(lambda: linear(x[:1, 0])) == stock == 2 * 16 * 48
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True).eval()
    tfk.patch(layer, backend="cpu")
    with torch.no_grad():
        assert counted(lambda: layer(x)) == 2 * 10 * (4 * 16 * 16 + 2 * 16 * 32) + 4 * 2 * 5 * 5 * 16


def test_decoding():
    x, cache = torch.randn(2, 1, 16), [torch.randn(2, 4, 9, 4) for _ in range(2)]
    weights = torch.randn(48, 16), None, torch.randn(16, 16), None
    step = torch.ops.tfm_kernels.attention_step_cpu
    assert counted(lambda: step(x, *weights, *cache, 7, True, None)) == 2 * 2 * 4 * 16 * 16 + 4 * 2 * 16 * 7
    assert counted(lambda: step(x, *weights, *cache, 7, False, None)) == 2 * 2 * 2 * 16 * 16 + 4 * 2 * 16 * 7


def test_is_told_whichever_comes_first():
    """And importing the package does not import the counter, which would import Triton."""
    for code in ("import torch.utils.flop_counter as c, tfm_kernels", "import tfm_kernels as t; import sys; "
                 "assert 'torch.utils.flop_counter' not in sys.modules; import torch.utils.flop_counter as c; "
                 "import torch; t.patch(torch.nn.Linear(2, 2))"):  # fmt: skip
        code += "; assert any('tfm_kernels.ffn_fwd_cpu' in str(key) for key in c.flop_registry)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
