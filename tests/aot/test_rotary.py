"""rotary's kernel, compiled: nothing spills, 16 bytes a load and a store, and the figures are the committed table's."""

from tests.aot import plan, rotary_table
from tfm_kernels.triton import _rotary

ENTRIES = rotary_table.entries()
QUICK = [name for name in ENTRIES if name.startswith("sm_90") and "x128 " in name and " bf16 by bf16" in name]


def fits(name, entry, found):
    """No byte of stack, no atomics; of aligned rows every load and store takes 16 bytes, past shared memory."""
    assert not {"ATOM", "ATOMG", "RED", "LDGSTS"} & set(found), f"{name}: {found}"
    if "unaligned" not in name:
        assert found["LDG.128"] == found["LDG"] and found["STG.128"] == found["STG"], f"{name} is not wide: {found}"
        assert found["shared"] == 0, f"{name} passes data from thread to thread: {found}"
        if "fp32 interleaved" not in name:  # those hold both features of 8 pairs in 32 bits
            assert found["registers"] <= 80, f"{name}: six programs do not fit: {found}"
    plan.keeps_to_registers(name, found)


test_compiles_as_planned, test_the_table_is_complete_and_as_planned = plan.tests_of(
    ENTRIES, rotary_table.measure, rotary_table.FILE, fits, QUICK, range(8, 9)
)


def test_every_launch_is_compiled():
    every, compiled = (
        {_rotary.pick_config(width, aligned) for width in widths for aligned in (True, False)}
        for widths in (range(1, 2000), rotary_table.WIDTHS)
    )
    assert every == compiled and len(every) == _rotary.MAX_COMPILATIONS
