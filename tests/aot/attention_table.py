"""What the attention kernels need of a GPU: every launch that pick_config can return, compiled for three of them.

python -m tests.aot.attention_table    writes tests/aot/attention.json anew (minutes)
"""

from pathlib import Path

import torch

from tests.aot import table
from tests.aot.sass import FUSED, MATRIX, compile_kernel, figures
from tfm_kernels.triton import _attention_fwd_few, _attention_tiles, attention_fwd
from tfm_kernels.triton._attention_call import shielded

FILE = Path(__file__).with_name("attention.json")
ARCHS = (80, 90, 100)
WIDTHS = (16, 32, 64, 128, 256)  # one for each tile
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PAIRS = ("bias", "keep", "bias dropout", "keep dropout", "full")  # kinds that read something of each pair
EXTRAS = {"plain": "none", "dropout": "aligned", **dict.fromkeys(PAIRS, "aligned")}
# all that a call of this kind leaves out
_PAIRS = ("bias_ptr", "keep_ptr", "counts_ptr", "tiles_ptr")
_KEEP, _ENDS = _PAIRS[1:], ("cu_q_ptr", "cu_k_ptr")
ABSENT = {
    "plain": (*_PAIRS, "seed_ptr", "lengths_ptr"),  # packed, as are most calls without a mask
    "dropout": (*_PAIRS, *_ENDS),
    "bias": (*_KEEP, *_ENDS, "seed_ptr", "lengths_ptr"),
    "keep": ("bias_ptr", *_ENDS, "seed_ptr", "lengths_ptr"),
    "bias dropout": (*_KEEP, *_ENDS, "lengths_ptr"),
    "keep dropout": ("bias_ptr", *_ENDS, "lengths_ptr"),
    "full": _ENDS,
}
INT32 = (
    "B", "H", "G", "Tq", "Tk", "D", "DV", "OUT_D", "DQ_D", "DK_D", "DV_D", "SHARING_B", "SHARING_H", "SPLITS",
    "PARTS", "PART_TILES", "last_dropped", "bits_stride",
)  # fmt: skip
FLOAT32 = ("scale", "step", "unit", "keep_scale", "unscale")
POINTERS = {
    "keep_ptr": "*u8", "counts_ptr": "*i32", "tiles_ptr": "*i32", "lengths_ptr": "*i64", "cu_q_ptr": "*i32",
    "cu_k_ptr": "*i32", "seed_ptr": "*i64", "lse_ptr": "*fp32", "dlse_ptr": "*fp32", "statistics_ptr": "*fp32",
    "sums_ptr": "*fp32", "bits_ptr": "*i32", "parts_ptr": "*fp32", "numbers_ptr": "*fp32",
}  # fmt: skip


KINDS = {"bf16": (("plain", True), ("full", True), ("full", False)), "fp32": (("plain", True), ("full", False))}


def calls(arch):
    """(width, queries, storage type, kind, whether all rows are aligned) of every compilation worth a line."""
    for dtype, kinds in KINDS.items():
        for width in WIDTHS:
            for kind, aligned in kinds:
                for queries in (64, 65) if dtype == "bf16" else (65,):
                    yield width, queries, dtype, kind, aligned
    for width in (64, 128, 256):
        for kind in ("dropout", "bias", "keep", "bias dropout", "keep dropout"):
            yield width, 65, "bf16", kind, True
        if arch == 90:
            yield width, 65, "bf16", "plain", False
            yield width, 65, "fp16", "plain", True


def entries(archs=ARCHS):
    """Name -> what to compile, for every kernel, launch, storage type, kind of call and architecture."""
    found = {}
    for arch in archs:
        for call in calls(arch):
            name, entry = forward(*call, arch)
            found[f"sm_{arch} {name} {words(*call[2:])}"] = entry
        for call in few_calls():
            name, entry = few(*call, arch)
            found[f"sm_{arch} {name} {words(*call[2:])}"] = entry
        for width in WIDTHS:
            name, entry = merge(width, arch)
            found[f"sm_{arch} {name}"] = entry
        found[f"sm_{arch} keep_tiles"] = _lists(arch, False)
        found[f"sm_{arch} keep_tiles of keys"] = _lists(arch, True)
    return found


def measure(entry):
    """The figures of one entry; of a kernel with a stack also how often the loops that multiply touch it."""
    return figures(compile_kernel(**entry), FUSED if entry["types"].get("q_ptr") == "*fp32" else MATRIX)


