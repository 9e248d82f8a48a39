"""Attention's backward kernels, compiled: matrix units, little stack, none of it in a main loop, committed figures."""

import pytest

from tests.aot import attention_bwd_table, plan, table
from tests.aot.test_attention import uses_the_gpu

ENTRIES = attention_bwd_table.entries()
QUICK = [name for name in ENTRIES if name.startswith("sm_90") and "x64 " in name and name.endswith("bf16 plain")]


def fits(name, found):
    """Little stack, and none of it in a main loop."""
    uses_the_gpu(name, found)
    plan.keeps_to_registers(name, found, stack=128)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in ENTRIES])
def test_compiles_as_planned(name):
    found = attention_bwd_table.measure(ENTRIES[name])
    with plan.held(name, found, attention_bwd_table.FILE):
        fits(name, found)


def test_the_table_is_complete():
    committed = table.load(attention_bwd_table.FILE)["kernels"]
    assert set(committed) == set(ENTRIES) and len(QUICK) >= 2
    for name, found in committed.items():
        fits(name, found)
