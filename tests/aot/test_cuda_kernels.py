"""The CUDA kernels, compiled: nothing spills, 16 bytes are moved at a time, tensor cores multiply; as committed."""

import re

import pytest

from tests.aot import cuda_table
from tfm_kernels import _library

needs_build = pytest.mark.skipif(_library.cuda_extension is None, reason=_library.cuda_missing or "")
REGISTERS = 65536  # of a multiprocessor
COMMITTED = cuda_table.load()["kernels"]


SHARED = 164 << 10  # bytes of a multiprocessor of sm_80, of which a block costs 1 KiB more than it asks for
# what multiplies; float32 is not rounded to TF32
PRODUCTS = {"__half": {"HMMA.16816.F32"}, "__nv_bfloat16": {"HMMA.16816.F32.BF16"}, "float": set()}


def norm(name):
    """Threads of a block, blocks of a multiprocessor, bytes of shared memory: as the norms plan them."""
    launch = re.search(r"Group, \d+, (\d+)(?:, (\d+))?, (?:true|false)>", name)
    return int(launch[1]), int(launch[2] or 1), 0


def tiles(name):
    """The same of csrc/cuda/gemm.cuh's tiles."""
    element, left, right, fragments, warps = re.search(r"Tiling<(\w+), (\d), (\d), (\d), (\d)>", name).groups()
    size, threads = 4 if element == "float" else 2, 64 * int(warps)
    sides = 32 * int(fragments), 32 * int(warps)
    stage = sum(
        (64 // size) * (side * size + 16) if lie == "1" else side * (64 + 16)
        for lie, side in zip((left, right), sides, strict=True)
    )
    return threads, 1024 // size // threads, 3 * stage


def attention_fits(name, found, atomics):
    """Tiles are copied asynchronously and multiplied by tensor cores but for float32; two blocks of 128 threads fit."""
    assert not atomics, f"{name} is not deterministic: {found}"
    copies = [key for key in found if key.startswith("LDGSTS") and ".128" in key]
    assert copies, f"{name} copies less than 16 bytes at a time: {found}"
    if "_rows_" not in name and "_bias_" not in name:
        assert found["STG.E.128"] > 0, f"{name} stores less than 16 bytes at a time: {found}"
    assert products(found) == PRODUCTS[re.search(r"<(\w+)", name)[1]], f"{name} multiplies otherwise: {found}"
    assert -(-found["registers"] // 8) * 8 * 128 * 2 <= REGISTERS, f"{name}: two blocks do not fit: {found}"


def products(found):
    """The instructions of the tensor cores."""
    return {key for key in found if key.startswith("HMMA")}


def fits(name, found):
    """No byte of stack; registers for as many blocks as the launch plans."""
    assert found["stack"] == found["local"] == 0, f"{name} has a stack: {found}"
    assert not any(key.startswith(("LDL", "STL")) for key in found), f"{name} spills: {found}"
    atomics = {key for key in found if key.startswith(("ATOM", "RED"))}
    if "attention" in name:
        attention_fits(name, found, atomics)
        return
    threads, blocks, shared = 256, 4, 0
    if "layer_norm" in name:
        threads, blocks, shared = norm(name)
        assert found["LDG.E.128"] > 0 and found["STG.E.128"] > 0, f"{name} moves less than 16 bytes at a time: {found}"
        atomics -= {"ATOMG.E.ADD.STRONG.GPU"}
    elif "Tiling" in name:
        threads, blocks, shared = tiles(name)
        copies = [key for key in found if key.startswith("LDGSTS")]
        assert copies and all(".128" in key for key in copies), f"{name} copies less than 16 bytes at a time: {found}"
        assert found["STG.E.128"] > 0, f"{name} stores less than 16 bytes at a time: {found}"
        assert products(found) == PRODUCTS[re.search(r"<(\w+),", name)[1]], f"{name} multiplies otherwise: {found}"
    else:
        assert "sum_rows_kernel" in name, f"{name}: nobody says what it must have"
    assert not atomics, f"{name} is not deterministic: {found}"
    rounded = -(-found["registers"] // 8) * 8  # as they are handed out
    assert rounded * threads * blocks <= REGISTERS, f"{name}: {blocks} blocks of {threads} threads do not fit: {found}"
    assert (shared + 1024) * blocks <= SHARED, f"{name}: {blocks} blocks of {shared} bytes do not fit"


@pytest.mark.parametrize("name", COMMITTED)
def test_the_committed_kernels_fit(name):
    fits(name, COMMITTED[name])


def test_the_table_is_complete():
    """For each architecture: the norms in three types and four shapes, both ways; ffn in three types and two tiles, a
    kernel each way and three forms of products; sums over rows of three types into three; attention's five kernels in
    three types and three widths, of which one is in two parts.
    """
    counts = {
        "layer_norm": 2 * 3 * 4, "ffn": 2 * 3 * 2, "gemm": 3 * 3 * 2, "sum_rows": 3 * 3, "attention": 5 * 3 * 3 + 3,
    }  # fmt: skip
    for arch in ("80", "90"):
        for stem, count in counts.items():
            assert sum(name.startswith(f"sm_{arch} {stem}") for name in COMMITTED) == count, stem


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