def few_calls():
    """(width, rows of a group, storage type, kind, whether all rows are aligned) of the calls with few queries."""
    for width in WIDTHS:
        for rows in (16, 32):
            for dtype, kinds in KINDS.items():
                for kind, aligned in kinds:
                    yield width, rows, dtype, kind, aligned


def words(dtype, kind, aligned):
    """The end of an entry's name."""
    return f"{dtype} {kind}{'' if aligned else ' unaligned'}"


def types(kernel, dtype, absent):
    """Argument -> Triton's type, without what is absent."""
    found = {}
    for parameter in kernel.params:
        name = parameter.name
        if name in absent or parameter.is_constexpr:
            continue
        if name.endswith("_ptr"):
            found[name] = POINTERS.get(name, f"*{dtype}")
        else:
            found[name] = "i32" if name in INT32 else "fp32" if name in FLOAT32 else "i64"
    return found


def extras(kind, aligned):
    """As Call.extras() says it."""
    return "unaligned" if kind in PAIRS and not aligned else EXTRAS[kind]


def behind_a_branch(kind, dtype, rows, capability):
    """As Call.shielded() says it."""
    return kind in ("keep dropout", "full") and shielded(DTYPES[dtype], "ieee", rows, capability)


def forward(width, queries, dtype, kind, aligned, arch):
    """(launch in words, what to compile)."""
    kernel = attention_fwd.attention_fwd_kernel
    dim = width if aligned else width - 1
    config = attention_fwd.pick_config(dim, queries, extras(kind, aligned), DTYPES[dtype], (arch // 10, arch % 10))
    constexprs = {
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_D": config.block_d, "OUT_ALIGNED": aligned,
        "PAIRS_ALIGNED": aligned and kind in PAIRS, "PRECISION": "ieee", "CHUNK": config.chunk,
        "SHIELDED": behind_a_branch(kind, dtype, config.block_m, (arch // 10, arch % 10)),
        "STAGES": config.num_stages,
    }  # fmt: skip
    return f"attention_fwd {in_words(config)}", {
        "kernel": kernel, "types": types(kernel, dtype, ABSENT[kind]), "constexprs": constexprs, "arch": arch,
        "num_warps": config.num_warps, "max_registers": config.max_registers,
    }  # fmt: skip


def few(width, rows, dtype, kind, aligned, arch):
    """(launch in words, what to compile); aligned calls in parts, others in one."""
    shape = (width, rows, 1, 9999, 9999, 1)
    config = _attention_fwd_few.pick_config(*shape, extras(kind, aligned), DTYPES[dtype], (arch // 10, arch % 10))
    constexprs = {
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_D": config.block_d, "OUT_ALIGNED": aligned,
        "PRECISION": "ieee", "CHUNK": config.chunk, "STAGES": config.num_stages,
        "SHIELDED": behind_a_branch(kind, dtype, config.block_m, (arch // 10, arch % 10)),
    }  # fmt: skip
    absent = ABSENT[kind] + (("out_ptr", "lse_ptr") if aligned else ("parts_ptr", "numbers_ptr"))
    kernel = _attention_fwd_few.attention_fwd_few_kernel
    return f"attention_fwd_few {in_words(config)}", {
        "kernel": kernel, "types": types(kernel, dtype, absent), "constexprs": constexprs, "arch": arch,
        "num_warps": config.num_warps, "max_registers": config.max_registers,
    }  # fmt: skip


def merge(width, arch):
    """(launch in words, what to compile)."""
    config = _attention_fwd_few.pick_config(width, 1, 1, 9999, 9999, 1, "none", torch.bfloat16, (arch // 10, 0))
    kernel = _attention_fwd_few.attention_fwd_merge_kernel
    block = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_D": config.block_d}
    return f"attention_fwd_merge x{config.block_d}", {
        "kernel": kernel, "types": types(kernel, "bf16", ABSENT["full"]), "constexprs": block, "arch": arch,
        "num_warps": config.num_warps, "max_registers": config.max_registers,
    }  # fmt: skip


def in_words(config):
    """A launch."""
    return f"{config.block_m}x{config.block_n}x{config.block_d} {config.num_warps} warps {config.num_stages} stages"


def _lists(arch, of_keys):
    kernel = _attention_tiles.keep_tiles_kernel
    block = {"BLOCK_M": 128, "BLOCK_N": 64, "OF_KEYS": of_keys, "PAIRS_ALIGNED": True}
    return {
        "kernel": kernel, "types": types(kernel, "u8", ()), "constexprs": block, "arch": arch, "num_warps": 4,
        "max_registers": 255,
    }  # fmt: skip


if __name__ == "__main__":
    table.write(FILE, entries(), measure)
