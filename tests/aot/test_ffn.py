"""ffn's kernels, compiled: forward nothing spills, and the figures are those of the committed table."""

import re

from tests.aot import ffn_table, plan
from tests.aot.sass import MATRIX
from tfm_kernels.triton import _gemm, ffn_bwd, ffn_fwd

ENTRIES = ffn_table.entries()
QUICK = [
    name
    for name in ENTRIES
    if re.match(r"sm_90 (gemm|ffn_... gelu (full|undropped)).* half$|sm_90 ffn_... gelu full 128x128x16", name)
]
SHARED = {80: 164, 90: 228, 100: 228}  # KB of a multiprocessor, 1 of each program is not its own


def fits_the_gpu(name, entry, found):
    """No atomics, tensor cores where planned, registers and memory for the programs planned."""
    assert not {"ATOM", "ATOMG", "RED"} & set(found), f"{name} is not deterministic: {found}"
    tensor_cores = set(MATRIX) & set(found)
    planned = set(entry["products"]) & set(MATRIX)
    assert tensor_cores == planned, f"{name} multiplies in another way: {found}"
    programs, launch = entry["programs"], entry["launch"]
    assert programs * found["registers"] * 32 * launch["num_warps"] <= 65536, f"{name}: {programs} do not fit"
    assert programs * (found["shared"] + 1024) <= SHARED[launch["arch"]] * 1024, f"{name}: {programs} do not fit"


def fits(name, entry, found):
    """No stack forward, little and none of it in a main loop backward; and what fits_the_gpu() asks."""
    fits_the_gpu(name, entry, found)
    backward = any(what in name for what in ("ffn_bwd", "gemm dp", "sum_rows"))
    plan.keeps_to_registers(name, found, stack=128 if backward else 0)


test_compiles_as_planned, test_the_table_is_complete_and_as_planned = plan.tests_of(
    ENTRIES, ffn_table.measure, ffn_table.FILE, fits, QUICK, range(15, 26)
)


def test_a_stack_in_a_loop_is_seen():
    """Too few registers for the products."""
    entry = ENTRIES["sm_90 gemm x w^T 64x64x16 4 warps 2 stages ieee"]
    found = ffn_table.measure({**entry, "launch": {**entry["launch"], "max_registers": 64}})
    assert found["stack"] > 128 and found["stack in loops"] > 0


def test_every_launch_is_compiled():
    """What the pick_config functions return, of all shapes."""
    sizes = [2**k for k in range(0, 17)] + [3 * 2**k for k in range(0, 15)]
    for arch in ffn_table.ARCHS:
        capability = (arch // 10, arch % 10)
        for kind in ffn_table.KINDS:
            for aligned in (True, False):
                for M in sizes:
                    for N in sizes:
                        launches = {
                            "gemm dp^T x": _gemm.pick_split(M, N, 8192, kind, aligned, capability),
                            "gemm x w^T": _gemm.pick_config(M, N, kind, aligned, capability),
                            "ffn_fwd gelu full": ffn_fwd.pick_config(M, N, kind, False, aligned, capability),
                            "ffn_fwd gelu full gated": ffn_fwd.pick_config(M, N, kind, True, aligned, capability),
                            "ffn_bwd gelu full": ffn_bwd.pick_config(M, N, kind, False, aligned, capability),
                            "ffn_bwd gelu plain": ffn_bwd.pick_config(M, N, kind, True, aligned, capability),
                        }
                        for what, config in launches.items():
                            assert ffn_table.label(arch, what, config, kind, aligned) in ENTRIES
