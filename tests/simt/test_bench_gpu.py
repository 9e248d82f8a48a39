"""`python -m bench.gpu` on the CUDA kernels, run on the CPU: its parts but for CUDA itself."""

import pytest

from bench.gpu import attention, build, ffn
from bench.gpu.layer_norm import CUDA
from tests import bench_gpu_checks as checks
from tfm_kernels import _library
from tfm_kernels.testing import invariance

SMALL = checks.small(CUDA, "x63 ", "x1024 ", rows=9)

BLOCKS = checks.small(ffn.CUDA, " 70 ")


@pytest.mark.parametrize("name", SMALL)
def test_guards_and_repeats(name):
    checks.guards_and_repeats(CUDA, *SMALL[name])


@pytest.mark.parametrize("name", BLOCKS)
def test_guards_and_repeats_of_ffn(name):
    checks.guards_and_repeats(ffn.CUDA, *BLOCKS[name])


def test_contract_items_of_ffn(tmp_path):
    checks.contract_items(ffn.CUDA, tmp_path, "-70-e=16-f=24-", "masks of 7 features, p = 0.5", count=2)


def test_contract_items(tmp_path):
    checks.contract_items(CUDA, tmp_path, "-17-width=", "masks of width 7, p = 0.5", count=3)


@pytest.mark.parametrize("check", attention.CUDA.checks)
def test_checks_of_attention(check):
    attention.CUDA.checks[check]("cpu")


@pytest.mark.parametrize("name", [*SMALL, *BLOCKS])
def test_nan_stays_in_its_row(name):
    invariance.assert_nan_stays_in_its_row(*(SMALL | BLOCKS)[name], "cuda")


def test_the_extension_is_looked_for_again(monkeypatch):
    """The proof's parent began before its build part."""
    built = _library.cuda_extension
    monkeypatch.setattr(_library, "cuda_extension", None)
    found = build.cuda_extension()
    if built is None:
        assert "was not built" in found["why"]
    else:
        assert _library.cuda_extension is built and found["built"] == built.build_info()
