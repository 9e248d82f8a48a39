"""Attention's backward kernels, compiled: matrix units, little stack, none of it in a main loop, committed figures."""

from tests.aot import attention_bwd_table, plan
from tests.aot.test_attention import uses_the_gpu

ENTRIES = attention_bwd_table.entries()
QUICK = [
    name for name in ENTRIES
    if name.startswith("sm_90") and "x64 " in name and name.endswith(("bf16 plain", "bf16 bias dropout"))
]  # fmt: skip


# The launches and kinds of dk and dv that keep more than 128 bytes, or touch any in a loop -> (bytes, how often).
# On sm_80 each thread computes the random numbers of many (bench/GPU_PENDING.md); on sm_90 the loop is that at an edge.
MORE = {
    "sm_80 attention_bwd_keys 16x128x64 8 warps 2 stages bf16 keep dropout": (144, 12),
    "sm_90 attention_bwd_keys 16x128x128 8 warps 2 stages bf16 bias": (128, 10),
}


def fits(name, entry, found):
    """Little stack, and none of it in a main loop, but for MORE."""
    uses_the_gpu(name, found)
    plan.keeps_to_registers(name, found, *MORE.get(name, (128, 0)))


test_compiles_as_planned, test_the_table_is_complete_and_as_planned = plan.tests_of(
    ENTRIES, attention_bwd_table.measure, attention_bwd_table.FILE, fits, QUICK, range(2, 100)
)
