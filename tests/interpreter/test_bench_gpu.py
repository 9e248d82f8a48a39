"""`python -m bench.gpu` on interpreted kernels: what its parts do to the ops' calls, but for CUDA itself."""

import pytest
import torch

from bench.gpu import attention, ffn, int8_ffn, int8_linear, linear_cross_entropy, memory, rotary
from bench.gpu.layer_norm import TRITON
from tests import bench_gpu_checks as checks
from tfm_kernels import ops
from tfm_kernels.testing import invariance

# the interpreter is slow
SMALL = checks.small(TRITON, "x63 ", "x64 ", rows=9)
LOSSES = {
    name: call
    for name, call in checks.small(linear_cross_entropy.TRITON, " 70 ").items()
    if "bfloat16" in name and "bias" in name
}
TURNS = rotary.TRITON.branches("cpu")
INT8 = {name: call for name, call in checks.small(int8_linear.TRITON, " 9 ", " 70 ").items() if "bfloat16" in name}
INT8_BLOCKS = {
    name: call for name, call in checks.small(int8_ffn.TRITON, " 9 401", " 70 33").items() if "bfloat16" in name
}
BLOCKS = {name: call for name, call in checks.small(ffn.TRITON, " 70 ").items() if "bfloat16" in name}


@pytest.mark.parametrize("name", SMALL)
def test_guards_and_repeats(name):
    checks.guards_and_repeats(TRITON, *SMALL[name])


@pytest.mark.parametrize("name", BLOCKS)
def test_guards_and_repeats_of_ffn(name):
    checks.guards_and_repeats(ffn.TRITON, *BLOCKS[name], times=2)


@pytest.mark.parametrize("name", LOSSES)
def test_guards_and_repeats_of_linear_cross_entropy(name):
    checks.guards_and_repeats(linear_cross_entropy.TRITON, *LOSSES[name], times=2)


@pytest.mark.parametrize("name", TURNS)
def test_guards_and_repeats_of_rotary(name):
    checks.guards_and_repeats(rotary.TRITON, *TURNS[name], times=2)


@pytest.mark.parametrize("name", LOSSES)
def test_nan_stays_in_its_row_of_a_loss(name):
    invariance.assert_nan_stays_in_its_row(*LOSSES[name], "triton")


@pytest.mark.parametrize("name", INT8)
def test_guards_and_repeats_of_int8_linear(name):
    checks.guards_and_repeats(int8_linear.TRITON, *INT8[name], times=2)


@pytest.mark.parametrize("name", INT8_BLOCKS)
def test_guards_and_repeats_of_int8_ffn(name):
    checks.guards_and_repeats(int8_ffn.TRITON, *INT8_BLOCKS[name], times=2)


def test_a_write_beside_a_tensor_is_seen(monkeypatch):
    right = ops.rms_norm

    def past_the_end(x, weight, backend):
        x.untyped_storage()[memory.GUARD + x.numel() * x.element_size()] = 1
        return right(x, weight, backend=backend)

    monkeypatch.setattr(ops, "rms_norm", past_the_end)
    x, weight = torch.randn(3, 24), torch.randn(24)
    with memory.guards(0xFF) as guard:
        guard(x)
    with pytest.raises(AssertionError, match="was written to"):
        with memory.guards(0xFF) as guard:
            ops.rms_norm(guard(x), guard(weight), "triton")


def test_a_read_beside_a_tensor_is_seen(monkeypatch):
    right = ops.rms_norm

    def too_far(x, weight, backend):
        wide = x.detach().as_strided((1,), (1,), x.storage_offset() + x.numel()) if x.storage_offset() else 0.0
        return right(x, weight, backend=backend) + wide

    monkeypatch.setattr(ops, "rms_norm", too_far)
    with pytest.raises(AssertionError, match="what lies beside"):
        memory.guarded_call("rms_norm", {"x": torch.randn(3, 24), "weight": torch.randn(24)}, "triton")


def test_contract_items_of_ffn(tmp_path):
    checks.contract_items(ffn.TRITON, tmp_path, "-70-e=16-f=24-", "masks of 7 features, p = 0.5")


def test_contract_items_of_linear_cross_entropy(tmp_path):
    checks.contract_items(linear_cross_entropy.TRITON, tmp_path, "-70-k=33-", "rows that count")


def test_contract_items_of_rotary(tmp_path):
    checks.contract_items(rotary.TRITON, tmp_path, "-d=30-", "NaN in a pair", count=2)


@pytest.mark.parametrize("check", ["integers are exact", pytest.param("NaN in a row", marks=pytest.mark.slow)])
def test_contract_items_of_int8_linear(check, tmp_path):
    checks.contract_items(int8_linear.TRITON, tmp_path, "-misaligned-2x17-", check, count=2)


def test_contract_items_of_int8_ffn(tmp_path):
    checks.contract_items(int8_ffn.TRITON, tmp_path, "-misaligned-2x17-", "hidden layer of zeros", count=2)


def test_contract_items(tmp_path):
    checks.contract_items(TRITON, tmp_path, "-17-width=", "masks of width 7, p = 0.5", count=3)


def test_a_result_that_lies_as_its_argument_is_guarded_too():
    x = torch.randn(2, 3, 8).transpose(0, 1)
    with pytest.raises(AssertionError, match="was written to"):
        with memory.guards(0xFF):
            y = torch.empty_like(x)
            assert y.stride() == x.stride() and y.dtype == x.dtype
            y.untyped_storage()[memory.GUARD - 1] = 1


@pytest.mark.parametrize(
    "check",
    [
        "attention hidden keys, window, torch.bfloat16",
        pytest.param("attention NaN that is seen", marks=pytest.mark.slow),  # half a minute
    ],
)
def test_checks_of_attention(check):
    attention.TRITON.checks[check]("cpu")


@pytest.mark.parametrize("name", SMALL)
def test_nan_stays_in_its_row(name):
    invariance.assert_nan_stays_in_its_row(*SMALL[name], "triton")
