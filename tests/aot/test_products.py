"""Products of warp groups run side by side: the assembler of sm_90 waits for none that Triton has begun with others."""

import json
from pathlib import Path

import pytest

from tests.aot.sass import _one_by_one

TABLES = sorted(Path(__file__).parent.glob("*.json"))
GROUP = "wgmma.mma_async.sync\n" * 4 + "wgmma.commit_group.sync.aligned;\n"
BY_ONE = "/*0010*/ HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR8], R24, gsb0 ;\n"
TOGETHER = BY_ONE.replace(", gsb0", "")


@pytest.mark.parametrize("table", TABLES, ids=lambda path: path.stem)
def test_no_launch_waits_for_each(table):
    kernels = json.loads(table.read_text())["kernels"]
    assert kernels and not [name for name, figures in kernels.items() if "products one by one" in figures]


def test_how_they_are_known():
    assert _one_by_one(GROUP, 4 * BY_ONE)
    assert not _one_by_one(GROUP, 3 * TOGETHER + BY_ONE)
    assert not _one_by_one(GROUP.replace("wgmma.mma_async.sync\n", "", 3), BY_ONE)  # a group of one
    assert not _one_by_one("mma.sync", "/*0010*/ HMMA.16816.F32.BF16 R24, R4, R8, R24 ;\n")
