"""int8_linear and int8_ffn on the CPU, whichever unit multiplies: AMX's tiles, VNNI's groups of bytes, 16-bit pairs."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tfm_kernels as tfk
from tests.ops.test_int8_ffn import block
from tests.ops.test_int8_linear import layer
from tests.threads import on_threads
from tfm_kernels import _library
from tfm_kernels.testing import assert_contract

ROOT = Path(__file__).resolve().parents[2]
INFO = _library.cpu_extension.build_info() if _library.cpu_extension is not None else {}
# what oneDNN is told not to go beyond -> the unit that is left
UNITS = {"AVX512_CORE": "pairs", "AVX512_CORE_BF16": "groups"}
# widths whose groups are whole and not; rows in a part of a panel, in panels, in tiles, and many beside their width
LINEAR = [(9, 70, 13), (16, 64, 97), (31, 33, 24), (33, 128, 260), (150, 141, 530), (270, 1042, 20)]
LINEAR += [(256, 128, 64), (300, 141, 530), (700, 70, 37)]
FFN = [(40, 64, 200, 24), (150, 33, 101, 20), (333, 70, 97, 130), (700, 513, 30, 5)]
CODE = """
import sys, torch
from tests.ops import test_int8_units as units
units.torch.save(units.outputs(), sys.argv[1])
print(units.unit())
"""


def unit():
    """What multiplies in this process where there are more than a few rows."""
    return "tiles" if INFO["int8_tiles"] else "groups" if INFO["vnni"] else "pairs"


def calls():
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for size in LINEAR:
            yield "int8_linear", layer(*size, dtype, dynamic=True)
        for size in FFN:
            for gated in (False, True):
                # ReLU: no unit, nor set of instructions, rounds it otherwise
                yield "int8_ffn", block(*size, dtype, gated=gated, activation="relu")


def outputs():
    with on_threads(1):  # two and more tiles of int8_ffn
        return [getattr(tfk.ops, op)(**given, backend="cpu") for op, given in calls()]


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512" or not INFO.get("vnni"),
    reason="this processor has one unit for 8-bit integers",
)
@pytest.mark.parametrize("isa", UNITS)
def test_every_unit_finds_the_same_bits(isa, tmp_path):
    """oneDNN reads ONEDNN_MAX_CPU_ISA, and so do the kernels: a processor then behaves as one that has no more."""
    environment = {"PATH": "/usr/bin:/bin", "ONEDNN_MAX_CPU_ISA": isa, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", CODE, str(tmp_path / "outputs.pt")]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == f"{UNITS[isa]}\n", done.stderr
    for (op, given), found, expected in zip(calls(), torch.load(tmp_path / "outputs.pt"), outputs(), strict=True):
        assert torch.equal(found, expected), (op, given["x"].shape, given["x"].dtype)


@pytest.mark.skipif(not INFO.get("int8_tiles"), reason="this processor has no tiles of 8-bit integers")
def test_tiles_hold_the_contract_and_are_given_back():
    """Tiles of integers and of bfloat16 by turns, whose shapes the processor keeps in the same registers."""
    given = layer(40, 96, 64, torch.bfloat16, dynamic=True)
    wide = {"x": given["x"], "weight": given["weight"].bfloat16() / 800, "bias": given["bias"]}
    for _ in range(3):
        assert_contract("int8_linear", given, "cpu", backward=False)
        assert_contract("linear", wide, "cpu", backward=False)
        torch.nn.functional.linear(*wide.values())
