"""What linear_cross_entropy's kernels need of a GPU: every launch of its pick_config functions, compiled for three.

python -m tests.aot.linear_cross_entropy_table    writes tests/aot/linear_cross_entropy.json anew (minutes)
"""

from pathlib import Path

from tests.aot import ffn_table
from tests.aot.ffn_table import ARCHS, KINDS, argument_types, label
from tests.aot.table import write
from tfm_kernels.triton import _cross_entropy, _gemm, linear_cross_entropy_bwd, linear_cross_entropy_fwd

FILE = Path(__file__).with_name("linear_cross_entropy.json")
OTHERS = {
    **dict.fromkeys(("target_ptr", "rows_ptr", "count_ptr"), "*i64"),
    **dict.fromkeys(("V", "begin", "chunk", "splits"), "i32"),
    **dict.fromkeys(("parts_ptr", "loss_ptr", "lse_ptr", "dloss_ptr", "dbias_ptr"), "*fp32"),
    **dict.fromkeys(("share", "smoothing", "classes", "even"), "fp32"),
}  # fmt: skip
# products of the backward: what is k inner, the type of C where it is not the storage type, and which pointers are None
GEMMS = {
    "dx += dz w": ((True, False), {"c_ptr": "*fp32"}, ()),
    "dz^T x": ((False, False), {}, ("rows_ptr",)),
}
measure = ffn_table.measure


def entries(archs=ARCHS):
    """Name -> what to compile, for every kernel, launch, storage type, set of features and architecture."""
    found = {}
    for arch in archs:
        for kind in KINDS:
            for aligned in (True, False):
                found |= _logits(arch, kind, aligned)
                found |= _products(arch, kind, aligned)
        found |= _rows(arch)
    return found


def _logits(arch, kind, aligned):
    """Both directions' launches that compute logits, with bias and smoothing, or without."""
    found = {}
    for direction in (linear_cross_entropy_fwd, linear_cross_entropy_bwd):
        stem = direction.__name__.split(".")[-1]
        kernel = getattr(direction, f"{stem}_kernel")
        for config in direction.candidates(kind, aligned, arch // 10):
            for features, absent in (("full", ()), ("plain", ("bias_ptr", "dbias_ptr"))):
                more = {"SMOOTHED": features == "full"} if direction is linear_cross_entropy_fwd else {}
                types = argument_types(kernel, KINDS[kind], absent, OTHERS)
                name = label(arch, f"{stem} {features}", config, kind, aligned)
                found[name] = ffn_table.entry(kernel, types, config, arch, kind, aligned, **more)
    return found


def _products(arch, kind, aligned):
    found = {}
    for config in _gemm.candidates(kind, aligned, arch // 10):
        for what, ((a_k_inner, b_k_inner), others, absent) in GEMMS.items():
            absent = (*absent, "a2_ptr", "b2_ptr", "bias_ptr")
            types = argument_types(_gemm.gemm_kernel, KINDS[kind], absent, {**OTHERS, **others})
            found[label(arch, f"gemm {what}", config, kind, aligned)] = ffn_table.entry(
                _gemm.gemm_kernel, types, config, arch, kind, aligned, A_K_INNER=a_k_inner, B_K_INNER=b_k_inner,
                A_PADDED=True, ADDS="c_ptr" in others,
            )  # fmt: skip
    return found


def _rows(arch):
    """The launches that multiply nothing."""
    found = {}
    join = linear_cross_entropy_fwd.linear_cross_entropy_fwd_join_kernel
    blocks = {"BLOCK_S": linear_cross_entropy_fwd.JOIN_PARTS, "BLOCK_M": linear_cross_entropy_fwd.JOIN_ROWS}
    live = _cross_entropy.live_rows_kernel
    for name, kernel, constexprs, absent, num_warps in (
        ("linear_cross_entropy_fwd_join smoothed", join, {**blocks, "SMOOTHED": True}, (), 8),
        ("linear_cross_entropy_fwd_join", join, {**blocks, "SMOOTHED": False}, (), 8),
        ("live_rows of a forward", live, {"BLOCK": _cross_entropy.BLOCK}, (), 16),
        ("live_rows", live, {"BLOCK": _cross_entropy.BLOCK}, ("loss_ptr", "lse_ptr"), 16),
    ):
        launch = {"kernel": kernel, "types": argument_types(kernel, "fp32", absent, OTHERS), "constexprs": constexprs}
        launch |= {"arch": arch, "num_warps": num_warps}
        found[f"sm_{arch} {name}"] = {"launch": launch, "programs": 1, "products": ()}
    return found


if __name__ == "__main__":
    write(FILE, entries(), measure)
