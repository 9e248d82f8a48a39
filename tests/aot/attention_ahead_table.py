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
BIAS = _attention_bwd_ahead.attention_bwd_ahead_bias_kernel
# (storage type, kind) of a bias' gradient
SUMS = (
    ("bf16", "bias"), ("fp16", "bias"), ("bf16", "bias wide"), ("bf16", "keep"), ("bf16", "dropout"), ("bf16", "full"),
    ("bf16", "full wide"),
)  # fmt: skip
# (keys or queries, storage type, kind, dropout as pick_config() says it); a "wide" bias is of 32 bits, and "dbias" says
# that the bias gets the gradient of each of its pairs
BACKWARD = (
    (65, "bf16", "plain", "none"), (64, "bf16", "plain", "none"), (65, "fp16", "plain", "none"),
    (65, "bf16", "dropout", "drawn"), (64, "bf16", "dropout", "drawn"), (65, "bf16", "dropout", "read"),
    (64, "bf16", "dropout", "read"), (65, "fp16", "dropout", "read"), (65, "bf16", "bias", "none"),
    (65, "bf16", "bias dbias", "none"), (65, "bf16", "bias dbias wide", "none"), (65, "bf16", "keep", "none"),
    (65, "bf16", "full dbias", "drawn"), (65, "bf16", "full dbias wide", "drawn"), (65, "bf16", "full dbias", "read"),
    (65, "fp16", "full dbias wide", "read"),
)  # fmt: skip
PAIRS = {"bias": 2, "keep": 1, "full": 3}  # bytes


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
        for call in SUMS:
            words, entry = sums(width, *call) or (None, None)
            found |= {words: entry} if words else {}
    return found


def backward(name, width, length, dtype, kind, dropout):
    """(its name, what to compile)."""
    kind, *more = kind.split()
    bytes_of_pairs = PAIRS.get(kind, 0) + 2 * ("wide" in more)
    drawn = dropout if name == "keys" or dropout == "none" else "drawn"
    config = _attention_bwd_ahead.pick_config(name, width, length, bytes_of_pairs, drawn, DTYPES[dtype], (9, 0))
    constexprs = {
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_D": config.block_d, "OUT_ALIGNED": True,
        "WARPS": config.num_warps, "HELD": _attention_bwd_ahead.held(name, config),
    }  # fmt: skip
    absent = [
        *ABSENT[kind],
        *(("seed_ptr",) if drawn != "drawn" else ()),
        *(() if dropout == "read" else ("bits_ptr",)),
    ]
    absent += [] if "dbias" in more else ["dbias_ptr"]
    types_of = types(KERNELS[name], dtype, absent)
    if "wide" in more:
        types_of |= {pointer: "*fp32" for pointer in ("bias_ptr", "dbias_ptr") if pointer in types_of}
    words = " ".join((kind, *more, *(("bits",) if dropout == "read" else ())))
    return f"sm_90 attention_bwd_ahead_{name} {in_words(config)} {dtype} {words}", {
        "kernel": KERNELS[name], "types": types_of, "constexprs": constexprs,
        "arch": 90, "num_warps": config.num_warps, "max_registers": config.max_registers,
    }  # fmt: skip


def sums(width, dtype, kind):
    """(its name, what to compile); None where there is no launch."""
    kind, *more = kind.split()
    dropout, alone = kind in ("dropout", "full"), kind == "bias"
    config = _attention_bwd_ahead.pick_bias_config(width, 65, 65, alone, dropout, DTYPES[dtype], (9, 0))
    if config is None:
        return None
    constexprs = {
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_D": config.block_d, "RING": config.num_stages,
    }  # fmt: skip
    types_of = types(BIAS, dtype, [name for name in ABSENT[kind] if name != "bias_ptr"])
    if "wide" in more:
        types_of["bias_ptr"] = "*fp32"
    return f"sm_90 attention_bwd_ahead_bias {in_words(config)} {dtype} {' '.join((kind, *more))}", {
        "kernel": BIAS, "types": types_of, "constexprs": constexprs, "arch": 90, "num_warps": config.num_warps,
        "max_registers": config.max_registers,
    }  # fmt: skip


def measure(entry):
    """The figures of one entry; of a kernel with a stack also how often the loops that multiply touch it."""
    return figures(compile_kernel(**entry), ("HGMMA",))


if __name__ == "__main__":
    table.write(FILE, entries(), measure)
