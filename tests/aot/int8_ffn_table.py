"""What int8_ffn's kernels need of a GPU: every launch of their pick_config functions, compiled for three of them.

python -m tests.aot.int8_ffn_table    writes tests/aot/int8_ffn.json anew (minutes)

The product with w2 and the rounding of x are in int8_linear's table.
"""

from pathlib import Path

from tests.aot import ffn_table
from tests.aot.ffn_table import ARCHS, argument_types, label
from tests.aot.int8_linear_table import INTEGERS, measure, without_products
from tests.aot.table import write
from tfm_kernels.triton import _int8, int8_ffn_fwd
from tfm_kernels.triton._activation import GELU, GELU_TANH, RELU, SILU

FILE = Path(__file__).with_name("int8_ffn.json")
ENDS = ("scale1_ptr", "gate_scale_ptr", "step_ptr", "b1_ptr", "largest_ptr")
GATED = ("gate_ptr", "gate_scale_ptr")
OTHERS = {
    **dict.fromkeys(("x_ptr", "w1_ptr", "gate_ptr"), "*i8"), **dict.fromkeys(("largest_ptr", "parts_ptr"), "*i32"),
    **dict.fromkeys(("scale1_ptr", "gate_scale_ptr", "step_ptr", "hidden_ptr"), "*fp32"), "splits": "i32",
}  # fmt: skip
# words of an end -> activation, type of the bias, whether the features are aligned, what is None
FULL = {"gelu full": (GELU, "bf16", True, ()), "gelu plain": (GELU, "bf16", False, ("b1_ptr",))}
OTHER_ENDS = {
    "gelu full fp32": (GELU, "fp32", True, ()), "relu full": (RELU, "bf16", True, ()),
    "gelu_tanh full": (GELU_TANH, "bf16", True, ()), "silu full": (SILU, "bf16", True, ()),
}  # fmt: skip
PARTS = {"parts": (RELU, "bf16", True, ENDS)}


def entries(archs=ARCHS):
    """Name -> what to compile, for every kernel, launch, set of features, alignment and architecture."""
    found = {}
    for arch in archs:
        for gated in (False, True):
            for aligned in (True, False):
                found |= _first(arch, aligned, gated)
            found |= _joins(arch, gated)
        found |= _rounding(arch)
    return found


def _first(arch, aligned, gated):
    """All of h, and of the two smallest launches parts; with every activation on sm_90."""
    kernel, found = int8_ffn_fwd.int8_ffn_fwd_kernel, {}
    configs = int8_ffn_fwd.candidates(gated, aligned, arch // 10)
    ends = FULL | (OTHER_ENDS if arch == 90 and aligned else {})
    variants = [(config, what, end) for config in configs for what, end in ends.items()]
    variants += [(config, what, end) for config in configs[-2:] for what, end in PARTS.items()]
    for config, what, (activation, bias, f_aligned, absent) in variants:
        others = OTHERS | ({"hidden_ptr": "*i32"} if what == "parts" else {})
        types = argument_types(kernel, bias, (*absent, *(() if gated else GATED)), others)
        made = ffn_table.entry(
            kernel, types, config, arch, "int8", 16 if aligned else 0, F_ALIGNED=f_aligned, ACTIVATION=activation.value
        )  # fmt: skip
        del made["launch"]["constexprs"]["PRECISION"]
        made["products"] = INTEGERS[arch]
        found[label(arch, f"int8_ffn_fwd {what}{' gated' * gated}", config, "int8", aligned)] = made
    return found


def _joins(arch, gated):
    kernel, found = int8_ffn_fwd.int8_ffn_fwd_join_kernel, {}
    for what, (activation, bias, f_aligned, absent) in (FULL | (OTHER_ENDS if arch == 90 else {})).items():
        types = argument_types(kernel, bias, (*absent, *(() if gated else GATED)), OTHERS)
        constexprs = {"BLOCK_N": int8_ffn_fwd.JOIN_N, "F_ALIGNED": f_aligned, "ACTIVATION": activation.value}
        name = f"sm_{arch} int8_ffn_fwd_join {what}{' gated' * gated}"
        found[name] = without_products(kernel, types, constexprs, arch)
    return found


def _rounding(arch):
    kernel, found = _int8.round_pieces_kernel, {}
    for K in (256, 1024, 4096):
        config = _int8.pick_config(K)
        others = {"integers_ptr": "*i8", "step_ptr": "*fp32", "largest_ptr": "*i32", "K": "i32", "blocks": "i32"}
        types = argument_types(kernel, "fp32", (), others)
        constexprs = {"BLOCK_M": config.block_m, "BLOCK_K": config.block_k, "RUN": _int8.RUN, "BLOCKS": _int8.BLOCKS}
        name = f"sm_{arch} round_pieces {config.block_m}x{config.block_k}"
        found[name] = without_products(kernel, types, constexprs, arch)
    return found


if __name__ == "__main__":
    write(FILE, entries(), measure)
