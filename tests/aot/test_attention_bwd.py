"""Attention's backward kernels, compiled: matrix units, little stack, none of it in a main loop, committed figures."""

from tests.aot import attention_bwd_table, plan
from tests.aot.test_attention import uses_the_gpu

ENTRIES = attention_bwd_table.entries()
QUICK = [
    name for name in ENTRIES
    if name.startswith("sm_90") and "x64 " in name and name.endswith(("bf16 plain", "bf16 bias dropout"))
]  # fmt: skip


def fits(name, entry, found):
    """Little stack, and none of it in a main loop."""
    uses_the_gpu(name, found)
    plan.keeps_to_registers(name, found, stack=128)


test_compiles_as_planned, test_the_table_is_complete_and_as_planned = plan.tests_of(
    ENTRIES, attention_bwd_table.measure, attention_bwd_table.FILE, fits, QUICK, range(2, 100)
)
