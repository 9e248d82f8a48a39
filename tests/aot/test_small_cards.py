"""Triton's kernels on cards whose blocks have 99 KiB of shared memory: every launch fits into it."""

import pytest

from tests.aot import (
    attention_bwd_table,
    attention_table,
    ffn_table,
    int8_ffn_table,
    int8_linear_table,
    linear_cross_entropy_table,
    rotary_table,
    table,
)
from tests.aot.sass import compile_kernel
from tfm_kernels.triton import _launch

ARCHS = (86, 120)  # 8.9 is built as 8.6
SHARED = 99 * 1024


def attention(archs):
    """Both directions, and once more with a float32 bias, which takes twice the room of a bfloat16 one."""
    every = {**attention_table.entries(archs), **attention_bwd_table.entries(archs)}
    for name, entry in list(every.items()):
        if entry["types"].get("bias_ptr") == "*bf16":
            every[f"{name} float32 bias"] = {**entry, "types": {**entry["types"], "bias_ptr": "*fp32"}}
    return every


ENTRIES = {
    **attention(ARCHS),
    **table.entries(ARCHS),
    **rotary_table.entries(ARCHS),
    **{
        name: entry["launch"]
        for products in (ffn_table, linear_cross_entropy_table, int8_linear_table, int8_ffn_table)
        for name, entry in products.entries(ARCHS).items()
    },
}
# those that take most, and one that did not fit when it was launched as on larger cards
QUICK = [
    name for name in ENTRIES
    if (name.startswith("sm_86 attention_bwd") and "x128 " in name and name.endswith("bf16 full float32 bias"))
    or (name.startswith("sm_120 attention_fwd 128") and "x64 8 warps" in name and name.endswith("bf16 full"))
]  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in ENTRIES])
def test_fits_into_shared_memory(name):
    found = compile_kernel(**ENTRIES[name]).metadata.shared
    assert found <= SHARED, f"{name} asks for {found} bytes of {SHARED}"


def test_which_cards_are_small():
    assert len(QUICK) == 5, QUICK
    assert [_launch.small_shared((arch // 10, arch % 10)) for arch in (80, 86, 89, 90, 100, 120)] == [
        False, True, True, False, False, True
    ]  # fmt: skip
