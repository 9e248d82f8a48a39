"""int8_ffn's kernels, compiled: nothing spills, and the figures are those of the committed table."""

import re

from tests.aot import int8_ffn_table, int8_linear_table, plan
from tests.aot.test_int8_linear import fits
from tfm_kernels.triton import _int8, _int8_gemm, int8_ffn_fwd

ENTRIES = int8_ffn_table.entries()
LINEAR = int8_linear_table.entries()
QUICK = [
    name
    for name in ENTRIES
    if re.search(r"sm_90 (int8_ffn_fwd(_join)? (gelu full|parts)( gated)?( \d.*int8)?|round_pieces .*)$", name)
]


test_compiles_as_planned, test_the_table_is_complete_and_as_planned = plan.tests_of(
    ENTRIES, int8_ffn_table.measure, int8_ffn_table.FILE, fits, QUICK, range(15, 26)
)


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
