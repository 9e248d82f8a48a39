"""linear_cross_entropy's kernels, compiled: nothing spills, and the figures are those of the committed table."""

from tests.aot import linear_cross_entropy_table, plan
from tests.aot.test_ffn import fits_the_gpu
from tfm_kernels.triton import _gemm, linear_cross_entropy_bwd, linear_cross_entropy_fwd

ENTRIES = linear_cross_entropy_table.entries()
QUICK = [name for name in ENTRIES if name.startswith("sm_90") and (" half" in name or " warps" not in name)]


def fits(name, entry, found):
    """No stack, tensor cores where planned, registers and memory for the programs planned."""
    fits_the_gpu(name, entry, found)
    if "unaligned" not in name and " warps" in name:
        assert found["LDGSTS"] > 0, f"{name} asks for nothing ahead"
    plan.keeps_to_registers(name, found)


test_compiles_as_planned, test_the_table_is_complete_and_as_planned = plan.tests_of(
    ENTRIES, linear_cross_entropy_table.measure, linear_cross_entropy_table.FILE, fits, QUICK, range(15, 26)
)


def test_every_launch_is_compiled():
    """What the pick_config functions return, of all shapes."""
    sizes = [2**k for k in range(0, 18)] + [3 * 2**k for k in range(0, 15)]
    for arch in linear_cross_entropy_table.ARCHS:
        capability = (arch // 10, arch % 10)
        for kind in linear_cross_entropy_table.KINDS:
            for aligned in (True, False):
                for M in sizes:
                    for V in sizes:
                        given = kind, aligned, capability
                        launches = {
                            "linear_cross_entropy_fwd full": linear_cross_entropy_fwd.pick_config(M, V, *given),
                            "linear_cross_entropy_bwd plain": linear_cross_entropy_bwd.pick_config(M, V, *given),
                            "gemm dx += dz w": _gemm.pick_split(M, 1024, V, *given),
                            "gemm dz^T x": _gemm.pick_split(V, 1024, M, *given),
                        }
                        for what, config in launches.items():
                            assert linear_cross_entropy_table.label(arch, what, config, kind, aligned) in ENTRIES
