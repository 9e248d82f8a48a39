"""linear_cross_entropy_bwd, Triton. Implements LCE.4 and LCE.5 of tfm_kernels/ops/linear_cross_entropy.py.

Owns:    classes are taken a chunk at a time, so many that dz of all rows that count fits in CHUNK_BYTES, which an L2
         holds. Of each chunk persistent programs compute the logits again, a tile at a time in registers, and write dz
         and, one row for each tile of rows, partial dbias; two products of _gemm.py follow: the chunk's rows of
         dweight, summed over all rows at once, and its share of dx, which is added in float32 to that of the chunks
         before. Every element has one owner that adds in one order.
Method:  the logits are computed again although the forward had them: their 2 M K V FLOPs stand against 8 M V bytes, for
         they must not be rounded, which at K of some hundreds takes as long; one rule then serves every reduction, the
         host need not wait to see whether all rows have one dloss, and inference and training share the forward.
Traffic: a chunk reads x and its weights twice, dz is written once and read twice, from L2; dx is read and written once
         a chunk. 6 M K V FLOPs and M V powers, of the rows that count.
Memory:  CHUNK_BYTES, but 256 classes of all rows where that is more; M K float32 for dx; the rows of x that count, side
         by side, for dweight; V float32 for each tile of rows for dbias.
Limits:  float16, bfloat16, float32 (IEEE unless torch allows TF32), sums float32. No float64, no atomics.
Config:  pick_config() below and of _gemm.py, _sums.py, candidates() of _cross_entropy.py; not yet measured on a GPU.
         Where _gemm.AHEAD is set, _linear_cross_entropy_bwd_ahead.py's, which reads the rows that count side by side
         and leaves dbias' sums, a row for each warp's 16 rows, of a chunk alone.
Source:  own work.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from . import _gemm, _launch
from ._cross_entropy import FEW_ROWS, call_shape, candidates, live_rows, load_target, logits, places
from ._gemm import PART, Config, columns, gemm, pick, place
from ._sums import sum_rows
from ._tile import power_of_e, store_strided

# As in linear_cross_entropy_fwd: two launches of aligned rows, one of others; bias or none, which gradients or not.
MAX_COMPILATIONS = 3
CHUNK_BYTES = 2**25
STEP = 256  # classes of a chunk are a multiple, as of every tile


def pick_config(M: int, V: int, kind: str, aligned: bool, capability: tuple[int, int]) -> Config:
    """The first launch, for dz (M, V) of a chunk of V classes; ``kind`` as _gemm.precision() says."""
    found = candidates(kind, aligned, capability[0])
    return pick(found if M > FEW_ROWS else found[-1:], M, V, capability)


def pick_chunk(M: int, V: int, itemsize: int) -> int:
    """How many of V classes are taken at once."""
    fit = CHUNK_BYTES // (itemsize * max(M, 1)) // STEP * STEP
    return min(max(fit, STEP), _launch.cdiv(V, STEP) * STEP)


_RUNTIME = (
    "x_ptr", "weight_ptr", "bias_ptr", "target_ptr", "rows_ptr", "count_ptr", "dloss_ptr", "lse_ptr", "dz_ptr",
    "dbias_ptr", "M", "V", "K", "begin", "chunk", "x_stride_m", "weight_stride_v", "target_stride", "dloss_stride",
    "dz_stride_m", "share", "even",
)  # fmt: skip


@triton.jit
def finish(
    z, dz_ptr, dbias_ptr, dloss, lse, at, live, offs_m, m, first, begin, count, V, dz_stride_m, share, even,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """LCE.4 of columns first + 0, 1, ... of a chunk that begins at class ``begin``: writes dz and sums over rows."""
    offs_n = tl.arange(0, BLOCK_N)
    dz = power_of_e(z - lse[:, None]) - tl.where(offs_n[None, :] == at[:, None], share, 0.0) - even
    there = offs_n < V - begin - first
    dz = tl.where(live[:, None] & there[None, :], dz * dloss[:, None], 0.0)
    store_strided(dz, dz_ptr, offs_m, first, count, first + BLOCK_N, dz_stride_m, BLOCK_N, True)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + m * V + begin + first + offs_n, tl.sum(dz, 0), mask=there)


@triton.jit(do_not_specialize=_RUNTIME)
def linear_cross_entropy_bwd_kernel(
    x_ptr, weight_ptr, bias_ptr, target_ptr, rows_ptr, count_ptr, dloss_ptr, lse_ptr, dz_ptr, dbias_ptr, M: tl.int64,
    V: tl.int32, K: tl.int64, begin: tl.int32, chunk: tl.int32, x_stride_m: tl.int64, weight_stride_v: tl.int64,
    target_stride: tl.int64, dloss_stride: tl.int64, dz_stride_m: tl.int64, share, even, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dz_ptr: rows that count, side by side, of ``chunk`` classes, and zeros up to the end of the last tile of them;
    dbias_ptr (tiles of rows, V) float32, zeros before.
    """
    count = tl.load(count_ptr)
    tiles_m = tl.cdiv(count, BLOCK_M).to(tl.int32)
    tiles_n = tl.cdiv(chunk, BLOCK_N)
    for number in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        m, n = place(number, tiles_m, tiles_n, GROUP_M)
        offs_m = m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        first = n * BLOCK_N
        rows = places(rows_ptr, offs_m, count, M)
        z = logits(
            x_ptr, weight_ptr, bias_ptr, rows, begin + first, M, V, K, x_stride_m, weight_stride_v, BLOCK_M, BLOCK_N,
            BLOCK_K, ALIGNED, PRECISION, STAGES,
        )  # fmt: skip
        live = rows < M
        at = load_target(target_ptr, rows, M, V, target_stride) - begin - first
        dloss = tl.load(dloss_ptr + rows * dloss_stride, mask=live, other=0.0)
        lse = tl.load(lse_ptr + rows, mask=live, other=0.0)
        PARTS: tl.constexpr = BLOCK_N // PART
        for part in tl.static_range(PARTS):
            finish(
                columns(z, part, PARTS, BLOCK_M, BLOCK_N), dz_ptr, dbias_ptr, dloss, lse, at - part * PART, live,
                offs_m, m.to(tl.int64), first + part * PART, begin, count, V, dz_stride_m, share, even, PART,
            )  # fmt: skip


