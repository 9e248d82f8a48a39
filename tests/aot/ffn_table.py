"""What ffn's kernels need of a GPU: every launch that its pick_config functions can return, compiled for three of them.

python -m tests.aot.ffn_table    writes tests/aot/ffn.json anew (minutes)
"""

from pathlib import Path

from tests.aot.sass import FUSED, compile_kernel, figures
from tests.aot.table import write
from tfm_kernels.triton import _gemm, _sums, ffn_bwd, ffn_fwd
from tfm_kernels.triton._activation import GELU, GELU_TANH, RELU, SILU

FILE = Path(__file__).with_name("ffn.json")
ARCHS = (80, 90, 100)
KINDS = {"half": "bf16", "ieee": "fp32", "tf32": "fp32"}
# what multiplies; sm_100 has no warp-level products of its own, its tensor cores take tiles from shared memory
PRODUCTS = {80: ("HMMA",), 86: ("HMMA",), 90: ("HGMMA",), 100: ("UTCHMMA",), 120: ("HMMA",)}
# (name, features): of the product, which pointers are None and what is k inner
ALL_ROWS = ("rows_ptr", "count_ptr")
GEMMS = {
    "x w^T": {"absent": ("a2_ptr", "b2_ptr", *ALL_ROWS), "inner": (True, True)},
    "dp w + dg gate": {"absent": ("bias_ptr", *ALL_ROWS), "inner": (True, False)},
    "dp^T x": {"absent": ("a2_ptr", "b2_ptr", "bias_ptr", *ALL_ROWS), "inner": (False, False)},
}
OPTIONAL = {
    ffn_fwd.ffn_fwd_kernel: ("b1_ptr", "b_gate_ptr", "preact_ptr", "seed_ptr", "rows_ptr"),
    ffn_bwd.ffn_bwd_kernel: ("hidden_ptr", "db1_ptr", "seed_ptr", "rows_ptr"),
}
ACTIVATIONS = ((GELU, "gelu"), (RELU, "relu"), (GELU_TANH, "gelu_tanh"), (SILU, "silu"))
GATED = ("gate_ptr", "b_gate_ptr", "g_ptr", "dg_ptr")
# of arguments that are neither int64 nor a pointer to the storage type
OTHERS = {
    **dict.fromkeys(("F", "splits", "last_dropped"), "i32"), "scale": "fp32", "db1_ptr": "*fp32",
    **dict.fromkeys(("seed_ptr", "rows_ptr", "count_ptr"), "*i64"),
}  # fmt: skip


def entries(archs=ARCHS):
    """Name -> what to compile, for every kernel, launch, storage type, set of features and architecture."""
    found = {}
    for arch in archs:
        for kind in KINDS:
            for aligned in (True, False):
                found |= _products(arch, kind, aligned)
                for gated in (False, True):
                    found |= _first(arch, kind, aligned, gated)
        found |= _sum(arch)
    return found


def measure(entry):
    """The figures of one entry; of a kernel with a stack also how often the loops that multiply touch it."""
    return figures(compile_kernel(**entry["launch"]), entry["products"])


def entry(kernel, types, config, arch, kind, aligned, **constexprs):
    """What to compile of a kernel that multiplies, and what is planned for it."""
    constexprs |= {
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "ALIGNED": aligned,
        "STAGES": config.num_stages, "GROUP_M": _gemm.GROUP_M, "PRECISION": "tf32" if kind == "tf32" else "ieee",
    }  # fmt: skip
    launch = {"kernel": kernel, "types": types, "constexprs": constexprs, "arch": arch}
    launch |= {"num_warps": config.num_warps, "max_registers": config.max_registers}
    products = FUSED if kind == "ieee" else PRODUCTS[arch]
    return {"launch": launch, "programs": config.programs, "products": products}


def argument_types(kernel, dtype, absent, others=OTHERS):
    """Argument -> Triton's type, of those that are not ``absent``."""
    types = {}
    for parameter in kernel.params:
        name = parameter.name
        if not parameter.is_constexpr and name not in absent:
            types[name] = others.get(name) or (f"*{dtype}" if name.endswith("_ptr") else "i64")
    return types


def label(arch, what, config, kind, aligned):
    """An entry's name."""
    tile = f"{config.block_m}x{config.block_n}x{config.block_k} {config.num_warps} warps {config.num_stages} stages"
    limit = f" {config.max_registers} registers" if config.max_registers else ""
    return f"sm_{arch} {what} {tile}{limit} {kind}{'' if aligned else ' unaligned'}"


def _first(arch, kind, aligned, gated):
    """The first launches of both directions, whose ends hold activation, gate and dropout.

    Each with all options and with none; the backward's own launches without gate and dropout with all but these.
    """
    found = {}
    forward = ffn_fwd.candidates(kind, gated, aligned, arch // 10)
    any_backward = ffn_bwd.candidates(kind, False, aligned, arch // 10)
    plain_backward = [c for c in ffn_bwd.candidates(kind, True, aligned, arch // 10) if c not in any_backward]
    launches = [(ffn_fwd.ffn_fwd_kernel, c, "full", ()) for c in forward]
    launches += [(ffn_bwd.ffn_bwd_kernel, c, "full", ()) for c in any_backward]
    if not gated:
        launches += [(ffn_bwd.ffn_bwd_kernel, c, "undropped", ("seed_ptr", "rows_ptr")) for c in plain_backward]
    every = ACTIVATIONS if arch == 90 and kind == "half" and aligned else ACTIVATIONS[:1]
    for kernel, config, features, absent in launches:
        stem = kernel.__name__.removesuffix("_kernel")
        variants = [(activation, f"{word} {features}", absent) for activation, word in every]
        for activation, what, absent in [*variants, (GELU, "gelu plain", OPTIONAL[kernel])]:
            absent = (*absent, *(() if gated else GATED))
            name = label(arch, f"{stem} {what}{' gated' * gated}", config, kind, aligned)
            types = argument_types(kernel, KINDS[kind], absent)
            found[name] = entry(kernel, types, config, arch, kind, aligned, ACTIVATION=activation.value)
    return found


def _products(arch, kind, aligned):
    found = {}
    for config in _gemm.candidates(kind, aligned, arch // 10):
        for what, features in GEMMS.items():
            a_k_inner, b_k_inner = features["inner"]
            types = argument_types(_gemm.gemm_kernel, KINDS[kind], features["absent"])
            found[label(arch, f"gemm {what}", config, kind, aligned)] = entry(
                _gemm.gemm_kernel, types, config, arch, kind, aligned, A_K_INNER=a_k_inner, B_K_INNER=b_k_inner,
                A_PADDED=False, ADDS=False,
            )  # fmt: skip
    return found


def _sum(arch):
    found = {}
    for rows in (8, 8192):
        config = _sums.pick_config(rows, 1024)
        for aligned in (True, False):
            blocks = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "ALIGNED": aligned}
            name = f"sm_{arch} sum_rows {config.block_m}x{config.block_n}{'' if aligned else ' unaligned'}"
            launch = {"kernel": _sums.sum_rows_kernel, "types": argument_types(_sums.sum_rows_kernel, "fp32", ())}
            launch |= {"constexprs": blocks, "arch": arch, "num_warps": 4}
            found[name] = {"launch": launch, "programs": 8, "products": ("FADD", "FADD2")}
    return found


if __name__ == "__main__":
    write(FILE, entries(), measure)
