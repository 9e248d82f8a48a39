"""Defects planted into csrc/cuda's norms, one at a time, and the calls that have to catch them."""

from dataclasses import dataclass

import torch

from tests.fences import fenced, huge
from tests.layer_norm_semantics import assert_constant_row_gives_the_bias
from tests.simt.build import ROOT
from tfm_kernels.ops.layer_norm import BWD, FWD
from tfm_kernels.testing import assert_contract

FWD_FILE, BWD_FILE = "layer_norm_fwd.cu", "layer_norm_bwd.cu"


@dataclass(frozen=True)
class Defect:
    """A file of csrc/cuda, and what is put in the place of what; ``quick`` ones are tried by every run of the tests.

    The calls are those of the op ``stem``.
    """

    file: str
    changes: tuple[tuple[str, str], ...]
    quick: bool = False
    stem: str = "layer_norm"

    def text(self):
        """The file with the defect. Each piece must occur just once, so that none is lost when the source changes."""
        text = (ROOT / "csrc" / "cuda" / self.file).read_text()
        for old, new in self.changes:
            assert text.count(old) == 1, f"{self.file} holds {text.count(old)} times: {old}"
            text = text.replace(old, new)
        return text


def defect(file, old, new, **options):
    """One piece replaced."""
    return Defect(file, ((old, new),), **options)


DEFECTS = {
    "dropped_barrier": defect(
        "reduce.cuh", "__syncthreads();\n    return warp_sum(", "return warp_sum(", quick=True
    ),
    "divergent_barrier": defect(
        "reduce.cuh", "__syncthreads();\n    return warp_sum(", "if (warp > 0) __syncthreads();\n    return warp_sum("
    ),
    "one_half_of_the_memory_for_all_sums": defect("reduce.cuh", "turn_ ^= 1;", ""),
    "wrong_lane_in_a_shuffle": defect("reduce.cuh", "value, offset);", "value, offset ^ 1);"),
    "lane_of_another_warp_in_a_shuffle": defect("reduce.cuh", "value, offset);", "value, 2 * offset);"),
    "mask_of_half_a_warp": defect("reduce.cuh", "0xffffffffu", "0x0000ffffu"),
    "lost_shuffle": defect("reduce.cuh", "offset > 0;", "offset > 1;"),
    "lost_warp_of_a_block": defect("reduce.cuh", "lane < warps ?", "lane < warps - 1 ?"),
    "rows_of_one_block": defect("reduce.cuh", "* gridDim.x + blockIdx.x;", "* gridDim.x;"),
    "arrives_before_it_has_written": defect(
        "reduce.cuh", "__syncthreads();\n  float* ticket", "float* ticket"
    ),
    "last_but_one_adds_up": defect("reduce.cuh", "== blocks - 1;", "== (blocks > 1 ? blocks - 2 : 0);"),
    "reads_one_column_too_many": defect(
        "pack.cuh", "if (column + i < place.n) op(", "if (column + i <= place.n) op(", quick=True
    ),
    "writes_one_column_too_many": defect(
        "pack.cuh", "if (column + i < place.n) row[", "if (column + i <= place.n) row["
    ),
    "reads_a_pack_too_many": defect(
        "pack.cuh", "if (column >= place.n) continue;\n      float values", "float values"
    ),
    "writes_a_pack_too_many": defect(
        "pack.cuh", "if (column >= place.n) continue;\n      Both both", "Both both"
    ),
    "offsets_of_32_bits": defect(
        "pack.cuh", "const int64_t offset = m * rows.stride;", "const int offset = static_cast<int>(m * rows.stride);"
    ),
    "float32_weight_read_as_16_bits": defect(
        "pack.cuh", "rows.type == kDType<T>", "sizeof(T) == 2 || rows.type == kDType<T>"
    ),
    "aligned_although_it_is_not": defect("pack.cuh", "if (place.aligned) {\n#pragma", "if (true) {\n#pragma"),
    "missing_dropout_scale": defect("philox.cuh", "values[k][i + j] * dropout.scale", "values[k][i + j]"),
    "nine_rounds": defect("philox.cuh", "round < 10", "round < 9"),
    "lanes_of_the_draw_swapped": defect("philox.cuh", "each[j] >", "each[j ^ 1] >"),
    "row_number_of_32_bits": defect("philox.cuh", "static_cast<uint32_t>(row >> 32)", "0"),
    "row_numbers_not_read": defect("philox.cuh", "dropout.rows ? dropout.rows[m] : m", "m"),
    "one_pass_variance": Defect(
        FWD_FILE,
        (
            ("values[k][i] * values[k][i]; });", "(values[k][i] + mean) * (values[k][i] + mean); });"),
            ("squares = group.sum(squares);", "squares = group.sum(squares) - args.n * mean * mean;"),
        ),
        quick=True,
    ),
    "variance_counts_columns_that_are_not_there": defect(
        FWD_FILE, "here.first + k * distance + i < args.n ? values[k][i] - mean : 0.0f", "values[k][i] - mean"
    ),
    "mean_of_equal_numbers_is_another": defect(FWD_FILE, "mean += off;", "mean += 0.0f * off;"),
    "biased_where_unbiased_is_asked": defect(FWD_FILE, "args.unbiased ? args.n - 1 : args.n", "args.n"),
    "eps_outside_left_out": defect(FWD_FILE, "divisor + args.eps) + args.eps_outside", "divisor + args.eps)"),
    "eps_outside_without_its_gradient": defect(BWD_FILE, "(divisor * share)", "divisor"),
    "z_not_rounded": defect(FWD_FILE, "static_cast<float>(static_cast<T>(values[k][i] + r))", "values[k][i] + r"),
    "bias_before_weight": Defect(
        FWD_FILE, (("values[k][i] *= w;", "values[k][i] += w;"), ("values[k][i] += b;", "values[k][i] *= b;"))
    ),
    "mean_of_g_left_out": defect(BWD_FILE, "g[k][i] - sum - xhat", "g[k][i] - xhat"),
    "gradient_of_z_left_out": defect(BWD_FILE, "dz[k][i] += d;", ""),
    "gradient_not_dropped": defect(BWD_FILE, "drop(args.dropout, m, place, dz);", ""),
    "weight_in_dbias": defect(BWD_FILE, "dbias[k][i] + g[k][i]", "dbias[k][i] + g[k][i] * rstd"),
    "lost_warp_of_the_partial_sums": defect("partial.cuh", "other < warps;", "other < warps - 1;"),
    "partial_sums_read_too_early": defect(
        "partial.cuh", "  __syncthreads();\n  for (int at", "  for (int at"
    ),
    "partial_sums_written_over": defect("partial.cuh", "  __syncthreads();  // the memory is free again\n", ""),
    "sums_of_the_wrong_type": defect(BWD_FILE, "if (type == kDType<T>)", "if (true)"),
    "partial_sums_begun_anew": defect("partial.cuh", "begins ? terms", "true ? terms"),
    "lost_block_of_a_group": defect("partial.cuh", "add_rows(sum, width, count,", "add_rows(sum, width, count - 1,"),
    "lost_group_of_blocks": defect("partial.cuh", "* width, groups, width", "* width, groups - 1, width"),
}  # fmt: skip


