"""Gluon's products, compiled: all in registers, products side by side, and the figures are the committed ones."""

from tests.aot import gemm_ahead_table, plan
from tfm_kernels.triton import _gemm_ahead

ENTRIES = gemm_ahead_table.entries()
QUICK = [name for name in ENTRIES if name.endswith("bf16") and ("gemm" in name or " gelu full" in name)]
REGISTERS, SHARED = 65536, 227 * 1024  # of a multiprocessor
GROUPS = 3


def fits(name, entry, found):
    """No byte of stack forward, one program a multiprocessor, and 24 copies of 16 bytes a step."""
    assert found["HGMMA"] == 2 * 4 and "products one by one" not in found, f"{name} multiplies one by one: {found}"
    assert not {"ATOM", "ATOMG", "RED"} & set(found), f"{name} is not deterministic: {found}"
    assert found["LDGSTS"] in (24, 48), f"{name} copies in small pieces: {found}"
    plan.keeps_to_registers(name, found, stack=128 if "_bwd_" in name else 0)
    assert found["registers"] * 32 * entry["num_warps"] * GROUPS <= REGISTERS and found["shared"] <= SHARED, name


test_compiles_as_planned, test_the_table_is_complete_and_as_planned = plan.tests_of(
    ENTRIES, gemm_ahead_table.measure, gemm_ahead_table.FILE, fits, QUICK, range(4, 13)
)


def test_registers_are_those_of_a_multiprocessor():
    """Two groups that multiply and one that copies."""
    threads, multiplying = 32 * _gemm_ahead.WARPS.value, _gemm_ahead.MULTIPLYING.value
    assert threads * (2 * multiplying + _gemm_ahead.COPYING.value) == REGISTERS
