"""What Gluon's kernels of the loss need of a GPU of compute capability 9: _linear_cross_entropy_fwd_ahead.py and bwd.

python -m tests.aot.linear_cross_entropy_ahead_table    writes tests/aot/linear_cross_entropy_ahead.json anew
"""

from itertools import product
from pathlib import Path

from tests.aot import table
from tests.aot.ffn_table import argument_types
from tests.aot.gemm_ahead_table import TYPES, entry, measure
from tfm_kernels.triton import _linear_cross_entropy_bwd_ahead as bwd
from tfm_kernels.triton import _linear_cross_entropy_fwd_ahead as fwd

FILE = Path(__file__).with_name("linear_cross_entropy_ahead.json")
OTHERS = {
    **dict.fromkeys(("begin", "splits"), "i32"), **dict.fromkeys(("share", "even"), "fp32"),
    **dict.fromkeys(("dloss_ptr", "lse_ptr", "dbias_ptr", "parts_ptr"), "*fp32"),
    **dict.fromkeys(("target_ptr", "rows_ptr", "count_ptr"), "*i64"),
}  # fmt: skip


def entries():
    """Name -> what to compile."""
    found = {}
    for dtype, (what, absent) in product(TYPES, (("full", ()), ("plain", ("bias_ptr", "dbias_ptr")))):
        for kernel, own in (
            (fwd.linear_cross_entropy_fwd_ahead_kernel, {"SMOOTHED": what == "full"}),
            (bwd.linear_cross_entropy_bwd_ahead_kernel, {}),
        ):
            name = f"{kernel.__name__.removesuffix('_kernel')} {what}"
            found |= entry(name, kernel, argument_types(kernel, dtype, absent, OTHERS), dtype, **own)
    return found


if __name__ == "__main__":
    table.write(FILE, entries(), measure)
