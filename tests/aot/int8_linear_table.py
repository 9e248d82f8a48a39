"""What int8_linear's kernels need of a GPU: every launch of their pick_config functions, compiled for three of them.

python -m tests.aot.int8_linear_table    writes tests/aot/int8_linear.json anew (minutes)
"""

from pathlib import Path

from tests.aot import ffn_table
from tests.aot.ffn_table import ARCHS, argument_types, label
from tests.aot.sass import compile_kernel, figures, narrowest_copy
from tests.aot.table import write
from tfm_kernels.triton import _int8, _int8_gemm

FILE = Path(__file__).with_name("int8_linear.json")
# words of the call -> kind, the type of y, of the factor beside the weights, of sums
CALLS = {
    "half": ("half", "bf16", "bf16", "fp32"), "ieee": ("ieee", "fp32", "fp32", "fp32"),
    "tf32": ("tf32", "fp32", "fp32", "fp32"), "int8": ("int8", "bf16", "i8", "i32"),
    "int8 to fp32": ("int8", "fp32", "i8", "i32"),
}  # fmt: skip
INTEGERS = {80: ("IMMA",), 86: ("IMMA",), 90: ("IGMMA",), 100: ("IMMA",), 120: ("IMMA",)}
OTHERS = {"weight_ptr": "*i8", "scale_ptr": "*fp32", "step_ptr": "*fp32", "splits": "i32"}
ENDS = ("scale_ptr", "step_ptr", "bias_ptr")


def entries(archs=ARCHS):
    """Name -> what to compile, for every kernel, launch, kind, alignment and architecture."""
    found = {}
    for arch in archs:
        for call in CALLS:
            for aligned in (True, False):
                found |= _products(arch, call, aligned)
            found |= _joins(arch, call)
        found |= _rounding(arch)
    return found


def measure(entry):
    """The figures of one entry, and the fewest bytes that a thread copies at once."""
    compiled = compile_kernel(**entry["launch"])
    narrowest = narrowest_copy(compiled)
    return figures(compiled, entry["products"]) | ({} if narrowest is None else {"narrowest copy": narrowest})


def _products(arch, call, aligned):
    """All of y, with bias and rows that are aligned, or without both; and the two smallest for parts."""
    kind, y, factor, sums = CALLS[call]
    kernel, found = _int8_gemm.int8_gemm_kernel, {}
    configs = _int8_gemm.candidates(kind, aligned, arch // 10)
    variants = [(config, what) for config in configs for what in ("full", "plain")]
    variants += [(config, "parts") for config in configs[-2:]]
    for config, what in variants:
        absent = {"full": (), "plain": ("bias_ptr",), "parts": ENDS}[what] + (() if kind == "int8" else ("step_ptr",))
        others = OTHERS | {"x_ptr": f"*{factor}", "y_ptr": f"*{sums if what == 'parts' else y}"}
        types = argument_types(kernel, y, absent, others)
        made = ffn_table.entry(
            kernel, types, config, arch, kind, 16 if aligned else 0, Y_ALIGNED=what != "plain"
        )  # fmt: skip
        if kind == "int8":
            made["products"] = INTEGERS[arch]
        found[label(arch, f"int8_gemm {what}", config, call, aligned)] = made
    return found


def without_products(kernel, types, constexprs, arch):
    """The entry of a kernel that multiplies nothing, four programs to a multiprocessor."""
    launch = {"kernel": kernel, "types": types, "constexprs": constexprs, "arch": arch, "num_warps": 4}
    return {"launch": launch, "programs": 4, "products": ()}


def _joins(arch, call):
    kind, y, _, sums = CALLS[call]
    kernel, found = _int8_gemm.int8_gemm_join_kernel, {}
    for what, absent in (("full", ()), ("plain", ("bias_ptr",))):
        absent += () if kind == "int8" else ("step_ptr",)
        types = argument_types(kernel, y, absent, OTHERS | {"parts_ptr": f"*{sums}"})
        constexprs = {"BLOCK_N": _int8_gemm.JOIN_N, "Y_ALIGNED": what == "full"}
        found[f"sm_{arch} int8_gemm_join {what} {call}"] = without_products(kernel, types, constexprs, arch)
    return found


def _rounding(arch):
    kernel, found = _int8.round_rows_kernel, {}
    for K in (256, 1024, 4096):
        config = _int8.pick_config(K)
        for dtype, aligned in (("bf16", True), ("bf16", False), ("fp32", True)):
            types = argument_types(kernel, dtype, (), {"integers_ptr": "*i8", "step_ptr": "*fp32", "K": "i32"})
            constexprs = {"BLOCK_M": config.block_m, "BLOCK_K": config.block_k, "RUN": _int8.RUN, "ALIGNED": aligned}
            name = f"sm_{arch} round_rows {config.block_m}x{config.block_k} {dtype}{'' if aligned else ' unaligned'}"
            found[name] = without_products(kernel, types, constexprs, arch)
    return found


if __name__ == "__main__":
    write(FILE, entries(), measure)