def randn(*shape, dtype=torch.float32, seed=0, mean=0.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) + mean).to(dtype)


def _call(op, rows, width, dtype, mean=0.0):
    """Everything there is, between protected pages."""
    inputs = {"x": randn(rows, width, dtype=dtype, mean=mean), "weight": randn(width, seed=1), "eps": 1e-5}
    inputs["eps_outside"] = 0.1 if width % 2 else 0.0
    if op.endswith("layer_norm"):
        inputs |= {"bias": randn(width, dtype=dtype, seed=2), "unbiased": True}
    if op.startswith("add"):
        rows_far = torch.arange(rows) * (2**33 + 1)
        inputs |= {"residual": randn(rows, width, dtype=dtype, seed=3), "dropout_p": 0.3, "dropout_rows": rows_far}
        inputs["seed"] = torch.tensor(2**40 + 5)
    return {name: fenced(t) if isinstance(t, torch.Tensor) and t.dim() else t for name, t in inputs.items()}


def trial(simt):
    """Raises, or ends the process, where csrc/cuda is wrong: each launch, the contract, schedules, far rows."""
    cases = [
        ("add_layer_norm", 70, 40, torch.bfloat16), ("add_rms_norm", 9, 63, torch.float16),
        ("add_layer_norm", 17, 508, torch.float32), ("rms_norm", 9, 900, torch.bfloat16),
        ("add_layer_norm", 5, 1023, torch.float32), ("add_layer_norm", 9, 1544, torch.bfloat16),
        ("rms_norm", 9, 1601, torch.float32), ("add_layer_norm", 5, 16385, torch.float32),
    ]  # fmt: skip
    simt.configure(1, multiprocessors=3, resident=2)
    for op, rows, width, dtype in cases:
        assert_contract(op, _call(op, rows, width, dtype), "cuda")
    assert_contract("layer_norm", {"x": randn(5, 640, mean=1e3), "unbiased": False}, "cuda")
    for width in (768, 17000):
        assert_constant_row_gives_the_bias("cuda", torch.float32, width)
    for op, rows, width, dtype in cases:
        simt.assert_schedules_agree(op, _call(op, rows, width, dtype), range(2, 8), multiprocessors=3, most=3)
    _far_rows()


def _far_rows():
    far = 2**31 + 4096
    x, weight = randn(2, 96, dtype=torch.float16), randn(96, seed=1)
    apart = huge(far + 2**17, torch.float16).as_strided((2, 96), (far, 1)).copy_(x)
    options = (None, weight, None, 1e-5, 1e-3, True, False, 0.0, None, None)
    y, _, mean, rstd = FWD["cuda"](x, *options)
    assert torch.equal(FWD["cuda"](apart, *options)[0], y), "far rows"
    options = (mean, rstd, weight, None, 1e-3, True, False, 0.0, None, None, True, False)
    expected = BWD["cuda"](x, None, x, *options)[0]
    assert torch.equal(BWD["cuda"](apart, None, apart, *options)[0], expected), "far rows"
