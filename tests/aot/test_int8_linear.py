"""int8_linear's kernels, compiled: nothing spills, and the figures are those of the committed table."""

import re

from tests.aot import int8_linear_table, plan
from tests.aot.test_linear_cross_entropy import fits as fits_as_planned
from tfm_kernels.triton import _int8, _int8_gemm

ENTRIES = int8_linear_table.entries()
QUICK = [
    name for name in ENTRIES if re.search(r"sm_90 int8_gemm (full|parts).* (half|int8)$|sm_100 .*full.* ieee$", name)
]


def fits(name, entry, found):
    """No stack, tensor cores where planned, registers and memory for the programs planned, wide copies of weights."""
    if "unaligned" not in name and " warps" in name:
        least = 16 if " int8" in name.split(" stages")[1] else 4 if "tf32" in name else 8
        assert (found["narrowest copy"] or 0) >= least, f"{name} copies a few bytes at once: {found}"
    fits_as_planned(name, entry, found)


test_compiles_as_planned, test_the_table_is_complete_and_as_planned = plan.tests_of(
    ENTRIES, int8_linear_table.measure, int8_linear_table.FILE, fits, QUICK, range(15, 26)
)


def test_every_launch_is_compiled():
    """What the pick_config functions return, of all shapes."""
    sizes = [2**k for k in range(0, 18)] + [3 * 2**k for k in range(0, 15)]
    for arch in int8_linear_table.ARCHS:
        for call, (kind, *_) in int8_linear_table.CALLS.items():
            for aligned in (True, False):
                for M in sizes:
                    for N in sizes:
                        config = _int8_gemm.pick_config(M, N, 4096, kind, aligned, (arch // 10, arch % 10))
                        for what in ("full", "plain") if config.splits == 1 else ("parts",):
                            what = f"int8_gemm {what}"
                            assert int8_linear_table.label(arch, what, config, call, aligned) in ENTRIES
        for K in (1, 256, 257, 1024, 1025, 2**17):
            config = _int8.pick_config(K)
            assert f"sm_{arch} round_rows {config.block_m}x{config.block_k} bf16" in ENTRIES
