"""Gluon's kernels of the loss, compiled: all in registers, products side by side, and the committed figures."""

from tests.aot import linear_cross_entropy_ahead_table as table
from tests.aot import plan
from tests.aot.test_gemm_ahead import fits

ENTRIES = table.entries()
QUICK = [name for name in ENTRIES if name.endswith("bf16")]


def keeps_all(name, entry, found):
    """As the products, and no byte of stack backward either."""
    fits(name, entry, found)
    plan.keeps_to_registers(name, found)


test_compiles_as_planned, test_the_table_is_complete_and_as_planned = plan.tests_of(
    ENTRIES,
    table.measure,
    table.FILE,
    keeps_all,
    QUICK,
    range(3, 5),
)
