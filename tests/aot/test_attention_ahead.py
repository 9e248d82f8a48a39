"""Gluon's attention kernels, compiled: their products run side by side, and the figures are the committed ones."""

from tests.aot import attention_ahead_table, plan

ENTRIES = attention_ahead_table.entries()
QUICK = [name for name in ENTRIES if name.endswith(("bf16 plain", "bf16 full"))]
REGISTERS, SHARED = 65536, 227 * 1024  # of a multiprocessor


def fits(name, entry, found):
    """Forward no byte of stack, and as many programs a multiprocessor as are planned; backward little, in no loop."""
    assert found["HGMMA"] > 0 and "products one by one" not in found, f"{name} multiplies one by one: {found}"
    assert not {"ATOM", "ATOMG", "RED"} & set(found), f"{name} is not deterministic: {found}"
    backward = "_bwd_" in name
    plan.keeps_to_registers(name, found, stack=128 if backward else 0)
    programs = REGISTERS // (found["registers"] * 32 * entry["num_warps"])
    if "x64 " in name and not backward:
        planned = 4 if name.endswith(("keep", "dropout")) else 3
        assert programs >= planned and planned * found["shared"] <= SHARED, f"{name} is too large: {found}"
    assert programs >= 1 and found["shared"] <= SHARED, f"{name} is too large: {found}"


test_compiles_as_planned, test_the_table_is_complete_and_as_planned = plan.tests_of(
    ENTRIES, attention_ahead_table.measure, attention_ahead_table.FILE, fits, QUICK, range(4, 20)
)


def test_every_launch_is_compiled():
    for width in range(33, 129):
        for call in attention_ahead_table.CALLS:
            config = attention_ahead_table.config_of(width, *call)
            words = f"sm_90 attention_fwd_ahead {attention_ahead_table.in_words(config)} {call[1]} {call[2]}"
            assert words in ENTRIES
        for kernel in attention_ahead_table.KERNELS:
            for call in attention_ahead_table.BACKWARD:
                assert attention_ahead_table.backward(kernel, width, *call)[0] in ENTRIES
        for call in attention_ahead_table.SUMS:
            found = attention_ahead_table.sums(width, *call)
            assert found is None or found[0] in ENTRIES
