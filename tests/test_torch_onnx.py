"""torch.onnx.export of what the package makes: PyTorch's own operators, which other runtimes have."""

import copy

import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import tfm_kernels as tfk


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x, padding):
        return self.head(self.layers(x, src_key_padding_mask=padding))


def patched():
    model = Stack()
    assert tfk.patch(model).replaced
    return model


def own():
    model = Stack()
    model.layers = tfk.nn.TransformerEncoder(tfk.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1)
    return model


@pytest.mark.parametrize("make", [patched, own])
def test_a_file_of_any_sizes(make, tmp_path):
    torch.manual_seed(0)
    model = make().eval()
    before = copy.deepcopy(model)
    x, padding = torch.randn(2, 5, 16), torch.zeros(2, 5, dtype=torch.bool)
    sizes = {0: torch.export.Dim("batch", max=8), 1: torch.export.Dim("length", max=32)}
    path = tmp_path / "model.onnx"
    torch.onnx.export(model, (x, padding), path, dynamo=True, verbose=False, dynamic_shapes=(sizes, sizes))
    assert {node.domain for node in onnx.load(path).graph.node} == {""}
    session = onnxruntime.InferenceSession(path)
    x, padding = torch.randn(3, 7, 16), torch.zeros(3, 7, dtype=torch.bool)
    padding[1, 4:] = True
    named = {port.name: given.numpy() for port, given in zip(session.get_inputs(), (x, padding), strict=True)}
    found = torch.from_numpy(session.run(None, named)[0])
    torch.testing.assert_close(found[~padding], model(x, padding)[~padding])
    assert torch.equal(model(x, padding), before(x, padding))


class Unbiased(nn.Module):
    """A norm that PyTorch has no function for, and attention whose weights nobody reads but that are asked for."""

    def __init__(self):
        super().__init__()
        self.attention = tfk.nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x):
        return tfk.ops.layer_norm(self.attention(x, x, x)[0], unbiased=True)


def test_calls_that_aten_cannot_do_are_written_out(tmp_path):
    torch.manual_seed(0)
    model, x, path = Unbiased().eval(), torch.randn(2, 5, 16), tmp_path / "model.onnx"
    torch.onnx.export(model, (x,), path, dynamo=True, verbose=False)
    assert {node.domain for node in onnx.load(path).graph.node} == {""}
    session = onnxruntime.InferenceSession(path)
    found = torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])
    torch.testing.assert_close(found, model(x))
