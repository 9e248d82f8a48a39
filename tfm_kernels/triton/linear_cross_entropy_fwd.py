"""linear_cross_entropy_fwd, Triton. Implements LCE.1 to LCE.3 of tfm_kernels/ops/linear_cross_entropy.py.

Owns:    the second launch: a program takes block_m of the rows that count and a part of the classes, a tile of logits
         at a time in registers, and leaves each row's maximum, sum of powers, target's logit and sum of logits. The
         first launch finds the rows that count, the third joins the parts of a row.
Method:  online softmax in float32; a logit is never rounded to the storage type and never leaves registers.
Traffic: reads the weights once for each tile of rows and x once for each tile of classes, mostly from L2; writes 16
         bytes a row and part. 2 M K V FLOPs and M V powers, of the rows that count.
Limits:  float16, bfloat16, float32 (IEEE unless torch allows TF32), sums float32. No float64, no atomics. A target that
         is no class makes loss and lse NaN. The gradients of LCE.6 are not left here: see linear_cross_entropy_bwd.
Config:  pick_config() below, candidates() of _cross_entropy.py; not yet measured on a GPU. Where _gemm.AHEAD is set,
         _linear_cross_entropy_fwd_ahead.py's, which reads the rows that count side by side: M K of memory more.
Source:  own work; the softmax over tiles is that of Milakov and Gimelshein 2018, arXiv:1805.02867.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from . import _gemm, _launch
from ._cross_entropy import FEW_ROWS, call_shape, candidates, live_rows, load_target, logits, places
from ._gemm import Config
from ._tile import max_of_rows, power_of_e, sum_of_rows

# How often linear_cross_entropy_fwd_kernel is compiled at most for one combination of storage type, precision, bias or
# none and smoothing or none, whatever the shapes: two launches of aligned rows, one of others.
MAX_COMPILATIONS = 3
WAVES = 4  # programs for each place on the GPU, so that the last ones to end leave little of it idle
JOIN_PARTS, JOIN_ROWS = 32, 32  # read together by a program of the third launch


def pick_config(M: int, V: int, kind: str, aligned: bool, capability: tuple[int, int]) -> Config:
    """The second launch for M rows and V classes; ``kind`` as _gemm.precision() says.

    ``programs`` is how many there are, ``splits`` into how many parts of whole tiles the classes are cut: as many as
    fill a GPU several times, the rows' tiles of each part side by side, so that they find the same weights in L2.
    """
    found = candidates(kind, aligned, capability[0])
    config = found[0] if M > FEW_ROWS else found[-1]
    places = config.programs * _launch.MULTIPROCESSORS.get(capability[0], 132)
    tiles_m, tiles_v = _launch.cdiv(M, config.block_m), _launch.cdiv(V, config.block_n)
    run = _launch.cdiv(tiles_v, min(tiles_v, _launch.cdiv(WAVES * places, max(tiles_m, 1))))
    splits = _launch.cdiv(tiles_v, run)
    return replace(config, programs=tiles_m * splits, splits=splits)


_RUNTIME = (
    "x_ptr", "weight_ptr", "bias_ptr", "target_ptr", "rows_ptr", "count_ptr", "parts_ptr", "M", "V", "K", "splits",
    "x_stride_m", "weight_stride_v", "target_stride",
)  # fmt: skip


@triton.jit(do_not_specialize=_RUNTIME)
def linear_cross_entropy_fwd_kernel(
    x_ptr, weight_ptr, bias_ptr, target_ptr, rows_ptr, count_ptr, parts_ptr, M: tl.int64, V: tl.int32, K: tl.int64,
    splits: tl.int32, x_stride_m: tl.int64, weight_stride_v: tl.int64, target_stride: tl.int64,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, SMOOTHED: tl.constexpr,
):  # fmt: skip
    """parts_ptr (4, splits, M) float32: maximum, sum of powers, target's logit, and, where SMOOTHED, sum of logits."""
    tiles_m = tl.cdiv(M, BLOCK_M).to(tl.int32)
    m = (tl.program_id(0) % tiles_m).to(tl.int64)
    split = tl.program_id(0) // tiles_m
    count = tl.load(count_ptr)
    if m * BLOCK_M >= count:
        return
    offs_m = m * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = places(rows_ptr, offs_m, count, M)
    target = load_target(target_ptr, rows, M, V, target_stride)
    most = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    powers = tl.zeros((BLOCK_M,), tl.float32)
    own = tl.zeros((BLOCK_M,), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    tiles_v = tl.cdiv(V, BLOCK_N)
    run = tl.cdiv(tiles_v, splits)
    offs_n = tl.arange(0, BLOCK_N)
    for number in tl.range(split * run, tl.minimum(split * run + run, tiles_v)):
        first = V * 0 + number * BLOCK_N
        z = logits(
            x_ptr, weight_ptr, bias_ptr, rows, first, M, V, K, x_stride_m, weight_stride_v, BLOCK_M, BLOCK_N, BLOCK_K,
            ALIGNED, PRECISION, STAGES,
        )  # fmt: skip
        if SMOOTHED:
            total += tl.sum(z, 1)  # 0 of classes that there are not
        own += tl.sum(tl.where(offs_n[None, :] == (target - first)[:, None], z, 0.0), 1)
        there = offs_n < V - first
        z = tl.where(there[None, :], z, float("-inf"))
        top = tl.maximum(most, tl.max(z, 1))  # not NaN, which the sum will show
        shift = tl.where(top == float("-inf"), 0.0, top)  # of -inf alone nothing is subtracted
        powers = powers * power_of_e(most - shift) + tl.sum(power_of_e(z - shift[:, None]), 1)
        most = top
    at = parts_ptr + split.to(tl.int64) * M + offs_m
    step = splits.to(tl.int64) * M
    live = offs_m < count
    tl.store(at, most, mask=live)
    tl.store(at + step, powers, mask=live)
    tl.store(at + 2 * step, own, mask=live)
    if SMOOTHED:
        tl.store(at + 3 * step, total, mask=live)


_JOIN_RUNTIME = (
    "parts_ptr", "target_ptr", "rows_ptr", "count_ptr", "loss_ptr", "lse_ptr", "M", "V", "splits", "target_stride",
    "share", "smoothing", "classes",
)  # fmt: skip


@triton.jit(do_not_specialize=_JOIN_RUNTIME)
def linear_cross_entropy_fwd_join_kernel(
    parts_ptr, target_ptr, rows_ptr, count_ptr, loss_ptr, lse_ptr, M: tl.int64, V: tl.int32, splits: tl.int32,
    target_stride: tl.int64, share, smoothing, classes, BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr,
    SMOOTHED: tl.constexpr,
):  # fmt: skip
    """LCE.2 and LCE.3 of a row from its parts: always the same number of them in the same order."""
    m = tl.program_id(0).to(tl.int64)
    count = tl.load(count_ptr)
    if m * BLOCK_M >= count:
        return
    offs_m = m * BLOCK_M + tl.arange(0, BLOCK_M)
    live = offs_m < count
    rows = places(rows_ptr, offs_m, count, M)
    step = splits.to(tl.int64) * M
    most = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    powers = tl.zeros((BLOCK_M,), tl.float32)
    own = tl.zeros((BLOCK_M,), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    for first in range(0, splits, BLOCK_S):
        offs_s = M * 0 + first + tl.arange(0, BLOCK_S)
        at = parts_ptr + offs_s[:, None] * M + offs_m[None, :]
        mask = (offs_s < splits)[:, None] & live[None, :]
        tops = tl.load(at, mask=mask, other=float("-inf"))
        top = tl.maximum(most, max_of_rows(tops, BLOCK_S, BLOCK_M))
        shift = tl.where(top == float("-inf"), 0.0, top)
        more = tl.load(at + step, mask=mask, other=0.0) * tl.exp(tops - shift[None, :])
        powers = powers * tl.exp(most - shift) + sum_of_rows(more, BLOCK_S, BLOCK_M)
        own += sum_of_rows(tl.load(at + 2 * step, mask=mask, other=0.0), BLOCK_S, BLOCK_M)
        if SMOOTHED:
            total += sum_of_rows(tl.load(at + 3 * step, mask=mask, other=0.0), BLOCK_S, BLOCK_M)
        most = top
    most = tl.where(load_target(target_ptr, rows, M, V, target_stride) >= 0, most, float("nan"))
    grown = tl.log(powers)
    loss = share * (most - own)
    if SMOOTHED:
        loss += smoothing * (most - total / classes)
    tl.store(loss_ptr + rows, loss + grown, mask=live)
    tl.store(lse_ptr + rows, most + grown, mask=live)


def linear_cross_entropy_fwd(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, ignore_index: int, label_smoothing: float,
    save_x: bool, save_weight: bool, save_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The operator linear_cross_entropy_fwd_triton; its contract is tfm_kernels/ops/linear_cross_entropy.py's."""
    op = "linear_cross_entropy_fwd_triton"
    M, K, V = call_shape(op, x, weight, bias, target, label_smoothing)
    if save_x or save_weight or save_bias:
        raise ValueError(f"{op}: save_x, save_weight and save_bias must be False: the backward computes z again")

    kind, smoothed = _gemm.precision(x.dtype), label_smoothing > 0.0
    x, weight = _launch.matrix(x), _launch.matrix(weight)
    bias = None if bias is None else bias.contiguous()
    aligned = _launch.aligned(K, x, weight)
    new = lambda *size: torch.empty(size, dtype=torch.float32, device=x.device)  # noqa: E731
    loss, lse = new(M), new(M)
    if M == 0:
        return loss, lse, new(0), new(0), new(0)
    capability = _launch.capability(x)
    config = pick_config(M, V, kind, aligned, capability)
    kernel, own = linear_cross_entropy_fwd_kernel, {
        "ALIGNED": aligned, "PRECISION": "tf32" if kind == "tf32" else "ieee", "STAGES": config.num_stages,
        "maxnreg": config.max_registers,
    }  # fmt: skip
    if _gemm.AHEAD:
        # Gluon, which is Triton's experiment: not for every import
        from . import _linear_cross_entropy_fwd_ahead as ahead

        chosen = ahead.pick_config(M, V, K, aligned, x.dtype, capability)
        if chosen is not None:
            config, kernel, own = chosen, ahead.linear_cross_entropy_fwd_ahead_kernel, {}
    with _launch.on(x):
        rows, count = live_rows(target, ignore_index, (loss, lse))
        if config.ahead:
            x, bias = x.index_select(0, rows), None if bias is None else pad(bias, (0, -V % config.block_n))
        parts = new(4, config.splits, M)
        of_rows = {"target_ptr": target, "rows_ptr": rows, "count_ptr": count, "target_stride": target.stride(0)}
        _launch.launch(
            kernel, (config.programs,),
            x_ptr=x, weight_ptr=weight, bias_ptr=bias, parts_ptr=parts, M=M, V=V, K=K, splits=config.splits,
            x_stride_m=x.stride(0), weight_stride_v=weight.stride(0), **of_rows, BLOCK_M=config.block_m,
            BLOCK_N=config.block_n, BLOCK_K=config.block_k, SMOOTHED=smoothed, num_warps=config.num_warps,
            enable_fp_fusion=False, **own,
        )  # fmt: skip
        _launch.launch(
            linear_cross_entropy_fwd_join_kernel, (_launch.cdiv(M, JOIN_ROWS),),
            parts_ptr=parts, loss_ptr=loss, lse_ptr=lse, M=M, V=V, splits=config.splits, **of_rows,
            share=1.0 - label_smoothing, smoothing=label_smoothing, classes=float(V), BLOCK_S=JOIN_PARTS,
            BLOCK_M=JOIN_ROWS, SMOOTHED=smoothed, num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
    return loss, lse, new(0), new(0), new(0)
