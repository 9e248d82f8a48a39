"""The norms' kernels, compiled: nothing spills, and the figures are those of the committed table."""

import pytest

from tests.aot import plan, table

ENTRIES = table.entries()
QUICK = [name for name in ENTRIES if name.startswith("sm_90") and "unaligned" not in name and "bf16 full" in name]


def fits(name, found):
    """No byte of stack in any kernel, and registers for as many programs as the launch plans."""
    assert not {"ATOM", "ATOMG", "RED"} & set(found), f"{name} is not deterministic: {found}"
    if "layer_norm_bwd " in name and " 8 warps" in name and "unaligned" not in name:
        assert found["registers"] <= 128, f"{name}: two programs do not fit: {found}"
    if "2 stages" in name:
        assert found["LDGSTS"] > 0, f"{name} does not ask for the next rows ahead"
    plan.keeps_to_registers(name, found)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in ENTRIES])
def test_compiles_without_a_spill(name):
    found = table.measure(ENTRIES[name])
    with plan.held(name, found, table.FILE):
        fits(name, found)


def test_the_table_is_complete_and_nothing_in_it_spills():
    committed = table.load()["kernels"]
    assert set(committed) == set(ENTRIES) and len(QUICK) >= 15
    for name, found in committed.items():
        fits(name, found)


def test_every_launch_is_compiled():
    for width in range(1, 65537, 61):
        for dtype in ("bf16", "fp32"):
            for make in (table._forward, table._backward):
                launch, _ = make(width, dtype, "full", True, 90)
                assert f"sm_90 {launch} {dtype} full" in ENTRIES
