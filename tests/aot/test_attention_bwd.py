"""Attention's backward kernels, compiled: at most 128 bytes of stack, matrix units used, the committed figures."""

import pytest
import triton

from tests.aot import attention_bwd_table, table
from tests.aot.test_attention import SHARED

ENTRIES = attention_bwd_table.entries()
QUICK = [name for name in ENTRIES if name.startswith("sm_90") and "x64 " in name and name.endswith("bf16 plain")]


def fits(name, found):
    """Little stack, no atomics, and what the architecture has."""
    assert found["stack"] <= 128 and found["local"] == 0, f"{name} spills: {found}"
    assert not {"ATOM", "ATOMG", "RED"} & set(found), f"{name} is not deterministic: {found}"
    assert found["shared"] <= SHARED[name.split()[0]], f"{name} does not fit: {found}"
    if "fp32" in name:
        assert "HMMA" not in found and "HGMMA" not in found, f"{name} does not multiply in IEEE float32: {found}"
    elif name.startswith("sm_90"):
        assert found["HGMMA"] > 0, f"{name} leaves the matrix units alone: {found}"
    elif name.startswith("sm_80"):
        assert found["HMMA"] > 0, f"{name} leaves the matrix units alone: {found}"


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in ENTRIES])
def test_compiles_as_planned(name):
    found = table.measure(ENTRIES[name])
    fits(name, found)
    committed = table.load(attention_bwd_table.FILE)
    if committed["triton"] == triton.__version__:
        assert found == committed["kernels"][name], "run `python -m tests.aot.attention_bwd_table`"


def test_the_table_is_complete():
    committed = table.load(attention_bwd_table.FILE)["kernels"]
    assert set(committed) == set(ENTRIES) and len(QUICK) >= 2
    for name, found in committed.items():
        fits(name, found)
