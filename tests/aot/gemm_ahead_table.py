"""What Gluon's products need of a GPU of compute capability 9: _gemm_ahead.py, _ffn_fwd_ahead.py, _ffn_bwd_ahead.py.

python -m tests.aot.gemm_ahead_table    writes tests/aot/gemm_ahead.json anew (a minute)
"""

from itertools import product
from pathlib import Path

import torch

from tests.aot import table
from tests.aot.ffn_table import ACTIVATIONS, ALL_ROWS, GEMMS, OTHERS, argument_types, label
from tests.aot.sass import compile_kernel, figures
from tfm_kernels.triton import _ffn_bwd_ahead, _ffn_fwd_ahead, _gemm, _gemm_ahead

FILE = Path(__file__).with_name("gemm_ahead.json")
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# name -> (kernel, what may be None, what is None without a gate)
HIDDEN = {
    "ffn_fwd_ahead": (
        _ffn_fwd_ahead.ffn_fwd_ahead_kernel, ("b1_ptr", "b_gate_ptr", "preact_ptr", "seed_ptr", "rows_ptr"),
        ("gate_ptr", "b_gate_ptr"),
    ),
    "ffn_bwd_ahead": (
        _ffn_bwd_ahead.ffn_bwd_ahead_kernel, ("hidden_ptr", "db1_ptr", "seed_ptr", "rows_ptr"), ("g_ptr", "dg_ptr"),
    ),
}  # fmt: skip
# of the product: what else is called for, and parts of k, which are float32; where "adds" is told, the rows that count
PRODUCTS = GEMMS | {
    "x w^T without bias": {"absent": ("a2_ptr", "b2_ptr", "bias_ptr"), "inner": (True, True)},
    "dp w": {"absent": ("a2_ptr", "b2_ptr", "bias_ptr"), "inner": (True, False)},
    "dp^T x in parts": {"absent": ("a2_ptr", "b2_ptr", "bias_ptr"), "inner": (False, False), "c": "*fp32"},
    "sums += dz w": {"absent": ("a2_ptr", "b2_ptr", "bias_ptr"), "inner": (True, False), "c": "*fp32", "adds": True},
    "dz^T x": {"absent": ("a2_ptr", "b2_ptr", "bias_ptr", "rows_ptr"), "inner": (False, False), "adds": False},
}


def config_of(dtype):
    """The launch, of many tiles."""
    return _gemm_ahead.pick_config(8192, 4096, 1024, False, True, TYPES[dtype], (9, 0))


def entries():
    """Name -> what to compile."""
    found = {}
    for dtype in TYPES:
        for what, features in PRODUCTS.items():
            a_k_inner, b_k_inner = features["inner"]
            types = argument_types(
                _gemm_ahead.gemm_ahead_kernel, dtype, (*features["absent"], *(() if "adds" in features else ALL_ROWS))
            )
            types |= {"c_ptr": features.get("c", types["c_ptr"])}
            found |= entry(
                f"gemm_ahead {what}", _gemm_ahead.gemm_ahead_kernel, types, dtype, A_K_INNER=a_k_inner,
                B_K_INNER=b_k_inner, A_PADDED="adds" in features, ADDS=features.get("adds", False),
            )  # fmt: skip
        for name, (activation, word), gated in product(HIDDEN, ACTIVATIONS, (False, True)):
            kernel, optional, of_gate = HIDDEN[name]
            for features, absent in (("full", ()), ("plain", optional)):
                types = argument_types(kernel, dtype, (*absent, *(() if gated else of_gate)), OTHERS | {"F": "i64"})
                what = f"{name} {word} {features}{' gated' * gated}"
                found |= entry(what, kernel, types, dtype, ACTIVATION=activation.value)
    return found


def entry(what, kernel, types, dtype, **constexprs):
    """{its name: what to compile}."""
    config = config_of(dtype)
    constexprs |= {
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "GROUP_M": _gemm.GROUP_M,
    }  # fmt: skip
    launch = {"kernel": kernel, "types": types, "constexprs": constexprs, "arch": 90, "num_warps": config.num_warps}
    return {label(90, what, config, dtype, True): launch}


def measure(launch):
    """The figures of one entry."""
    return figures(compile_kernel(**launch), ("HGMMA",))


if __name__ == "__main__":
    table.write(FILE, entries(), measure)
