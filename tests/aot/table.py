"""What the norms' kernels need of a GPU: every launch that pick_config can return, compiled for three of them.

python -m tests.aot.table    writes tests/aot/layer_norm.json anew (minutes)
"""

import json
import sys
from pathlib import Path

import torch
import triton

from tests.aot.sass import compile_kernel, figures
from tfm_kernels.triton import _layer_norm_sums, layer_norm_bwd, layer_norm_fwd

FILE = Path(__file__).with_name("layer_norm.json")
ARCHS = (80, 90, 100)
WIDTHS = [2**exponent for exponent in range(6, 17)]  # one for each launch
# plain: LayerNorm with weight and bias; full: with all that there is, residual, dropout and row numbers
VARIANTS = tuple(
    (dtype, features, aligned)
    for dtype in ("bf16", "fp32")
    for features, aligned in (("plain", True), ("full", True), ("full", False))
)
VARIANTS_90 = (("fp16", "full", True), ("bf16", "plain", False))
SIZES = {
    "M": "i64", "N": "i32", "last_dropped": "i32",
    "divisor": "fp32", "scale": "fp32", "eps": "fp32", "eps_outside": "fp32",
}  # fmt: skip
STATISTICS = {"mean_ptr": "*fp32", "rstd_ptr": "*fp32", "dweight_ptr": "*fp32", "dbias_ptr": "*fp32"}


def entries(archs=ARCHS):
    """Name -> what to compile, for every kernel, launch, storage type, set of features and architecture."""
    found = {}
    for arch in archs:
        for dtype, features, aligned in VARIANTS + (VARIANTS_90 if arch == 90 else ()):
            for width in WIDTHS:
                for make in (_forward, _backward, _columns):
                    name, entry = make(width, dtype, features, aligned, arch)
                    found[f"sm_{arch} {name} {dtype} {features}{'' if aligned else ' unaligned'}"] = entry
        for dtype in ("bf16", "fp16", "fp32"):
            found[f"sm_{arch} layer_norm_bwd_sum {dtype}"] = _sum(dtype, arch)
    return found


def measure(entry):
    """The figures of one entry."""
    return figures(compile_kernel(**entry))


def _types(kernel, dtype, absent):
    types = {}
    for parameter in kernel.params:
        name = parameter.name
        if name not in absent and not parameter.is_constexpr:
            is_index = name in ("seed_ptr", "rows_ptr")
            types[name] = {**SIZES, **STATISTICS}.get(name) or (
                "i64" if name.endswith("_stride_m") else "*i64" if is_index else f"*{dtype}"
            )
    return types


def _forward(width, dtype, features, aligned, arch):
    config = layer_norm_fwd.pick_config(width, aligned, torch.float32 if dtype == "fp32" else torch.bfloat16)
    walked = width > config.block_n
    kernel = layer_norm_fwd.layer_norm_fwd_walk_kernel if walked else layer_norm_fwd.layer_norm_fwd_kernel
    absent = () if features == "full" else ("residual_ptr", "z_ptr", "seed_ptr", "rows_ptr")
    constexprs = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "ALIGNED": aligned}
    launch = f"{config.block_m}x{config.block_n} {config.num_warps} warps"
    return f"layer_norm_fwd{'_walk' * walked} {launch}", {
        "kernel": kernel, "types": _types(kernel, dtype, absent), "constexprs": constexprs, "arch": arch,
        "num_warps": config.num_warps, "fused": True, "max_registers": config.max_registers,
    }  # fmt: skip


def _backward(width, dtype, features, aligned, arch):
    config = layer_norm_bwd.pick_config(10**6, width, aligned, (arch // 10, arch % 10))
    walked = width > config.block_n
    kernel = layer_norm_bwd.layer_norm_bwd_walk_kernel if walked else layer_norm_bwd.layer_norm_bwd_kernel
    absent = () if features == "full" else ("dz_ptr", "dresidual_ptr", "seed_ptr", "rows_ptr")
    if not config.holds_sums:
        absent += ("dweight_ptr", "dbias_ptr")
    constexprs = {
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "ALIGNED": aligned, "STAGES": config.num_stages
    }  # fmt: skip
    launch = f"{config.block_m}x{config.block_n} {config.num_warps} warps {config.num_stages} stages"
    return f"layer_norm_bwd{'_walk' * walked} {launch}", {
        "kernel": kernel, "types": _types(kernel, dtype, absent), "constexprs": constexprs, "arch": arch,
        "num_warps": config.num_warps, "fused": True, "max_registers": config.max_registers,
    }  # fmt: skip


def _columns(width, dtype, features, aligned, arch):
    config = _layer_norm_sums.pick_config(10**6, width, aligned, (arch // 10, arch % 10))
    kernel = _layer_norm_sums.layer_norm_bwd_columns_kernel
    constexprs = {
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "ALIGNED": aligned, "STAGES": config.num_stages
    }  # fmt: skip
    launch = f"{config.block_m}x{config.block_n} {config.num_warps} warps {config.num_stages} stages"
    return f"layer_norm_bwd_columns {launch}", {
        "kernel": kernel, "types": _types(kernel, dtype, ()), "constexprs": constexprs, "arch": arch,
        "num_warps": config.num_warps, "fused": True, "max_registers": config.max_registers,
    }  # fmt: skip


def _sum(dtype, arch):
    kernel = _layer_norm_sums.layer_norm_bwd_sum_kernel
    types = dict.fromkeys(("dweight_ptr", "dbias_ptr"), "*fp32")
    types |= dict.fromkeys(("dweight_sum_ptr", "dbias_sum_ptr"), f"*{dtype}")
    types |= {"P": "i32", "N": "i32"}
    block = {"BLOCK_M": _layer_norm_sums.SUM_BLOCK_M, "BLOCK_N": _layer_norm_sums.SUM_BLOCK_N}
    return {"kernel": kernel, "types": types, "constexprs": block, "arch": arch, "num_warps": 4}


def load(file=FILE):
    """The committed figures."""
    return json.loads(file.read_text())


def write(file, every, measure):
    """Compiles everything and writes a file, one line an entry."""
    found = {}
    for name, entry in every.items():
        found[name] = measure(entry)
        print(f"\r{len(found)} of {len(every)}", end="", file=sys.stderr)
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(values)}" for name, values in found.items())
    file.write_text(f'{{\n "triton": {json.dumps(triton.__version__)},\n "kernels": {{\n{lines}\n }}\n}}\n')


if __name__ == "__main__":
    write(FILE, entries(), measure)
