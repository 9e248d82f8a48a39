"""Random numbers of dropout: a thread draws its share of a tile's, and no number is drawn twice."""

import pytest

from tests.aot import attention_bwd_table, attention_table
from tests.aot.sass import MATRIX, compile_kernel, draws

ENTRIES = {
    name: entry
    for name, entry in {**attention_table.entries(), **attention_bwd_table.entries()}.items()
    if "seed_ptr" in entry["types"] and "bf16" in name
}
QUICK = [
    name for name in ENTRIES
    if "x64 " in name and (
        name.startswith(("sm_80 attention_fwd 128", "sm_80 attention_bwd_keys")) and name.endswith("keep dropout")
        or name.startswith("sm_90 attention_bwd_keys") and name.endswith("bias dropout")
    )
]  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in ENTRIES])
def test_are_drawn_once(name):
    """Philox: ten rounds of two products for four numbers; a few more products are for what is read where.

    Of these a gradient of a bias has more, for its loop goes over sequences and heads.
    """
    entry = ENTRIES[name]
    sides = entry["constexprs"]["BLOCK_M"] * entry["constexprs"]["BLOCK_N"]
    blocks = max(1, sides // 4 // (32 * entry["num_warps"]))
    found = draws(compile_kernel(**entry), MATRIX)
    more = 70 if "attention_bwd_bias" in name else 24
    assert found and max(found) <= 20 * blocks + more, (name, found, blocks)


def test_entries():
    assert len(QUICK) == 3 and len(ENTRIES) > 100
