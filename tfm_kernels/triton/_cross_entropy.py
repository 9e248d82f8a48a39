"""What the Triton kernels of linear_cross_entropy share: which rows count, a tile of logits, the shapes of a call.

Rows that count are numbered on the device, in order, so that the host never waits for their number: live_rows() leaves
their places in the call and how many they are; a program whose tile of them is empty ends at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import _launch
from ._gemm import Config, product
from ._tile import load_columns

BLOCK = 4096  # rows that live_rows_kernel looks at together
FEW_ROWS = 64  # up to which only the smallest tile is taken


def candidates(kind: str, aligned: bool, major: int) -> tuple[Config, ...]:
    """The launches that compute logits, from the largest tile to the smallest; ``programs`` on one multiprocessor.

    The end of a tile is arithmetic, exponentials above all, so that two programs share a multiprocessor where they fit:
    one multiplies while the other ends a tile.
    """
    if kind == "ieee":  # no tensor cores: every thread multiplies, from registers; left alone, the compiler spills
        if not aligned:
            return (Config(32, 32, 16, 4, 2, 2, 255),)
        return Config(64, 128, 16, 8, 3, 1), Config(64, 64, 16, 8, 3, 1, 255)
    block_k = 64 if kind == "half" and major in (9, 10) else 32  # others have half of their shared memory
    if not aligned:  # read element by element
        return (Config(64, 64, block_k, 8, 2, 1),)
    if kind == "half" and major == 9:  # by one warpgroup: two would leave 128 registers, and a bias spills
        large = Config(128, 128, block_k, 4, 3, 2)
    else:
        large = Config(128, 128, block_k, 8, 3, 1)
    return large, Config(64, 64, block_k, 4, 3, 2)


_RUNTIME = ("target_ptr", "rows_ptr", "count_ptr", "loss_ptr", "lse_ptr", "M", "target_stride", "ignore_index")


@triton.jit(do_not_specialize=_RUNTIME)
def live_rows_kernel(
    target_ptr, rows_ptr, count_ptr, loss_ptr, lse_ptr, M: tl.int64, target_stride: tl.int64, ignore_index: tl.int64,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """rows_ptr[:count] = the rows that are not ignored, in order; the others' loss and lse are 0. One program."""
    count = M * 0
    for first in range(0, M, BLOCK):
        offs_m = M * 0 + first + tl.arange(0, BLOCK)
        target = tl.load(target_ptr + offs_m * target_stride, mask=offs_m < M, other=0)
        live = (target != ignore_index) & (offs_m < M)
        place = count + tl.cumsum(live.to(tl.int32), 0) - 1
        tl.store(rows_ptr + place, offs_m, mask=live)
        if loss_ptr is not None:
            ignored = (target == ignore_index) & (offs_m < M)
            tl.store(loss_ptr + offs_m, tl.zeros((BLOCK,), tl.float32), mask=ignored)
            tl.store(lse_ptr + offs_m, tl.zeros((BLOCK,), tl.float32), mask=ignored)
        count += tl.sum(live.to(tl.int32), 0)
    tl.store(count_ptr, count)


@triton.jit
def places(rows_ptr, offs_m, count, M):
    """(BLOCK_M,) int64: where rows offs_m of those that count are in the call; M, which is none, behind the last."""
    return tl.load(rows_ptr + offs_m, mask=offs_m < count, other=M)


@triton.jit
def logits(
    x_ptr, weight_ptr, bias_ptr, rows, first, M, V, K, x_stride_m, weight_stride_v, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """LCE.1: (BLOCK_M, BLOCK_N) float32 of rows ``rows`` of x, and classes first + 0, 1, ..."""
    z = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if bias_ptr is not None:  # first, when registers are free; V is seldom a multiple of 8
        z += load_columns(bias_ptr, first, V, BLOCK_N, False)
    offs_v = V.to(tl.int64) * 0 + first + tl.arange(0, BLOCK_N)
    return product(
        z, x_ptr, weight_ptr, rows, offs_v, M, V, K * 0, K, x_stride_m, weight_stride_v, BLOCK_K, True, True, ALIGNED,
        PRECISION, STAGES,
    )  # fmt: skip


@triton.jit
def load_target(target_ptr, rows, M, V, target_stride):
    """int32: the targets of rows ``rows``; -1 where there is no row, or where the target is no class."""
    target = tl.load(target_ptr + rows * target_stride, mask=rows < M, other=-1)
    return tl.where((target >= 0) & (target < V), target, -1).to(tl.int32)


def live_rows(target: Tensor, ignore_index: int, losses: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """(M,) int64, the rows that count and then some row again and again, and () int64, how many count.

    Args:
        target: (M,) int64, any stride.
        ignore_index: the target of rows that do not count.
        losses: loss and lse, (M,) float32, which get the zeros of rows that are ignored.
    """
    rows = torch.zeros(target.shape, dtype=torch.int64, device=target.device)
    count = torch.empty((), dtype=torch.int64, device=target.device)
    loss, lse = losses or (None, None)
    _launch.launch(
        live_rows_kernel, (1,),
        target_ptr=target, rows_ptr=rows, count_ptr=count, loss_ptr=loss, lse_ptr=lse, M=target.shape[0],
        target_stride=target.stride(0), ignore_index=ignore_index, BLOCK=BLOCK, num_warps=16, enable_fp_fusion=False,
    )  # fmt: skip
    return rows, count


def call_shape(
    op: str, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, label_smoothing: float, **rows: Tensor
) -> tuple[int, int, int]:
    """(M, K, V) of a call, checked; ``rows`` are float32 numbers, one a row."""
    _launch.check_device(op, x)
    if x.dim() != 2 or weight.dim() != 2 or not 1 <= weight.shape[0] < 2**31:
        raise ValueError(
            f"{op}: x and weight must have shapes (M, K) and (V, K) with V from 1 to 2**31 - 1, got {tuple(x.shape)} "
            f"and {tuple(weight.shape)}"
        )
    (M, K), V, one = x.shape, weight.shape[0], (x.dtype,)
    per_row = {name: (value, (M,), (torch.float32,)) for name, value in rows.items()}
    _launch.check(
        op, x, x=(x, (M, K), _launch.DTYPES), weight=(weight, (V, K), one), bias=(bias, (V,), one),
        target=(target, (M,), (torch.int64,)), **per_row,
    )  # fmt: skip
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"{op}: label_smoothing must lie in [0, 1], got {label_smoothing}")
    return M, K, V
