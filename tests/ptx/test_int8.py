"""int8_linear's and int8_ffn's compiled kernels: tiles of the largest and of few rows, parts of k, both roundings."""

import pytest
import torch

from tests.ops.test_int8_ffn import block
from tests.ops.test_int8_linear import layer
from tfm_kernels.testing import assert_contract
from tfm_kernels.triton import _launch

pytestmark = pytest.mark.usefixtures("gpu")


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [(1, 583, 33), (13, 400, 75), (70, 400, 72), (300, 48, 200)], ids=str)
def test_int8_linear(size, dtype, dynamic, monkeypatch):
    for multiprocessors in (1, 132):
        monkeypatch.setattr(_launch, "MULTIPROCESSORS", {9: multiprocessors})
        assert_contract("int8_linear", layer(*size, dtype, dynamic=dynamic), "triton", backward=False)


@pytest.mark.parametrize("gated, activation", [(False, "gelu"), (True, "silu"), (False, "relu"), (True, "gelu_tanh")])
@pytest.mark.parametrize("size", [(5, 400, 75, 24), (13, 261, 75, 9), (130, 48, 136, 8)], ids=str)
def test_int8_ffn(size, gated, activation, monkeypatch):
    for multiprocessors in (1, 132):
        monkeypatch.setattr(_launch, "MULTIPROCESSORS", {9: multiprocessors})
        given = block(*size, torch.bfloat16, gated=gated, activation=activation)
        assert_contract("int8_ffn", given, "triton", backward=False)
