"""Defects planted into csrc/cuda's ffn and the products that it is made of, and the calls that have to catch them."""

from functools import partial

import torch

from tests import ffn_semantics as semantics
from tests.fences import fenced, huge
from tests.simt.defects import defect
from tfm_kernels.testing import assert_contract

COPIES, PRODUCTS, FWD_FILE, BWD_FILE = "gemm.cuh", "gemm.cu", "ffn_fwd.cu", "ffn_bwd.cu"
FREE = "    __syncthreads();  // the memory is free for the next tile\n"

_ffn = partial(defect, stem="ffn")

DEFECTS = {
    "waits_for_too_few_copies": _ffn(COPIES, "copy_wait<Tiles::kStages - 2>", "copy_wait<Tiles::kStages - 1>"),
    "stage_read_before_it_is_there_for_all": _ffn(
        COPIES, "__syncthreads();  // this stage is there", "// this stage is there", quick=True
    ),
    "stage_written_over_while_it_is_read": _ffn(COPIES, "begin(step + Tiles::kStages - 1)", "begin(step + 3)"),
    "sums_laid_down_on_stages_in_use": _ffn(COPIES, "copy_wait<0>();\n  __syncthreads();", "copy_wait<0>();"),
    "last_stage_lost": _ffn(COPIES, "step < steps; ++step)", "step < steps - 1; ++step)"),
    "last_piece_of_a_sum_lost": _ffn(COPIES, " && step != steps - 1) continue;", ") continue;"),
    "piece_of_a_sum_counted_twice": _ffn(COPIES, "      clear<Tiles>(piece);\n    }\n", "    }\n"),
    "reads_whole_packs_at_the_end_of_a_row": _ffn(COPIES, "count < kLanes<T> ? count :", "count < 0 ? count :"),
    "reads_one_row_too_many": _ffn(COPIES, "return l < count ? data", "return l <= count ? data"),
    "reads_one_k_too_many": _ffn(COPIES, "return l < deep ? data", "return l <= deep ? data"),
    "k_beyond_the_end_counts": _ffn(COPIES, "at_most<Tiles::kDeep>(depth - k)", "Tiles::kDeep"),
    "factor_aligned_although_it_is_not": _ffn(COPIES, "if (packed) return copy_16", "if (true) return copy_16"),
    "factor_offsets_of_32_bits": _ffn(COPIES, "data + l * stride + k", "data + l * static_cast<int>(stride) + k"),
    "wrong_row_of_a_fragment": _ffn(COPIES, "(at + 8 * kStride)", "(at + 7 * kStride)"),
    "packs_read_before_they_are_laid": _ffn(
        COPIES, "    __syncwarp();\n#pragma unroll 1", "#pragma unroll 1"
    ),
    "laid_over_before_it_is_read": _ffn(COPIES, "    }\n    __syncwarp();\n  }\n}", "    }\n  }\n}"),
    "tiles_of_the_last_group_lost": _ffn(
        COPIES, "tiles_m - 8 * group < 8 ? tiles_m - 8 * group : 8", "8"
    ),
    "wrong_lane_of_a_left_fragment": _ffn(
        "tile.cuh", "tile + (row + lane % 16) * stride", "tile + (row + (lane ^ 8) % 16) * stride"
    ),
    "wrong_k_of_a_turned_left_fragment": _ffn(
        "tile.cuh", "k + lane / 16 * 8 + lane % 8, from_row", "k + lane % 8, from_row"
    ),
    "bias_left_out": _ffn(PRODUCTS, "values[k][i] += b;", "values[k][i] += 0.0f * b;"),
    "second_product_left_out": _ffn(PRODUCTS, "if (args.x2.data) add", "if (false) add"),
    "part_of_k_lost": _ffn(PRODUCTS, "args.type, args.splits, size}", "args.type, args.splits - 1, size}"),
    "parts_of_k_overlap": _ffn(PRODUCTS, "first + stages_each < stages ?", "first + stages_each + 1 < stages ? 1 +"),
    "next_tile_begins_too_early": _ffn(PRODUCTS, FREE, ""),
    "line_of_a_sum_lost": _ffn(PRODUCTS, "other < kSumLines;", "other < kSumLines - 1;"),
    "run_of_rows_lost": _ffn(
        PRODUCTS, "DType::f32}, args.sum, args.type, runs,", "DType::f32}, args.sum, args.type, runs - 1,"
    ),
    "sums_read_too_early": _ffn(
        PRODUCTS, "sums[threadIdx.x] = sum;\n    __syncthreads();", "sums[threadIdx.x] = sum;"
    ),
    "half_of_a_gate": _ffn(FWD_FILE, "laid + 16, g[0]", "laid + 8, g[0]", quick=True),
    "gate_of_another_feature": _ffn(FWD_FILE, "(within & (each - 1))", "(within & (each / 2 - 1))"),
    "bias_of_the_gate_left_out": _ffn(FWD_FILE, "g[k][i] += b;", "g[k][i] += 0.0f * b;"),
    "gate_saved_in_the_place_of_p": _ffn(FWD_FILE, "row + args.f, place, g", "row, place, g"),
    "dropout_of_the_tiles_rows": _ffn(
        FWD_FILE, "drop(args.dropout, m, place, h)", "drop(args.dropout, m % 64, place, h)"
    ),
    "hidden_of_the_next_tile_too_early": _ffn(FWD_FILE, FREE, ""),
    "h_not_dropped": _ffn(BWD_FILE, "if (drops) fill(h,", "if (false) fill(h,"),
    "dh_not_dropped": _ffn(BWD_FILE, "if (drops) fill(dh,", "if (false) fill(dh,"),
    "scale_of_dropout_missing": _ffn(BWD_FILE, "value * args.dropout.scale", "value"),
    "gate_missing_in_dp": _ffn(BWD_FILE, "slope[k][i] *= g;", ""),
    "dg_without_the_activation": _ffn(
        BWD_FILE, "return dh[k][i] * h[k][i]; });  // dg", "return dh[k][i]; });  // dg"
    ),
    "lost_shuffle_of_db1": _ffn(BWD_FILE, "apart < kWarp;", "apart < kWarp / 2;"),
    "one_line_of_db1_for_all_warps": _ffn(BWD_FILE, "+ Tiles::warp() / Tiles::kWarpsN;", "+ 0;"),
    "slope_of_gelu": _ffn("activation.cuh", "0.3989422804f", "0.3999422804f"),
    "slope_of_silu": _ffn("activation.cuh", "(area * (1.0f - area));", "area;"),
    "tanh_for_erf": _ffn("activation.cuh", "p[k][i] * normal_area(p[k][i])", "p[k][i] * sigmoid(twice_u(p[k][i]))"),
}  # fmt: skip


