"""The CUDA kernels, compiled: nothing spills, memory is moved 16 bytes at a time, the figures are as committed."""

import re

import pytest

from tests.aot import cuda_table
from tfm_kernels import _library

needs_build = pytest.mark.skipif(_library.cuda_extension is None, reason=_library.cuda_missing or "")
REGISTERS = 65536  # of a multiprocessor
COMMITTED = cuda_table.load()["kernels"]


def fits(name, found):
    """No byte of stack; registers for as many blocks as the launch plans; only counters are added to atomically."""
    assert found["stack"] == found["local"] == 0, f"{name} has a stack: {found}"
    assert not any(key.startswith(("LDL", "STL")) for key in found), f"{name} spills: {found}"
    assert found["LDG.E.128"] > 0 and found["STG.E.128"] > 0, f"{name} moves less than 16 bytes at a time: {found}"
    atomics = {key for key in found if key.startswith(("ATOM", "RED"))}
    assert atomics <= {"ATOMG.E.ADD.STRONG.GPU"}, f"{name} is not deterministic: {found}"
    launch = re.search(r"Group, \d+, (\d+)(?:, (\d+))?, (?:true|false)>", name)
    threads, blocks = int(launch[1]), int(launch[2] or 1)
    rounded = -(-found["registers"] // 8) * 8  # as they are handed out
    assert rounded * threads * blocks <= REGISTERS, f"{name}: {blocks} blocks of {threads} threads do not fit: {found}"


@pytest.mark.parametrize("name", COMMITTED)
def test_the_committed_kernels_fit(name):
    fits(name, COMMITTED[name])


def test_the_table_is_complete():
    """Both directions in three types and four shapes for each architecture."""
    assert len(COMMITTED) == 2 * 3 * 4 * len(cuda_table.ARCHITECTURES)
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
