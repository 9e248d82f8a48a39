"""What the backward kernels of attention need of a GPU: every launch of pick_config, compiled for three of them.

python -m tests.aot.attention_bwd_table    writes tests/aot/attention_bwd.json anew (minutes)
"""

from pathlib import Path

from tests.aot import table
from tests.aot.attention_table import (
    ABSENT,
    ARCHS,
    DTYPES,
    PAIRS,
    WIDTHS,
    behind_a_branch,
    extras,
    measure,
    types,
    words,
)
from tfm_kernels.triton import attention_bwd

FILE = Path(__file__).with_name("attention_bwd.json")
KERNELS = {
    "rows": attention_bwd.attention_bwd_rows_kernel,
    "keys": attention_bwd.attention_bwd_keys_kernel,
    "queries": attention_bwd.attention_bwd_queries_kernel,
    "bias": attention_bwd.attention_bwd_bias_kernel,
}


def calls(arch):
    """(kernel, width, storage type, kind, whether all rows are aligned) of every compilation worth a line."""
    for width in (64, 128, 256):
        for kernel in ("keys", "queries"):
            for kind in ("plain", "dropout", *PAIRS):
                yield kernel, width, "bf16", kind, True
            yield kernel, width, "bf16", "full", False
        yield "rows", width, "bf16", "full", True
        for kind in ("bias", "bias dropout", "full"):
            yield "bias", width, "bf16", kind, True
    if arch == 90:
        for width in (64, 128, 256):
            for kernel in ("keys", "queries", "bias"):
                yield kernel, width, "bf16", "bias", False
        for width in (16, 32):
            for kernel in ("keys", "queries"):
                yield kernel, width, "bf16", "plain", True
            yield "bias", width, "bf16", "full", False
        for kernel in KERNELS:
            for width in WIDTHS[2:]:
                yield kernel, width, "fp32", "full", False


def entries(archs=ARCHS):
    """Name -> what to compile."""
    found = {}
    for arch in archs:
        for call in calls(arch):
            name, entry = backward(*call, arch)
            found[f"sm_{arch} {name} {words(*call[2:])}"] = entry
    return found


def backward(name, width, dtype, kind, aligned, arch):
    """(launch in words, what to compile)."""
    kernel = KERNELS[name]
    capability = (arch // 10, arch % 10)
    config = attention_bwd.pick_config(name, width, extras(kind, aligned), DTYPES[dtype], capability)
    part = attention_bwd.PARTS[config.block_d == 256][0]
    rows = config.block_n if name == "keys" else config.block_m
    constexprs = {
        **config.arguments(), "OUT_ALIGNED": aligned, "PAIRS_ALIGNED": aligned and kind in PAIRS,
        "PRECISION": "ieee", "PART": part, "PER_ROW": True, "PER_COLUMN": True,
        "SHIELDED": behind_a_branch(kind, dtype, rows, capability),
    }  # fmt: skip
    names = [parameter.name for parameter in kernel.params]
    absent = (*ABSENT[kind], *(() if kind == "full" else ("dbias_ptr", "dlse_ptr")))
    launch = f"{config.block_m}x{config.block_n}x{config.block_d} {config.num_warps} warps {config.num_stages} stages"
    return f"attention_bwd_{name} {launch}", {
        "kernel": kernel, "types": types(kernel, dtype, absent), "arch": arch, "num_warps": config.num_warps,
        "constexprs": {name: value for name, value in constexprs.items() if name in names},
        "max_registers": config.max_registers,
    }  # fmt: skip


if __name__ == "__main__":
    table.write(FILE, entries(), measure)
