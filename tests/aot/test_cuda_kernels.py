"""The CUDA kernels, compiled: nothing spills, 16 bytes are moved at a time, tensor cores multiply; as committed."""

import re

import pytest

from tests.aot import cuda_table
from tfm_kernels import _library

needs_build = pytest.mark.skipif(_library.cuda_extension is None, reason=_library.cuda_missing or "")
REGISTERS = 65536  # of a multiprocessor
COMMITTED = cuda_table.load()["kernels"]


def fits(name, found):
    """No byte of stack; registers for as many blocks as the launch plans."""
    assert found["stack"] == found["local"] == 0, f"{name} has a stack: {found}"
    assert not any(key.startswith(("LDL", "STL")) for key in found), f"{name} spills: {found}"
    atomics = {key for key in found if key.startswith(("ATOM", "RED"))}
    if "attention" in name:
        attention_fits(name, found, atomics)
    else:
        norm_fits(name, found, atomics)


def attention_fits(name, found, atomics):
    """Tiles are copied asynchronously and multiplied by tensor cores but for float32; two blocks of 128 threads fit."""
    assert not atomics, f"{name} is not deterministic: {found}"
    copies = [key for key in found if key.startswith("LDGSTS") and ".128" in key]
    assert copies, f"{name} copies less than 16 bytes at a time: {found}"
    if "_rows_" not in name and "_bias_" not in name:
        assert found["STG.E.128"] > 0, f"{name} stores less than 16 bytes at a time: {found}"
    products = {key for key in found if key.startswith("HMMA")}
    expected = {"__half": {"HMMA.16816.F32"}, "__nv_bfloat16": {"HMMA.16816.F32.BF16"}, "float": set()}
    assert products == expected[re.search(r"<(\w+)", name)[1]], f"{name} multiplies otherwise: {found}"
    assert -(-found["registers"] // 8) * 8 * 128 * 2 <= REGISTERS, f"{name}: two blocks do not fit: {found}"


def norm_fits(name, found, atomics):
    """Only counters are added to atomically."""
    assert found["LDG.E.128"] > 0 and found["STG.E.128"] > 0, f"{name} moves less than 16 bytes at a time: {found}"
    assert atomics <= {"ATOMG.E.ADD.STRONG.GPU"}, f"{name} is not deterministic: {found}"
    launch = re.search(r"Group, \d+, (\d+)(?:, (\d+))?, (?:true|false)>", name)
    threads, blocks = int(launch[1]), int(launch[2] or 1)
    rounded = -(-found["registers"] // 8) * 8  # as they are handed out
    assert rounded * threads * blocks <= REGISTERS, f"{name}: {blocks} blocks of {threads} threads do not fit: {found}"


@pytest.mark.parametrize("name", COMMITTED)
def test_the_committed_kernels_fit(name):
    fits(name, COMMITTED[name])


def test_the_table_is_complete():
    """Norms: both directions in three types and four shapes for each architecture. Attention: five kernels in three
    types and three widths, of which one is in two parts.
    """
    norms = [name for name in COMMITTED if "norm" in name]
    attention = [name for name in COMMITTED if "attention" in name]
    assert len(norms) == 2 * 3 * 4 * len(cuda_table.ARCHITECTURES)
    assert len(attention) == (5 * 3 * 3 + 3) * len(cuda_table.ARCHITECTURES)
    assert all(any(name.startswith(f"sm_{arch}") for name in COMMITTED) for arch in ("80", "90"))


@needs_build
def test_the_built_kernels_are_the_committed_ones():
    """Another nvcc may take other registers; the kernels have to fit all the same."""
    found = cuda_table.measure()
    assert found, "the build holds no kernels"
    for name, values in found.items():
        fits(name, values)
    same_nvcc = _library.cuda_extension.build_info()["cuda"] == cuda_table.load()["cuda"]
    if same_nvcc and cuda_table.architectures() == cuda_table.ARCHITECTURES:
        assert found == COMMITTED, "run `python -m tests.aot.cuda_table`"


@needs_build
def test_later_gpus_find_code_to_compile():
    """PTX of the lowest architecture that every later GPU runs."""
    if "80" in cuda_table.architectures():
        assert re.search(r"PTX file\s+\d+: .*sm_80\.ptx", cuda_table._cuobjdump("-lptx"))
