"""attention_fwd, Triton. Implements A.1 to A.4 of tfm_kernels/ops/attention.py.

Owns:    one program = block_m queries of one head; the tile of queries stays, tiles of keys and values pass. Tiles that
         no row sees are left out; those that all rows see need no mask. With a keep matrix, the tiles come from the
         lists of _attention_tiles.py.
Method:  online softmax; weights are rounded to the values' type for the second product, statistics are float32. Where
         the result is not finite although keep or bias hide pairs, the tile is done once more with those values as 0
         that none of its rows sees: NaN in padding then reaches nothing, and calls without it pay nothing.
Traffic: reads q once, k and v once for each tile of queries that sees them (L2), bias and keep once; writes out, lse.
Limits:  D, Dv <= 256; float16, bfloat16, float32 (IEEE unless TF32 is allowed). No float64.
Config:  pick_config() below; for compute capability 9 measured on an H200.
Source:  own work, after Dao 2023, arXiv:2307.08691, algorithm 1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import _attention_fwd_few, _launch
from ._attention import (
    band,
    dots,
    edges_first,
    finish,
    is_finite,
    kept_tile,
    kernel,
    keys_met,
    load_rows,
    sequence,
    start,
    store_rows,
    tiles_met,
    weigh,
)
from ._attention_call import Call, Config, rows_aligned
from ._attention_pairs import score_tile
from ._tile import anew, settled, unknown

# Compilations for one combination of storage types and of optional arguments, whatever the shapes: five head widths,
# two tiles each, rows that start at multiples of 16 bytes or not, and so for bias and keep.
MAX_COMPILATIONS = 40

# Whether calls that _attention_fwd_ahead.py can do are done there, which no GPU has proven yet: `python -m bench.gpu
# --ahead` does that.
AHEAD = False


def pick_config(dim: int, queries: int, extras: str, dtype: torch.dtype, capability: tuple[int, int]) -> Config:
    """The launch for heads of ``dim`` (the larger of D and Dv) on a GPU of this compute capability.

    16 bits: 128 queries on 8 warps, two warpgroups of 64 rows on sm_90; few queries: 64. ``extras`` take registers, and
    so smaller tiles: "none", "aligned" (dropout, bias or keep) or "unaligned" (bias or keep read one by one). No launch
    spills (tests/aot/attention.json). float32 multiplies without matrix units: tiles of what a thread can hold.

    On an H200 two programs of a warpgroup each and three tiles ahead took 0.68 to 0.96 of the time of one of two
    warpgroups where weights and values fill the time, heads of 128 and extras; of heads of 64 with none 1.0 to 1.08.
    """
    block_d = max(16, _launch.next_power_of_2(dim))
    few, none = queries <= 64, extras == "none"
    if dtype == torch.float32:
        block_m, num_warps = 64 if block_d < 256 else 32, 8 if block_d >= 128 else 4
        return Config(block_m, 16, block_d, 16, num_warps, num_stages=1, max_registers=255)
    if _launch.by_warps(capability):
        return _by_warps(block_d, few, extras)
    hopper = capability[0] == 9
    if hopper and none and block_d == 256 and not few:
        return Config(128, 64 if dim % 8 == 0 else 32, block_d, 0, num_warps=8, num_stages=2)
    if block_d == 256 or extras == "unaligned":
        return Config(64, 16 if block_d == 256 and extras == "unaligned" else 32, block_d, 0, 8, num_stages=2)
    if hopper and (few or not none or block_d == 128):
        return Config(64, 32 if not none and block_d == 128 else 64, block_d, 0, num_warps=4, num_stages=3)
    if few:
        return _of_few(block_d, none)
    if block_d == 128:
        return Config(128, 64 if none else 32, block_d, 0, num_warps=8, num_stages=2)
    return Config(128, 64, block_d, 0, num_warps=8, num_stages=3)


def _of_few(block_d: int, none: bool) -> Config:
    """Few queries, of a call without extras or with."""
    if none:
        return Config(64, 64, block_d, 0, num_warps=4, num_stages=2)
    return Config(64, 32, block_d, 0, num_warps=4, num_stages=2, max_registers=255)


def _by_warps(block_d: int, few: bool, extras: str) -> Config:
    """Where each warp multiplies by itself: tiles that warps share without doing the same, of those that do not spill.

    No GPU has told which is fastest: what was least is the larger of the clocks of products, instructions and reads of
    shared memory by which a multiprocessor of an A100 gets a pair done.
    """
    none, narrow = extras == "none", block_d <= 64
    if block_d == 256 or (few and block_d == 128 and not none):
        return Config(32, 32, block_d, 0, num_warps=4, num_stages=2)
    if few or (narrow and extras == "unaligned"):
        return _of_few(block_d, none)
    if narrow:
        return Config(128, 64 if none else 32, block_d, 0, num_warps=8, num_stages=3)
    return Config(128, 64 if none else 16, block_d, 0, num_warps=8, num_stages=2)


@triton.jit
def meet(
    acc, sums, tops, q, q_ptr, k_ptr, v_ptr, bias_ptr, keep_ptr, seed_ptr, first_row, m0, n0, begin, end, tq, tk, live,
    low, high, D, DV, q_stride_t, k_stride_t, v_stride_t, bias_stride_t, bias_stride_d, keep_stride_t, keep_stride_d,
    scale, step, last_dropped, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PAIRS_ALIGNED: tl.constexpr, PRECISION: tl.constexpr, SHIELDED: tl.constexpr, CHUNK: tl.constexpr,
    MASKED: tl.constexpr, CAREFUL: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """One tile of keys and values: A.1, and A.3 and A.4 up to the division by the sum."""
    k = load_rows(k_ptr, n0, begin, end, k_stride_t, D, BLOCK_N, BLOCK_D, MASKED) if CHUNK == 0 else q
    x = dots(
        q, q_ptr, m0, m0, tq, q_stride_t, k, k_ptr, n0, begin, end, k_stride_t, D, BLOCK_M, BLOCK_N, CHUNK, PRECISION
    )  # fmt: skip
    x = score_tile(
        x, bias_ptr, keep_ptr, m0, n0, tq, tk, live, low, high, bias_stride_t, bias_stride_d, keep_stride_t,
        keep_stride_d, scale, BLOCK_M, BLOCK_N, PAIRS_ALIGNED, MASKED, False, SHIELDED, AHEAD,
    )  # fmt: skip
    p, sums, tops, decay = weigh(x, sums, tops, step, not MASKED and bias_ptr is None)
    if seed_ptr is not None:
        FRUGAL: tl.constexpr = BLOCK_D == 256  # which leaves no registers
        p = tl.where(kept_tile(seed_ptr, first_row, m0, n0, last_dropped, BLOCK_M, BLOCK_N, FRUGAL), p, 0.0)
    v = load_rows(v_ptr, n0, begin, end, v_stride_t, DV, BLOCK_N, BLOCK_D, MASKED)
    if CAREFUL:
        seen = tl.max((x != float("-inf")).to(tl.int32), 0)
        v = tl.where((seen > 0)[:, None], v, tl.zeros((BLOCK_N, BLOCK_D), tl.float32).to(v.dtype))
    acc = acc * decay[:, None]
    return tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION), sums, tops


@triton.jit
def attend(
    q, q_ptr, k_ptr, v_ptr, bias_ptr, keep_ptr, counts_ptr, tiles_ptr, seed_ptr, first_row, slot, list_width, m0, tq,
    tk, live, low, high, D, DV, q_stride_t, k_stride_t, v_stride_t, bias_stride_t, bias_stride_d, keep_stride_t,
    keep_stride_d, scale, step, last_dropped, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PAIRS_ALIGNED: tl.constexpr, PRECISION: tl.constexpr, SHIELDED: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """(acc, sums, tops) of a tile of queries against all the keys that it sees."""
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    sums = tl.zeros((BLOCK_M,), tl.float32)
    tops = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    begin, end, full_begin, full_end = keys_met(m0, tq, live, low, high, BLOCK_M)
    first, full_first, full_last, last = tiles_met(begin, end, full_begin, full_end, BLOCK_N)
    # disable_licm: what does not change from tile to tile stays in the loop where it takes too many registers
    if keep_ptr is not None or bias_ptr is not None:
        acc = unknown(acc)
    if keep_ptr is not None:
        for c in tl.range(0, tl.load(counts_ptr + slot), num_stages=STAGES, disable_licm=CAREFUL):
            n0 = start(tl.load(tiles_ptr + slot * list_width + c), tk, BLOCK_N)
            acc, sums, tops = meet(
                acc, sums, tops, q, q_ptr, k_ptr, v_ptr, bias_ptr, keep_ptr, seed_ptr, first_row, m0, n0, begin, end,
                tq, tk, live, low, high, D, DV, q_stride_t, k_stride_t, v_stride_t, bias_stride_t, bias_stride_d,
                keep_stride_t, keep_stride_d, scale, step, last_dropped, BLOCK_M, BLOCK_N, BLOCK_D, PAIRS_ALIGNED,
                PRECISION, SHIELDED, CHUNK, True, CAREFUL, STAGES > 1,
            )  # fmt: skip
    else:
        # what is rare needs no loop of its own for tiles that all rows see, but the same order
        WHOLE: tl.constexpr = not CAREFUL
        CROWDED: tl.constexpr = WHOLE and bias_ptr is not None and seed_ptr is not None and BLOCK_D != 256
        for c in tl.range(
            first, last - (full_last - full_first) if WHOLE else last, num_stages=STAGES, disable_licm=CROWDED
        ):
            n0 = start(edges_first(c, full_first, full_last, last, WHOLE), tk, BLOCK_N)
            acc, sums, tops = meet(
                acc, sums, tops, q, q_ptr, k_ptr, v_ptr, bias_ptr, keep_ptr, seed_ptr, first_row, m0, n0, begin, end,
                tq, tk, live, low, high, D, DV, q_stride_t, k_stride_t, v_stride_t, bias_stride_t, bias_stride_d,
                keep_stride_t, keep_stride_d, scale, step, last_dropped, BLOCK_M, BLOCK_N, BLOCK_D, PAIRS_ALIGNED,
                PRECISION, SHIELDED, CHUNK, True, CAREFUL, STAGES > 1,
            )  # fmt: skip
        if WHOLE:
            for c in tl.range(full_first, full_last, num_stages=STAGES):
                acc, sums, tops = meet(
                    acc, sums, tops, q, q_ptr, k_ptr, v_ptr, bias_ptr, keep_ptr, seed_ptr, first_row, m0,
                    start(c, tk, BLOCK_N), begin, end, tq, tk, live, low, high, D, DV, q_stride_t, k_stride_t,
                    v_stride_t, bias_stride_t, bias_stride_d, keep_stride_t, keep_stride_d, scale, step, last_dropped,
                    BLOCK_M, BLOCK_N, BLOCK_D, PAIRS_ALIGNED, PRECISION, SHIELDED, CHUNK, False, False, STAGES > 1,
                )  # fmt: skip
    return acc, sums, tops


@kernel
def attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, keep_ptr, counts_ptr, tiles_ptr, lengths_ptr, cu_q_ptr, cu_k_ptr, seed_ptr, out_ptr,
    lse_ptr, H: tl.int32, G: tl.int32, Tq: tl.int32, Tk: tl.int32, total_q: tl.int64, total_k: tl.int64,
    row_step: tl.int64, D: tl.int32, DV: tl.int32, OUT_D: tl.int32,
    q_stride_b: tl.int64, q_stride_h: tl.int64, q_stride_t: tl.int64,
    k_stride_b: tl.int64, k_stride_h: tl.int64, k_stride_t: tl.int64,
    v_stride_b: tl.int64, v_stride_h: tl.int64, v_stride_t: tl.int64,
    out_stride_b: tl.int64, out_stride_h: tl.int64, out_stride_t: tl.int64,
    lse_stride_b: tl.int64, lse_stride_h: tl.int64,
    bias_stride_b: tl.int64, bias_stride_h: tl.int64, bias_stride_t: tl.int64, bias_stride_d: tl.int64,
    keep_stride_b: tl.int64, keep_stride_h: tl.int64, keep_stride_t: tl.int64, keep_stride_d: tl.int64,
    list_stride_b: tl.int64, list_stride_h: tl.int64, list_width: tl.int64,
    low: tl.int64, high: tl.int64, end_low: tl.int64, end_high: tl.int64,
    scale, step, unit, keep_scale, last_dropped: tl.int32,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, OUT_ALIGNED: tl.constexpr,
    PAIRS_ALIGNED: tl.constexpr, PRECISION: tl.constexpr, SHIELDED: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A tile of queries of one head; the last tile, which sees most where a mask is causal, comes first."""
    tiles = (Tq + BLOCK_M - 1) // BLOCK_M
    row_tile = tiles - 1 - tl.program_id(0) % tiles
    b = (tl.program_id(0) // tiles // H).to(tl.int64)
    h = (tl.program_id(0) // tiles % H).to(tl.int64)
    q0, k0, tq, tk, live = sequence(b, Tq, Tk, total_q, total_k, lengths_ptr, cu_q_ptr, cu_k_ptr)
    low, high = band(tq, tk, low, high, end_low, end_high)
    m0 = row_tile * BLOCK_M
    if m0 >= tq:
        return
    kv = h // G
    k_ptr = settled(k_ptr + b * k_stride_b + kv * k_stride_h + k0 * k_stride_t)
    v_ptr = settled(v_ptr + b * v_stride_b + kv * v_stride_h + k0 * v_stride_t)
    if bias_ptr is not None:
        bias_ptr = settled(bias_ptr + b * bias_stride_b + h * bias_stride_h)
    slot = b * list_stride_b + h * list_stride_h + row_tile
    if keep_ptr is not None:
        keep_ptr = settled(keep_ptr + b * keep_stride_b + h * keep_stride_h)
    q_ptr += b * q_stride_b + h * q_stride_h + q0 * q_stride_t
    q = m0  # read where it is used
    if CHUNK == 0:
        q = load_rows(q_ptr, m0, m0, tq, q_stride_t, D, BLOCK_M, BLOCK_D, True)
    first_row = (b * H + h) * row_step
    acc, sums, tops = attend(
        q, q_ptr, k_ptr, v_ptr, bias_ptr, keep_ptr, counts_ptr, tiles_ptr, seed_ptr, first_row, slot, list_width, m0,
        tq, tk, live, low, high, D, DV, q_stride_t, k_stride_t, v_stride_t, bias_stride_t, bias_stride_d, keep_stride_t,
        keep_stride_d, scale, step, last_dropped, BLOCK_M, BLOCK_N, BLOCK_D, PAIRS_ALIGNED, PRECISION, SHIELDED,
        CHUNK, STAGES, False,
    )  # fmt: skip
    if bias_ptr is not None or keep_ptr is not None:
        if not is_finite(acc):  # sums hold already, and to the bit
            b, h, row_tile = anew(b), anew(h), anew(row_tile)
            first_row = (b * H + h) * row_step
            slot = b * list_stride_b + h * list_stride_h + row_tile
            acc, _, tops = attend(
                q, q_ptr, k_ptr, v_ptr, bias_ptr, keep_ptr, counts_ptr, tiles_ptr, seed_ptr, first_row, slot,
                list_width, m0, tq, tk, live, low, high, D, DV, q_stride_t, k_stride_t, v_stride_t, bias_stride_t,
                bias_stride_d, keep_stride_t, keep_stride_d, scale, step, last_dropped, BLOCK_M, BLOCK_N, BLOCK_D,
                PAIRS_ALIGNED, PRECISION, SHIELDED, CHUNK, 1, True,
            )  # fmt: skip
    b, h, m0 = anew(b), anew(h), anew(m0)
    out, lse = finish(acc, sums, tops, unit, keep_scale)
    out_ptr += b * out_stride_b + h * out_stride_h + q0 * out_stride_t
    store_rows(out, out_ptr, m0, tq, out_stride_t, OUT_D, BLOCK_M, BLOCK_D, OUT_ALIGNED)
    offs_m = tl.arange(0, BLOCK_M)
    lse_ptr += b * lse_stride_b + h * lse_stride_h + q0 + m0
    tl.store(lse_ptr + offs_m, lse, mask=offs_m < tq - m0)


def attention_fwd(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, keep: Tensor | None, key_lengths: Tensor | None,
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, max_seqlen_q: int, max_seqlen_k: int, window: list[int],
    scale: float, dropout_p: float, seed: Tensor | None, deterministic: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The operator attention_fwd_triton; its contract is tfm_kernels/ops/attention.py's."""
    call = Call(
        "attention_fwd_triton", query, key, value, bias, keep, key_lengths, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
        max_seqlen_k, window, scale, dropout_p, seed,
    )  # fmt: skip
    out, lse = call.like(query, call.value_dim), call.statistics()
    if out.numel() == 0:
        return out, lse
    width, extras, capability = max(call.dim, call.value_dim), call.extras(), _launch.capability(query)
    few = _attention_fwd_few.pick_config(
        width, call.heads // call.kv_heads, call.queries, call.keys, call.reach(), call.batch * call.kv_heads, extras,
        query.dtype, capability,
    )  # fmt: skip
    if few is not None:
        with _launch.on(query):
            _attention_fwd_few.attend_few(call, few, out, lse)
        return out, lse
    if AHEAD and attend_ahead(call, width, extras, out, lse, capability):
        return out, lse
    config = pick_config(width, call.queries, extras, query.dtype, capability)
    programs = _launch.cdiv(call.queries, config.block_m) * call.heads * call.batch
    with _launch.on(query):
        call.launch(
            attention_fwd_kernel, programs, config, **call.keep_tiles(config.block_m, config.block_n, of_keys=False),
            out_ptr=out, lse_ptr=lse, **call.strides("out", out), OUT_D=call.value_dim, OUT_ALIGNED=rows_aligned(out),
            SHIELDED=call.shielded(config.block_m),
        )  # fmt: skip
    return out, lse


def attend_ahead(call: Call, width: int, extras: str, out: Tensor, lse: Tensor, capability: tuple[int, int]) -> bool:
    """Whether the call is one of _attention_fwd_ahead.py, which then writes out and lse."""
    from . import _attention_fwd_ahead as ahead  # Gluon, which is Triton's experiment: not for every import

    config = ahead.pick_config(width, call.queries, extras, call.bias is not None, call.query.dtype, capability)
    if config is None:
        return False
    with _launch.on(call.query):
        call.launch(
            ahead.attention_fwd_ahead_kernel, _launch.cdiv(call.queries, config.block_m) * call.heads * call.batch,
            config, **call.keep_tiles(config.block_m, config.block_n, of_keys=False), out_ptr=out, lse_ptr=lse,
            **call.strides("out", out), OUT_D=call.value_dim, OUT_ALIGNED=rows_aligned(out),
            WARPS=config.num_warps,
        )  # fmt: skip
    return True
