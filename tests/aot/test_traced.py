"""torch.compile(fullgraph=True) traces the public functions for a GPU that is not there, and the backward operators.

Fake tensors on "cuda"; no kernel is compiled. Without gradients: torch's autograd ends the process where a CPU build
meets a CUDA device, so that the backward operators are called by themselves.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tfm_kernels import Mask, ops
from tfm_kernels.ops.ffn import BWD as FFN_BWD
from tfm_kernels.ops.layer_norm import BWD as LAYER_NORM_BWD
from tfm_kernels.ops.linear_cross_entropy import BWD as LINEAR_CROSS_ENTROPY_BWD
from tfm_kernels.ops.rotary import BWD as ROTARY_BWD


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    torch._dynamo.reset()


def new(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="cuda")


def seed():
    return torch.full((), 3, device="cuda")


def norm(op):
    def step(x, weight):
        residual = {"residual": x * 2, "dropout_p": 0.1, "seed": seed()} if op.startswith("add") else {}
        out = getattr(ops, op)(x, weight=weight, backend="triton", **residual)
        return out[0] + out[1] if isinstance(out, tuple) else out

    return step


def norm_gradients(x, weight):
    row = x.new_empty(x.shape[0], dtype=torch.float32)
    tail = (0.0, False, False, 0.1, seed(), None, True, False)
    return LAYER_NORM_BWD["triton"](x, None, x, row, row, weight, None, *tail)


def block(x, weight):
    w1, w2 = weight.new_empty(48, 16), weight.new_empty(16, 48)
    options = {"activation": "silu", "gate": w1 * 2, "dropout_p": 0.1, "seed": seed(), "backend": "triton"}
    return ops.ffn(x, w1, None, w2, weight, **options)


def block_gradients(x, weight):
    w1, w2, preact = weight.new_empty(48, 16), weight.new_empty(16, 48), x.new_empty(x.shape[0], 48)
    needs = (True, True, False, True, True, False)
    return FFN_BWD["triton"](x, x, w1, None, w2, None, preact, 1, 0.1, seed(), None, *needs)


def targets(x):
    return torch.full((x.shape[0],), 3, device="cuda")


def losses(x, weight):
    """With the shape of x, as the others."""
    loss = ops.linear_cross_entropy(x, weight.new_empty(48, 16), targets(x), reduction="none", backend="triton")
    return x * loss.unsqueeze(1).to(x.dtype)


def loss_gradients(x, weight):
    w, row, nothing = weight.new_empty(48, 16), x.new_empty(x.shape[0], dtype=torch.float32), weight.new_empty(0)
    rest = (nothing, nothing, nothing, -100, 0.1, True, True, False)
    return LINEAR_CROSS_ENTROPY_BWD["triton"](row, x, w, None, targets(x), row, *rest)


def heads(x, weight):
    """Two heads of 8 features, and a table of factors for all of them."""
    return x.view(1, x.shape[0], 2, 8).transpose(1, 2), weight.new_empty(x.shape[0], 8)


def turned(x, weight):
    y, table = heads(x, weight)
    y = ops.rotary(y, table, table, backend="triton")
    return y.transpose(1, 2).reshape(x.shape)


def turned_gradients(x, weight):
    dy, table = heads(x, weight)
    return (ROTARY_BWD["triton"](dy, table, table, True),)


def integers(x, weight):
    w, scale = weight.new_empty(16, 16, dtype=torch.int8), weight.new_empty(16, dtype=torch.float32)
    return ops.int8_linear(ops.int8_linear(x, w, scale, backend="triton"), w, scale, dynamic=True, backend="triton")


def integer_block(x, weight):
    w1, w2 = weight.new_empty(48, 16, dtype=torch.int8), weight.new_empty(16, 48, dtype=torch.int8)
    scale1, scale2 = (weight.new_empty(size, dtype=torch.float32) for size in (48, 16))
    options = {"activation": "silu", "gate": w1 * 2, "gate_scale": scale1, "dynamic": True, "backend": "triton"}
    return ops.int8_ffn(x, w1, scale1, None, w2, scale2, weight, **options)


def decoded(x, weight):
    """Each row of x is a sequence's one query."""
    memory = x.new_empty(x.shape[0], 1, 100, 16)
    out = ops.attention(x.view(-1, 1, 1, 16), memory, memory, Mask.causal("bottom_right"), backend="triton")
    return out.reshape(x.shape)


FORWARD = {op: norm(op) for op in ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm")} | {"ffn": block}
FORWARD |= {"linear_cross_entropy": losses, "attention": decoded, "rotary": turned, "int8_linear": integers}
FORWARD["int8_ffn"] = integer_block
BACKWARD = {  # and the shapes of the results for (rows, 16)
    "layer_norm": (norm_gradients, lambda rows: [(rows, 16), (rows, 16), (16,), (0,)]),
    "ffn": (block_gradients, lambda rows: [(rows, 16), (48, 16), (0,), (16, 48), (16,), (0,)]),
    "linear_cross_entropy": (loss_gradients, lambda rows: [(rows, 16), (48, 16), (0,)]),
    "rotary": (turned_gradients, lambda rows: [(1, 2, rows, 8)]),
}


@pytest.mark.parametrize("op", FORWARD)
@pytest.mark.parametrize("dynamic", [False, True])
def test_forward(op, dynamic):
    with FakeTensorMode():
        compiled = torch.compile(FORWARD[op], fullgraph=True, backend="eager", dynamic=dynamic)
        for rows in (4, 9):
            out = compiled(new(rows, 16), new(16))
            assert out.device.type == "cuda" and out.shape == (rows, 16) and out.dtype == torch.bfloat16


@pytest.mark.parametrize("op", BACKWARD)
@pytest.mark.parametrize("dynamic", [False, True])
def test_backward(op, dynamic):
    step, shapes = BACKWARD[op]
    with FakeTensorMode():
        compiled = torch.compile(step, fullgraph=True, backend="eager", dynamic=dynamic)
        for rows in (4, 9):
            found = compiled(new(rows, 16), new(16))
            assert [tuple(t.shape) for t in found] == shapes(rows) and {t.device.type for t in found} == {"cuda"}
