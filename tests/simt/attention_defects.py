"""Defects planted into csrc/cuda's attention kernels, and the calls that have to catch them."""

import functools

import torch

from tests.attention_memory import ANYWHERE, both
from tests.fences import fenced
from tests.simt.defects import defect, randn
from tfm_kernels import Mask
from tfm_kernels.testing import assert_contract

FWD_FILE, SOFTMAX, TILE = "attention_fwd.cu", "attention_softmax.cuh", "attention_tile.cuh"
KEYS, QUERIES, BIAS, ROWS = (f"attention_bwd{part}.cu" for part in ("_keys", "_queries", "_bias", ""))
BWD_TILE = "attention_bwd_tile.cuh"
_planted = functools.partial(defect, stem="attention")

DEFECTS = {
    # what a warp does together
    "left_factor_of_a_wrong_lane": _planted("tile.cuh", "(row + lane % 16) * stride", "(row + lane % 8) * stride"),
    "left_factor_of_a_wrong_half": _planted("tile.cuh", "k + lane / 16 * 8);", "k);"),
    "right_factor_of_a_wrong_half": _planted("tile.cuh", "from_k = k + lane / 8 % 2 * 8;", "from_k = k;"),
    "right_factor_not_turned": _planted(
        "tile.cuh", "ldmatrix_x4<true>(found, tile + from_k", "ldmatrix_x4<false>(found, tile + from_k"
    ),
    "sums_of_swapped_rows_as_a_factor": _planted("tile.cuh", "a.words[1] = packed<T>(first[2], first[3]);", ""
                                                 "a.words[1] = packed<T>(first[0], first[1]);"),
    "lane_of_another_row_in_float32": _planted("tile.cuh", "lane / 4 * 4 + four % 8 / 2", "four % 8 / 2"),
    "piece_of_a_score_replaces_the_others": _planted(
        "tile.cuh", "c[i / 4 / kN][i / 4 % kN][i % 4] += piece", "c[i / 4 / kN][i / 4 % kN][i % 4] = piece"
    ),
    "piece_of_a_sum_over_keys_replaces_the_others": _planted(
        "tile.cuh", "c[j / 4][n][j % 4] += piece", "c[j / 4][n][j % 4] = piece"
    ),
    "fragment_of_the_last_columns_lost": _planted(
        "tile.cuh", "if (n * 8 >= count) continue;\n    uint32_t", "if (n && n * 8 + 16 >= count) continue;\n    uint"
        "32_t",
    ),
    "value_that_nobody_sees_counts": _planted("tile.cuh", "return word & ((two", "return word | 0u * ((two"),
    # copies and barriers
    "keys_not_waited_for": _planted(
        FWD_FILE, "copy_wait<0>();\n    __syncthreads();  // the keys", "__syncthreads();  // the keys"
    ),
    "values_not_waited_for": _planted(
        FWD_FILE, "copy_wait<0>();\n    __syncthreads();  // the values", "__syncthreads();  // the values"
    ),
    "keys_without_a_barrier": _planted(FWD_FILE, "__syncthreads();  // the keys", "// the keys", quick=True),
    "values_without_a_barrier": _planted(FWD_FILE, "__syncthreads();  // the values", "// the values"),
    "queries_copied_in_no_group": _planted(FWD_FILE, "copy_commit();  // of", "// of"),
    "keys_copied_in_no_group": _planted(KEYS, "copy_commit();  // of", "// of"),
    "gradients_copied_in_no_group": _planted(QUERIES, "copy_commit();  // of", "// of"),
    "queries_without_a_barrier": _planted(KEYS, "__syncthreads();  // the queries", "// the queries"),
    "queries_replaced_too_early": _planted(KEYS, "__syncthreads();  // nobody", "// nobody"),
    "keys_replaced_too_early": _planted(QUERIES, "__syncthreads();  // nobody", "// nobody"),
    "one_stage_for_all_tiles": _planted(QUERIES, "stage ^= 1;", ";"),
    "next_tile_waited_for_in_place_of_this": _planted(QUERIES, "copy_wait<1>();", "copy_wait<2>();"),
    "bias_tiles_replaced_too_early": _planted(BIAS, "__syncthreads();  // nobody", "// nobody"),
    # bounds
    "reads_a_row_too_many": _planted(TILE, "first + row < end && column < d;", "first + row <= end && column < d;"),
    "reads_past_a_row": _planted(TILE, "there ? least(bytes, 16) : 0", "there ? 16 : 0"),
    "reads_past_a_row_that_is_not_aligned": _planted(TILE, "there && column + j < d ?", "there ?"),
    "writes_a_row_too_many": _planted(TILE, "first + row >= end || column", "first + row > end || column"),
    "writes_past_a_row": _planted(TILE, "if (column + j < d) target", "target"),
    "lengths_not_clamped": _planted(
        TILE, "clamped(number_at(call.lengths, b), 0, s.tk)", "number_at(call.lengths, b)"
    ),
    # masks
    "band_off_by_one": _planted(SOFTMAX, "least(row + s.high + 1, s.live) - n0", "least(row + s.high, s.live) - n0"),
    "band_off_by_one_turned": _planted(SOFTMAX, "begin = row - s.high - m0;", "begin = row - s.high + 1 - m0;"),
    "lower_limit_off_by_one": _planted(SOFTMAX, "begin = row + s.low - n0;", "begin = row + s.low + 1 - n0;"),
    "cut_tile_taken_as_whole": _planted(TILE, "least(s.live, m0 + s.high + 1)}", "least(s.live, m0 + s.high + 32)}"),
    "last_tile_lost": _planted(TILE, "least(s.live, m1 + s.high), most", "least(s.live, m1 + s.high) - 32, most"),
    "first_queries_lost": _planted(TILE, "{most(n0 - s.high, 0), n1", "{most(n0 - s.high + 16, 0), n1"),
    "bottom_right_from_the_top": _planted(TILE, "high = call.end_high + more", "high = call.end_high"),
    "padding_is_seen": _planted(TILE, "s.live = static_cast<int>(clamped", "s.tk = static_cast<int>(clamped"),
    "dead_keys_in_a_whole_tile": _planted(KEYS, "n0 + keys <= s.live && ", ""),
    "kept_tile_skipped": _planted(TILE, "i < rows * columns; i += blockDim.x)", "i < columns; i += blockDim.x)"),
    "keep_not_read": _planted(SOFTMAX, "if (head.keep.data[place] == 0) sum = -kInfinity;", ""),
    "bias_of_minus_infinity_shows": _planted(SOFTMAX, "more == -kInfinity ? more : fmaf", "fmaf"),
    "bias_not_beside_the_scale": _planted(SOFTMAX, "fmaf(sum, scale, more)", "sum + more"),
    "negative_scale_ignored": _planted(SOFTMAX, "sum *= call.scale;", "sum *= fabsf(call.scale);"),
    # softmax
    "missing_rescale": _planted(FWD_FILE, "decays[i / 4 / (width / 8)][i % 4 / 2];", "1.0f;", quick=True),
    "sum_not_rescaled": _planted(SOFTMAX, "fmaf(sums[m][half], decay, sum)", "sums[m][half] + sum"),
    "largest_of_two_lanes": _planted(TILE, "return fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 2));", ""
                                     "return value;"),
    "sum_of_two_lanes": _planted(TILE, "return value + __shfl_xor_sync(0xffffffffu, value, 2);", "return value;"),
    "lse_without_the_sum": _planted(FWD_FILE, "* call.unit + logf(sum)", "* call.unit"),
    "nothing_seen_gives_nan": _planted(SOFTMAX, "top == -kInfinity ? 0.0f : top", "top"),
    # dropout
    "missing_dropout_scale_of_weights": _planted(FWD_FILE, "call.dropout.scale / sum", "1.0f / sum"),
    "dropout_of_one_row": _planted(TILE, "row + (odd ? 8 : 0)", "row"),
    "dropout_lanes_swapped": _planted(TILE, "odd ? low : high, 1)", "odd ? high : low, 1)"),
    "dropout_lanes_swapped_turned": _planted(TILE, "<< (mine ^ apart);", "<< apart;"),
    "dropout_of_one_column_turned": _planted(TILE, "row + lane_column() + mine % 2", "row + lane_column()"),
    "dweights_not_dropped": _planted(BWD_TILE, "factor == 0.0f ? 0.0f : products[e] * factor", "products[e]"),
    "gradient_dropped_without_scale": _planted(BWD_TILE, "x[e] = p * factor;", "x[e] = kept >> e & 1 ? p : 0.0f;"),
    # gradients
    "delta_left_out": _planted(BWD_TILE, "(dp - row.delta)", "dp"),
    "dlse_left_out": _planted(ROWS, "deltas[half] - dlse", "deltas[half]"),
    "far_rows_not_met_again": _planted(ROWS, "if (far) {", "if (false && far) {"),
    "shift_left_out": _planted(BWD_TILE, "step, -row.shift)", "step, 0.0f)"),
    "scale_of_dk_left_out": _planted(KEYS, "put(k_tile, dk, args.dk, call.scale, call.d)",
                                     "put(k_tile, dk, args.dk, 1.0f, call.d)"),
    "last_head_of_the_group_lost": _planted(KEYS, "return stop.member >= call.group;",
                                            "return stop.member >= (call.group > 1 ? call.group - 1 : 1);"),
    "key_that_nobody_sees_counts": _planted(QUERIES, "seen = seen_columns(head, x);", ""),
    "blind_query_counts": _planted(BWD_TILE, "return sees() && top == top;", "return true;"),
    "key_head_of_another_group": _planted(QUERIES, "const T* k = rows_of<T>(call.k, b, h / call.group,",
                                          "const T* k = rows_of<T>(call.k, b, h % (call.heads / call.group),"),
    "lost_warp_of_dbias": _planted(BIAS, "other < warps;", "other < warps - 1;"),
    "lost_head_of_dbias": _planted(BIAS, "h < call.heads; h", "h < call.heads - 1; h"),
    "lost_column_of_dbias": _planted(BIAS, "i < 2 * kN; ++i) sum += totals[0][i / 2][half",
                                     "i < 2 * kN - 1; ++i) sum += totals[0][i / 2][half"),
}  # fmt: skip


