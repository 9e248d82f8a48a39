"""Nested tensors have no shape that a kernel could run over: one sentence says so, not an internal error of torch's."""

import pytest
import torch

import tfm_kernels as tfk

W, IDS = torch.ones(8, 8), torch.zeros(2, dtype=torch.int64)
CALLS = {
    "layer_norm": lambda x: tfk.ops.layer_norm(x),
    "rms_norm": lambda x: tfk.ops.rms_norm(x),
    "add_layer_norm": lambda x: tfk.ops.add_layer_norm(x, x),
    "ffn": lambda x: tfk.ops.ffn(x, W, None, W, None),
    "attention": lambda x: tfk.ops.attention(x, x, x),
    "attention_varlen": lambda x: tfk.ops.attention_varlen(x, x, x, IDS, IDS, 1, 1),
    "linear": lambda x: tfk.ops.linear(x, W),
    "linear_cross_entropy": lambda x: tfk.ops.linear_cross_entropy(x, W, IDS),
    "rotary": lambda x: tfk.ops.rotary(x, W, W),
    "int8_linear": lambda x: tfk.ops.int8_linear(x, W.to(torch.int8), torch.ones(8)),
    "FeedForward": lambda x: tfk.nn.FeedForward(8, 16)(x),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.parametrize("op", CALLS)
def test_are_refused_in_one_sentence(op, layout):
    x = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(2, 8)], layout=layout)
    with pytest.raises(ValueError, match=rf"^{op}: \w+ must be a padded tensor, got a nested one$"):
        CALLS[op](x)
