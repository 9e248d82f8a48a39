"""The norms' kernels, compiled: nothing spills, and the figures are those of the committed table."""

from tests.aot import plan, table

ENTRIES = table.entries()
QUICK = [name for name in ENTRIES if name.startswith("sm_90") and "unaligned" not in name and "bf16 full" in name]


def fits(name, entry, found):
    """No byte of stack, and registers for as many programs as the launch plans.

    Two rows ahead some keep a few bytes; an H200 took 0.8 of the time of one row ahead with none.
    """
    assert not {"ATOM", "ATOMG", "RED"} & set(found), f"{name} is not deterministic: {found}"
    if ("layer_norm_bwd " in name or "columns" in name) and "unaligned" not in name:
        limit = 168 if "layer_norm_bwd " in name and " 4 warps" in name else 128
        assert found["registers"] <= limit, f"{name}: the programs planned do not fit: {found}"
    ahead = "3 stages" in name
    if ahead or "2 stages" in name:
        assert found["LDGSTS"] > 0, f"{name} does not ask for the next rows ahead"
    if not (ahead and found["stack"] <= 40 and not found["local"]):
        plan.keeps_to_registers(name, found)


test_compiles_as_planned, test_the_table_is_complete_and_as_planned = plan.tests_of(
    ENTRIES, table.measure, table.FILE, fits, QUICK, range(15, 100)
)


def test_every_launch_is_compiled():
    for width in range(1, 65537, 61):
        for dtype in ("bf16", "fp32"):
            for make in (table._forward, table._backward, table._columns):
                launch, _ = make(width, dtype, "full", True, 90)
                assert f"sm_90 {launch} {dtype} full" in ENTRIES
