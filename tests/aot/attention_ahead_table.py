"""What Gluon's attention kernels need of a GPU of compute capability 9: every launch that a pick_config can return.

python -m tests.aot.attention_ahead_table    writes tests/aot/attention_ahead.json anew (a minute)
"""

from pathlib import Path

from tests.aot import table
from tests.aot.attention_table import ABSENT, DTYPES, extras, in_words, types
from tests.aot.sass import compile_kernel, figures
from tfm_kernels.triton import _attention_bwd_ahead, _attention_fwd_ahead

FILE = Path(__file__).with_name("attention_ahead.json")
WIDTHS = (64, 128)
# (queries, storage type, kind)
CALLS = (
    (65, "bf16", "plain"), (64, "bf16", "plain"), (65, "fp16", "plain"), (65, "bf16", "dropout"), (65, "bf16", "bias"),
    (65, "bf16", "keep"), (65, "bf16", "full"), (65, "fp16", "full"),
)  # fmt: skip


KERNELS = {
    "keys": _attention_bwd_ahead.attention_bwd_ahead_keys_kernel,
    "queries": _attention_bwd_ahead.attention_bwd_ahead_queries_kernel,
}
# (keys or queries, storage type, kind, whether bits of dropout are written or read)
BACKWARD = (
    (65, "bf16", "plain", False), (64, "bf16", "plain", False), (65, "fp16", "plain", False),
    (65, "bf16", "dropout", False), (64, "bf16", "dropout", False), (65, "bf16", "dropout", True),
    (64, "bf16", "dropout", True), (65, "fp16", "dropout", True),
)  # fmt: skip


def config_of(width, queries, dtype, kind):
    """The launch."""
    biased = kind in ("bias", "full")
    return _attention_fwd_ahead.pick_config(width, queries, extras(kind, True), biased, DTYPES[dtype], (9, 0))


def entries():
    """Name -> what to compile."""
    found, kernel = {}, _attention_fwd_ahead.attention_fwd_ahead_kernel
    for width in WIDTHS:
        for queries, dtype, kind in CALLS:
            config = config_of(width, queries, dtype, kind)
            constexprs = {
                "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_D": config.block_d, "OUT_ALIGNED": True,
                "WARPS": config.num_warps,
            }  # fmt: skip
            found[f"sm_90 attention_fwd_ahead {in_words(config)} {dtype} {kind}"] = {
                "kernel": kernel, "types": types(kernel, dtype, ABSENT[kind]), "constexprs": constexprs, "arch": 90,
                "num_warps": config.num_warps, "max_registers": config.max_registers,
            }  # fmt: skip
        for name, call in ((name, call) for name in KERNELS for call in BACKWARD):
            words, entry = backward(name, width, *call)
            found[words] = entry
    return found


def backward(name, width, length, dtype, kind, bits):
    """(its name, what to compile)."""
    reads = bits and name == "keys"
    config = _attention_bwd_ahead.pick_config(
        name, width, length, kind == "dropout" and not reads, DTYPES[dtype], (9, 0)
    )
    constexprs = {
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_D": config.block_d, "OUT_ALIGNED": True,
        "WARPS": config.num_warps, "HELD": _attention_bwd_ahead.held(name, config),
    }  # fmt: skip
    absent = (*ABSENT[kind], *(() if bits else ("bits_ptr",)), *(("seed_ptr",) if reads else ()))
    words = f"{kind} bits" if bits else kind
    return f"sm_90 attention_bwd_ahead_{name} {in_words(config)} {dtype} {words}", {
        "kernel": KERNELS[name], "types": types(KERNELS[name], dtype, absent), "constexprs": constexprs,
        "arch": 90, "num_warps": config.num_warps, "max_registers": config.max_registers,
    }  # fmt: skip


def measure(entry):
    """The figures of one entry; of a kernel with a stack also how often the loops that multiply touch it."""
    return figures(compile_kernel(**entry), ("HGMMA",))


if __name__ == "__main__":
    table.write(FILE, entries(), measure)
