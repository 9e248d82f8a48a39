"""export_onnx: which axes may be named, what inputs and outputs are called, and what an export leaves as it was."""

import logging

import onnx
import pytest
import torch
from torch import nn

import tfm_kernels as tfk


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.onnx"


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        ({"dynamic_axes": {"input": {-1: "batch"}}}, ValueError, r"axes of input, which has shape \(2, 8\), got -1"),
        ({"dynamic_axes": {"input": {False: "rows"}}}, ValueError, r"of input, which has shape \(2, 8\), got False"),
        ({"dynamic_axes": {"input": {0: ""}}}, TypeError, "dynamic_axes must be None or a dict such as"),
        ({"opset": 24}, ValueError, "opset must be an integer from 18 to 23, got 24"),
    ],
)
def test_what_is_wrong_is_one_sentence(path, change, error, sentence):
    with pytest.raises(error, match=f"^export_onnx: .*{sentence}"):
        tfk.export_onnx(nn.Linear(8, 4), path, torch.randn(2, 8), **change)


class Sum(nn.Module):
    def forward(self, x, /, *more):
        return {"x": x + sum(more), "y": [x * 2]}


def test_names_of_inputs_and_outputs(path):
    """Of one parameter in front of a slash, those behind it, and outputs that are called like an input."""
    report = tfk.export_onnx(Sum(), path, (torch.randn(2, 3), torch.randn(2, 3), torch.randn(2, 3)))
    assert [port.name for port in report.inputs] == ["x", "input_1", "input_2"]
    assert [port.name for port in report.outputs] == ["x_2", "y_0"]
    assert onnx.load(path).producer_name == "tfm_kernels"


def test_a_vector_of_one_number_beside_a_batch_of_one(path):
    report = tfk.export_onnx(Sum(), path, (torch.randn(1, 6), torch.randn(1)))
    assert [port.shape for port in report.inputs] == [("x_0", "x_1"), (1,)]


def test_switches_and_levels_are_as_they_were(path):
    logger, fast = logging.getLogger("onnx_ir"), torch.backends.mha.get_fastpath_enabled()
    before = logger.level
    logger.setLevel(logging.INFO)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        tfk.export_onnx(nn.Linear(8, 4), path, torch.randn(2, 8))
        assert logger.level == logging.INFO and not torch.backends.mha.get_fastpath_enabled()
    finally:
        logger.setLevel(before)
        torch.backends.mha.set_fastpath_enabled(fast)


@pytest.mark.parametrize(("opset", "documented"), [(20, True), (21, False)])
def test_opsets_that_the_matrix_speaks_for(path, opset, documented):
    report = tfk.export_onnx(nn.Linear(8, 4), path, torch.randn(2, 8), opset=opset)
    assert any("is newer than 20" in remark for remark in report.remarks) is not documented


class Adds(nn.Module):
    def forward(self, x):
        return x.add_(1)


def test_examples_stay_as_they_are(path):
    x = torch.zeros(2, 3)
    tfk.export_onnx(Adds(), path, x)
    assert not x.any()


class Pair(nn.Module):
    def forward(self, ids, target_ids):
        return ids * 2, target_ids * 3


def test_names_of_the_axes_of_two_inputs_of_tokens(path):
    report = tfk.export_onnx(Pair(), path, (torch.ones(2, 5).long(), torch.ones(3, 6).long()))
    named = [("batch", "sequence"), ("target_batch", "target_sequence")]
    assert [port.shape for port in report.inputs] == named == [port.shape for port in report.outputs]
