"""The attention kernels, compiled: nothing spills, matrix units are used, the figures are the committed ones."""

import pytest

from tests.aot import attention_table, plan

ENTRIES = attention_table.entries()
QUICK = [
    name for name in ENTRIES
    if name.startswith("sm_90") and ("x64 " in name or "x128 " in name)
    and name.endswith(("bf16 plain", "bf16 full", "bf16 bias dropout")) or name == "sm_90 attention_fwd_merge x128"
]  # fmt: skip
SHARED = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024}


def fits(name, entry, found):
    """No byte of stack, in any kind of call."""
    uses_the_gpu(name, found)
    plan.keeps_to_registers(name, found)


def uses_the_gpu(name, found):
    """No atomics, the matrix units where they can multiply, and no more shared memory than there is."""
    assert not {"ATOM", "ATOMG", "RED"} & set(found), f"{name} is not deterministic: {found}"
    assert found["shared"] <= SHARED[name.split()[0]], f"{name} does not fit: {found}"
    if "fp32" in name or "keep_tiles" in name or "merge" in name:
        assert "HMMA" not in found and "HGMMA" not in found, f"{name} does not multiply in IEEE float32: {found}"
    elif name.startswith("sm_90"):
        sides = map(int, name.split()[2].split("x")[:2])
        large = "few" not in name and max(sides) >= 64  # a warp group multiplies 64 rows
        assert found["HGMMA" if large else "HMMA"] > 0, f"{name} leaves the matrix units alone: {found}"
    elif name.startswith("sm_80"):
        assert found["HMMA"] > 0, f"{name} leaves the matrix units alone: {found}"


test_compiles_as_planned, test_the_table_is_complete_and_as_planned = plan.tests_of(
    ENTRIES, attention_table.measure, attention_table.FILE, fits, QUICK, range(6, 100)
)


@pytest.mark.parametrize("arch", attention_table.ARCHS)
def test_every_launch_is_compiled(arch):
    for width in range(1, 257):
        for queries in (1, 64, 65, 5000):
            for dtype, kinds in attention_table.KINDS.items():
                for kind, aligned in kinds:
                    if aligned and width % 8:
                        continue
                    launch, _ = attention_table.forward(width, queries, dtype, kind, aligned, arch)
                    assert f"sm_{arch} {launch} {attention_table.words(dtype, kind, aligned)}" in ENTRIES
        for rows in (1, 16, 17, 500):
            for dtype, kinds in attention_table.KINDS.items():
                for kind, aligned in kinds:
                    launch, _ = attention_table.few(width, rows, dtype, kind, aligned, arch)
                    assert f"sm_{arch} {launch} {attention_table.words(dtype, kind, aligned)}" in ENTRIES
        assert f"sm_{arch} {attention_table.merge(width, arch)[0]}" in ENTRIES
