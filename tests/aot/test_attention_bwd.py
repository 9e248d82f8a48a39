"""Attention's backward kernels, compiled: matrix units, little stack, none of it in a main loop, committed figures."""

import pytest
import triton

from tests.aot import attention_bwd_table, table
from tests.aot.test_attention import uses_the_gpu

ENTRIES = attention_bwd_table.entries()
QUICK = [name for name in ENTRIES if name.startswith("sm_90") and "x64 " in name and name.endswith("bf16 plain")]


def fits(name, found):
    """Little stack, and none of it in a main loop."""
    assert found["stack"] <= 128 and found["local"] == 0, f"{name} spills: {found}"
    assert (found["stack in loops"] if found["stack"] else 0) == 0, f"{name} spills in its main loop: {found}"
    uses_the_gpu(name, found)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in ENTRIES])
def test_compiles_as_planned(name):
    found = attention_bwd_table.measure(ENTRIES[name])
    fits(name, found)
    committed = table.load(attention_bwd_table.FILE)
    if committed["triton"] == triton.__version__:
        assert found == committed["kernels"][name], "run `python -m tests.aot.attention_bwd_table`"


def test_the_table_is_complete():
    committed = table.load(attention_bwd_table.FILE)["kernels"]
    assert set(committed) == set(ENTRIES) and len(QUICK) >= 2
    for name, found in committed.items():
        fits(name, found)