def trial(simt):
    """Raises, or ends the process, where csrc/cuda is wrong: tiles, the contract, masks, schedules, far rows."""
    calls = [
        ((70, 40, 72, 24), torch.bfloat16, True, "gelu"), ((33, 9, 67, 5), torch.float16, False, "silu"),
        ((66, 24, 40, 17), torch.float32, True, "gelu_tanh"), ((1100, 8, 9, 8), torch.bfloat16, True, "relu"),
        ((9, 130, 33, 64), torch.float16, False, "gelu"), ((600, 16, 8, 8), torch.float32, False, "silu"),
        ((33, 16, 24, 8), torch.float32, False, "gelu"),
    ]  # fmt: skip
    simt.configure(1, multiprocessors=2, resident=2)
    for sizes, dtype, gated, activation in calls:
        given = semantics.block(*sizes, dtype, gated) | {"activation": activation}
        given = {name: fenced(t) if isinstance(t, torch.Tensor) and t.dim() else t for name, t in given.items()}
        assert_contract("ffn", given, "cuda")
        simt.assert_schedules_agree("ffn", given, range(2, 8), multiprocessors=2, most=3)
    semantics.test_dropout_masks_are_those_of_the_other_backends("cuda", 7, 0.1)
    semantics.assert_far_rows_arrive("cuda", "x", huge(semantics.FAR + 2**17, torch.float32))