def _call(dtype, sizes, mask=None, bias=None, **options):
    """Inputs of attention between protected pages; sizes: batch, heads, key heads, queries, keys, D, Dv."""
    batch, heads, key_heads, queries, keys, d, dv = sizes
    shapes = (batch, heads, queries, d), (batch, key_heads, keys, d), (batch, key_heads, keys, dv)
    tensors = [fenced(randn(*shape, dtype=dtype, seed=seed)) for seed, shape in enumerate(shapes)]
    given = dict(zip(("query", "key", "value"), tensors, strict=True))
    if bias is not None:
        full = {"b": batch, "h": heads, "q": queries, "k": keys, "1": 1}
        given["bias"] = fenced(randn(*(full[axis] for axis in bias), dtype=dtype, seed=4))
        given["bias"].view(-1)[1::7] = -torch.inf
    if "dropout_p" in options:
        given["seed"] = torch.tensor(2**40 + 5)
    return {**given, "mask": mask, "return_lse": True, **options}


def _keep(*shape):
    keep = torch.rand(*shape, generator=torch.Generator().manual_seed(1)) < 0.6
    keep[..., : shape[2] // 2, 32:] = False
    keep[..., 3, :] = False
    return Mask.keep(keep)


def _calls():
    f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32
    lengths, corner = Mask.lengths(torch.tensor([37, 100])), Mask.causal("bottom_right")
    for dtype in (bf16, f32):
        yield _call(dtype, (1, 1, 1, 70, 130, 40, 40))
        yield _call(dtype, (2, 4, 2, 67, 100, 24, 33), Mask.causal() & lengths, "1h1k", dropout_p=0.3)
        yield _call(dtype, (1, 2, 1, 70, 100, 17, 40), corner & _keep(1, 2, 70, 100), "b1q1", dropout_p=0.2)
    yield _call(f16, (1, 2, 2, 130, 150, 64, 64), Mask.window(40, 20))
    yield _call(f16, (2, 2, 1, 33, 100, 40, 24), lengths & Mask.window(None, 3, "bottom_right"), "11qk", scale=-0.3)
    yield _call(f32, (1, 2, 2, 40, 50, 16, 16), scale=-0.4)
    yield _call(bf16, (1, 1, 1, 20, 40, 72, 136), corner)
    yield _call(bf16, (1, 1, 1, 300, 40, 16, 16), corner)  # whole tiles of queries that see nothing
    yield _call(f16, (1, 1, 1, 30, 150, 16, 16), Mask.causal())  # of keys that nobody sees
    yield _call(bf16, (2, 1, 1, 70, 100, 16, 16), lengths)


def _directly(tensors, bias=None, keep=None, lengths=None, dout=None):
    """(out, lse, dq, dk, dv, dbias) of the operators themselves, 40 queries and 64 keys."""
    if dout is None:
        dout = torch.ones(1, 2, 40, 16, dtype=tensors[0].dtype)
    return both("cuda", tensors, bias, keep, lengths, (None, None), (40, 64), ANYWHERE, 0.0, None, dout, None)


def _padding():
    """NaN in keys that no query may see, and in a query that sees no key, changes no bit; lengths are clamped."""
    clean = [_call(torch.bfloat16, (1, 2, 1, 40, 64, 16, 16))[name] for name in ("query", "key", "value")]
    keep = torch.ones(1, 1, 40, 64, dtype=torch.bool)
    keep[..., 30:] = False
    keep[..., 5, :] = False
    dirty = [t.clone() for t in clean]
    dirty[0][:, :, 5] = float("nan")
    for t in dirty[1:]:
        t[:, :, 30:] = float("nan")
    bias = torch.zeros(1, 1, 40, 64).masked_fill(~keep, -torch.inf)
    for hidden in ({"keep": keep}, {"bias": bias}):
        for a, b in zip(_directly(clean, **hidden), _directly(dirty, **hidden), strict=True):
            assert torch.equal(a, b)
    _directly(clean, lengths=torch.tensor([2**31 - 1]))  # nobody looks at a GPU's lengths


def _large_scores():
    """Weights whose sum lse has lost beside the scores still add up to 1: so do what dv makes of dout."""
    tensors = [_call(torch.float32, (1, 2, 1, 40, 64, 16, 16))[name] for name in ("query", "key", "value")]
    tensors[0] *= 2000.0
    tensors[1] *= 1000.0
    tensors[1][:, :, 1::2] = tensors[1][:, :, ::2]  # two keys share each row's maximum
    dout = randn(1, 2, 40, 16, seed=9)
    dv = _directly(tensors, dout=dout)[4]
    torch.testing.assert_close(dv.sum(2), dout.sum((1, 2))[:, None], rtol=0, atol=1e-3)


def trial(simt):
    """Raises, or ends the process, where csrc/cuda is wrong: contract, schedules, padding, large scores, packing."""
    for number, call in enumerate(_calls()):
        for seed in (0, 1, 2) if number in (0, 6) else (number,):  # each kind of schedule, with and without extras
            simt.configure(seed, multiprocessors=3, resident=1 + seed % 3)
            assert_contract("attention", call, "cuda")
    sliced = _call(torch.bfloat16, (1, 1, 1, 20, 40, 24, 24))
    for name in ("query", "key", "value"):  # NaN lies between rows that start at multiples of 16 bytes
        sliced[name][..., 20:] = float("nan")
        sliced[name] = sliced[name][..., :20]
    assert_contract("attention", sliced, "cuda")
    _padding()
    _large_scores()
    ends = torch.tensor([0, 7, 7, 60])
    shapes = (60, 2, 24), (60, 1, 24), (60, 1, 24)
    packed = dict(zip(("query", "key", "value"), (fenced(randn(*shape)) for shape in shapes), strict=True))
    packed |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 53, "max_seqlen_k": 53}
    assert_contract("attention_varlen", {**packed, "mask": Mask.causal()}, "cuda")