def linear_cross_entropy_bwd(
    dloss: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, lse: Tensor, gx: Tensor,
    gweight: Tensor, gbias: Tensor, ignore_index: int, label_smoothing: float, need_x: bool, need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The operator linear_cross_entropy_bwd_triton; its contract is tfm_kernels/ops/linear_cross_entropy.py's."""
    op = "linear_cross_entropy_bwd_triton"
    M, K, V = call_shape(op, x, weight, bias, target, label_smoothing, dloss=dloss, lse=lse)
    if gx.numel() or gweight.numel() or gbias.numel():
        raise ValueError(f"{op}: gx, gweight and gbias must be empty: its forward leaves no gradients")

    kind, capability = _gemm.precision(x.dtype), _launch.capability(x)
    x, weight, lse = _launch.matrix(x), _launch.matrix(weight), lse.contiguous()
    bias = None if bias is None else bias.contiguous()
    aligned = _launch.aligned(K, x, weight)
    new = lambda *size, dtype=x.dtype: torch.empty(size, dtype=dtype, device=x.device)  # noqa: E731
    zeros = lambda *size, dtype=torch.float32: torch.zeros(size, dtype=dtype, device=x.device)  # noqa: E731
    if M == 0 or not (need_x or need_weight or need_bias):
        return (
            new(M, K) if need_x else new(0),
            zeros(V, K, dtype=x.dtype) if need_weight else new(0),
            zeros(V, dtype=x.dtype) if need_bias else new(0),
        )
    chunk = pick_chunk(M, V, x.element_size())
    config = pick_config(M, chunk, kind, aligned, capability)
    of_x = _gemm.pick_added(M, K, chunk, aligned, x.dtype, capability)
    kernel, own = linear_cross_entropy_bwd_kernel, {
        "ALIGNED": aligned, "PRECISION": "tf32" if kind == "tf32" else "ieee", "STAGES": config.num_stages,
        "maxnreg": config.max_registers,
    }  # fmt: skip
    size_of_sums = _launch.cdiv(M, config.block_m), V
    if _gemm.AHEAD:
        # Gluon, which is Triton's experiment: not for every import
        from . import _linear_cross_entropy_bwd_ahead as ahead

        chosen = ahead.pick_config(M, chunk, K, aligned, x.dtype, capability)
        if chosen is not None:
            config, kernel, own = chosen, ahead.linear_cross_entropy_bwd_ahead_kernel, {}
            size_of_sums = _launch.cdiv(M, config.block_m) * ahead.SUMS, chunk
            bias = None if bias is None else pad(bias, (0, -V % config.block_n))
    sums = zeros(of_x.splits, M * K if need_x else 0)
    dweight, dbias = new(V, K) if need_weight else new(0), new(V) if need_bias else new(0)
    dbiases = zeros(*size_of_sums) if need_bias else None
    with _launch.on(x):
        rows, count = live_rows(target, ignore_index)
        live_x = x.index_select(0, rows) if need_weight or config.ahead else x
        dz = new(M, chunk)
        for begin in range(0, V, chunk):
            classes = slice(begin, min(begin + chunk, V))
            part = dz[:, : classes.stop - begin]
            _launch.launch(
                kernel, (config.programs,),
                x_ptr=live_x if config.ahead else x, weight_ptr=weight[classes] if config.ahead else weight,
                bias_ptr=bias, target_ptr=target, rows_ptr=rows, count_ptr=count, dloss_ptr=dloss, lse_ptr=lse,
                dz_ptr=dz, dbias_ptr=dbiases, M=M, V=V, K=K, begin=begin, chunk=part.shape[1],
                x_stride_m=(live_x if config.ahead else x).stride(0), weight_stride_v=weight.stride(0),
                target_stride=target.stride(0), dloss_stride=dloss.stride(0), dz_stride_m=chunk,
                share=1.0 - label_smoothing, even=label_smoothing / V, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
                BLOCK_K=config.block_k, GROUP_M=_gemm.GROUP_M, num_warps=config.num_warps, enable_fp_fusion=False,
                **own,
            )  # fmt: skip
            if need_x:
                gemm(
                    part, weight[classes], of_x, kind, aligned, a_k_inner=True, b_k_inner=False, padded=True,
                    count=count, rows=rows, into=sums,
                )  # fmt: skip
            if need_weight:
                gemm(
                    part, live_x, _gemm.pick_split(part.shape[1], K, M, kind, aligned, capability), kind, aligned,
                    a_k_inner=False, b_k_inner=False, padded=True, count=count, out=dweight[classes],
                )  # fmt: skip
            if dbiases is not None and config.ahead:
                sum_rows(dbiases[:, : part.shape[1]], x.dtype, dbias[classes])
        if dbiases is not None and not config.ahead:
            sum_rows(dbiases, x.dtype, dbias)
        return sum_rows(sums, x.dtype).view(M, K) if need_x else new(0), dweight, dbias
