"""int8_ffn's kernels, compiled: nothing spills, and the figures are those of the committed table."""

import re

import pytest

from tests.aot import int8_ffn_table, int8_linear_table, plan, table
from tests.aot.test_int8_linear import fits
from tfm_kernels.triton import _int8, _int8_gemm, int8_ffn_fwd

ENTRIES = int8_ffn_table.entries()
LINEAR = int8_linear_table.entries()
COMMITTED = table.load(int8_ffn_table.FILE)
QUICK = [
    name
    for name in ENTRIES
    if re.search(r"sm_90 (int8_ffn_fwd(_join)? (gelu full|parts)( gated)?( \d.*int8)?|round_pieces .*)$", name)
]


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in ENTRIES])
def test_compiles_as_planned(name):
    found = int8_ffn_table.measure(ENTRIES[name])
    with plan.held(name, found, int8_ffn_table.FILE):
        fits(name, ENTRIES[name], found)


def test_the_table_is_complete_and_as_planned():
    assert set(COMMITTED["kernels"]) == set(ENTRIES) and 15 <= len(QUICK) <= 25
    for name, found in COMMITTED["kernels"].items():
        fits(name, ENTRIES[name], found)


def test_every_launch_is_compiled():
    """What the pick_config functions return, of all shapes; the second product's are int8_linear's."""
    sizes = [2**k for k in range(0, 18)] + [3 * 2**k for k in range(0, 15)]
    for arch in int8_ffn_table.ARCHS:
        capability = (arch // 10, arch % 10)
        for aligned in (True, False):
            for M in sizes:
                for F in sizes:
                    for gated in (False, True):
                        config = int8_ffn_fwd.pick_config(M, F, 4096, gated, aligned, capability)
                        for what in ("gelu full", "gelu plain") if config.splits == 1 else ("parts",):
                            what = f"int8_ffn_fwd {what}{' gated' * gated}"
                            assert int8_ffn_table.label(arch, what, config, "int8", aligned) in ENTRIES
                    config = _int8_gemm.pick_config(M, F, 4096, "int8", aligned, capability)
                    what = "int8_gemm full" if config.splits == 1 else "int8_gemm parts"
                    assert int8_linear_table.label(arch, what, config, "int8", aligned) in LINEAR
        for K in (1, 256, 257, 1024, 1025, 2**17):
            config = _int8.pick_config(K)
            assert f"sm_{arch} round_pieces {config.block_m}x{config.block_k}" in ENTRIES
