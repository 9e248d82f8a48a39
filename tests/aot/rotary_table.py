"""What rotary's kernel needs of a GPU: every launch that pick_config can return, compiled for three of them.

python -m tests.aot.rotary_table    writes tests/aot/rotary.json anew (minutes)
"""

from pathlib import Path

from tests.aot.ffn_table import ARCHS, argument_types
from tests.aot.sass import compile_kernel, figures, whole
from tests.aot.table import write
from tfm_kernels.triton import _rotary

FILE = Path(__file__).with_name("rotary.json")
WIDTHS = (32, 64, 128, 256)  # one for each launch
BOTH_WAYS = 128  # the width whose backward, which differs in where two signs stand, is compiled too
SIZES = dict.fromkeys("HTDR", "i32")
# storage type of x, of the factors: as models have them
TYPES = (("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "fp32"))
TYPES_90 = (("fp16", "fp16"), ("fp16", "fp32"))


def entries(archs=ARCHS):
    """Name -> what to compile, for every launch, storage types, order of pairs and architecture."""
    found = {}
    for arch in archs:
        for types in TYPES + (TYPES_90 if arch == 90 else ()):
            for width in WIDTHS:
                for aligned in (True, False):
                    for interleaved in (False, True):
                        for back in (False, True)[: 1 + (width == BOTH_WAYS)]:
                            name = label(arch, width, types, aligned, interleaved, back)
                            found[name] = _entry(arch, width, types, aligned, interleaved, back)
    return found


def measure(entry):
    """The figures of one entry, and how many of its loads and stores take 16 bytes."""
    compiled = compile_kernel(**entry)
    return {**figures(compiled), **whole(compiled)}


def label(arch, width, types, aligned, interleaved, back):
    """An entry's name."""
    config, (dtype, factors) = _rotary.pick_config(width, aligned), types
    launch = f"{config.block_m}x{config.block_n} {config.num_warps} warps"
    words = f"{dtype} by {factors}{' interleaved' * interleaved}{' unaligned' * (not aligned)}"
    return f"sm_{arch} rotary_{'bwd' if back else 'fwd'} {launch} {words}"


def _entry(arch, width, types, aligned, interleaved, back):
    config, (dtype, factors) = _rotary.pick_config(width, aligned), types
    others = {**SIZES, "cos_ptr": f"*{factors}", "sin_ptr": f"*{factors}"}
    constexprs = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "ALIGNED": aligned}
    constexprs |= {"INTERLEAVED": interleaved, "BACK": back}
    return {
        "kernel": _rotary.rotary_kernel, "types": argument_types(_rotary.rotary_kernel, dtype, (), others),
        "constexprs": constexprs, "arch": arch, "num_warps": config.num_warps,
    }  # fmt: skip


if __name__ == "__main__":
    write(FILE, entries(), measure)
