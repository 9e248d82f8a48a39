"""Attention's backward kernels, compiled: matrix units, little stack, none of it in a main loop, committed figures."""

from tests.aot import attention_bwd_table, plan
from tests.aot.test_attention import uses_the_gpu

ENTRIES = attention_bwd_table.entries()
QUICK = [
    name for name in ENTRIES
    if name.startswith("sm_90") and "x64 " in name and name.endswith(("bf16 plain", "bf16 bias dropout"))
]  # fmt: skip


# dk and dv take half of a thread's registers, and tiles that left it more would take 1.1 to 1.6 times the instructions
# (128 keys on 8 warps took half of the time of 64 on an H200): the launches and kinds that keep more than 128 bytes, or
# touch any in a loop -> (bytes of stack, how often). On sm_90 that loop is one at an edge, or that of results that are
# not finite.
MORE = {
    "sm_80 attention_bwd_keys 16x128x64 8 warps 2 stages bf16 bias dropout": (176, 0),
    "sm_80 attention_bwd_keys 16x128x64 8 warps 2 stages bf16 keep dropout": (200, 44),
    "sm_80 attention_bwd_keys 16x64x128 8 warps 2 stages bf16 bias dropout": (176, 0),
    "sm_80 attention_bwd_keys 16x64x128 8 warps 2 stages bf16 keep dropout": (144, 18),
    "sm_80 attention_bwd_keys 16x64x256 8 warps 2 stages bf16 bias dropout": (176, 0),
    "sm_90 attention_bwd_keys 32x64x64 4 warps 2 stages bf16 dropout": (144, 0),
    "sm_90 attention_bwd_keys 32x64x64 4 warps 2 stages bf16 bias dropout": (216, 0),
    "sm_90 attention_bwd_keys 16x128x128 8 warps 2 stages bf16 dropout": (208, 4),
    "sm_90 attention_bwd_keys 16x128x128 8 warps 2 stages bf16 bias": (136, 14),
    "sm_90 attention_bwd_keys 16x128x128 8 warps 2 stages bf16 bias dropout": (240, 3),
    "sm_90 attention_bwd_keys 16x128x128 8 warps 2 stages bf16 keep dropout": (144, 0),
    "sm_90 attention_bwd_keys 16x128x256 8 warps 2 stages bf16 dropout": (168, 0),
    "sm_90 attention_bwd_keys 16x128x256 8 warps 2 stages bf16 bias dropout": (272, 2),
    "sm_100 attention_bwd_keys 16x128x64 8 warps 2 stages bf16 bias dropout": (192, 0),
}


def fits(name, entry, found):
    """Little stack, and none of it in a main loop, but for MORE."""
    uses_the_gpu(name, found)
    plan.keeps_to_registers(name, found, *MORE.get(name, (128, 0)))


test_compiles_as_planned, test_the_table_is_complete_and_as_planned = plan.tests_of(
    ENTRIES, attention_bwd_table.measure, attention_bwd_table.FILE, fits, QUICK, range(2, 100)
)
