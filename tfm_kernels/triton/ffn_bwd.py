"""ffn_bwd, Triton. Implements FFN.5 to FFN.7 of tfm_kernels/ops/ffn.py.

Owns:    the first launch, persistent programs: each takes every programs-th tile of dh = dy w2, sums it in registers
         and ends with dropout, gate and slope: dp, dg, h again from preact, and one row of partial db1. The products
         of _gemm.py follow: dx, and dw1, dgate, dw2, whose sums over many rows are cut in parts.
Traffic: reads dy, w2 and preact, writes h, dp and dg; these again, dg twice where the gate has a bias, and x, w1, gate;
         writes the results. 8 M E F FLOPs, 12 gated; where preact was not saved, 2 and 4 more.
Limits:  float16, bfloat16, float32, sums float32; h, dp, dg are rounded once to the storage type. No float64, no
         atomics.
Config:  pick_config() below and of _gemm.py, _sums.py; 16-bit launches without gate and dropout are measured on an
         H200, others not yet.
Source:  own work.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import _gemm, _launch
from ._activation import activate_and_slope, biases_of, call_shape
from ._gemm import PART, Config, columns, gemm, pick, place, product
from ._sums import sum_rows
from ._tile import keep_tile, load_row_numbers, load_tile, store_strided

# As in ffn_fwd: two launches of aligned rows, one of others.
MAX_COMPILATIONS = 3


def candidates(kind: str, plain: bool, aligned: bool, major: int) -> tuple[Config, ...]:
    """From the largest tile to the smallest; two programs share an H200's multiprocessor, as in ffn_fwd.

    ``plain``: without gate and dropout. On an H200 the whole backward of 8192 rows of 1024 and 4096 in bfloat16 takes
    663 us with 128 x 128, 693 with 64 x 128.
    """
    if kind == "ieee":  # no tensor cores: every thread multiplies, from registers
        return (
            (Config(128, 128, 16, 8, 3, 1), Config(64, 64, 16, 4, 2, 2)) if aligned else (Config(32, 32, 16, 4, 2, 2),)
        )
    block_k = 64 if kind == "half" and major in (9, 10) else 32  # others have half of their shared memory
    if not aligned:  # read element by element
        return (Config(64, 64, block_k, 8, 2, 1),)
    small = Config(64, 64, block_k, 4, 3, 2)
    if kind == "half" and major == 9:  # what a gate or dropout needs beside 128 x 128 sums spills
        return Config(128 if plain else 64, 128, 64, 4, 3, 2), small
    return Config(128, 128, block_k, 8, 3, 1), small


def pick_config(M: int, F: int, kind: str, plain: bool, aligned: bool, capability: tuple[int, int]) -> Config:
    """The first launch, for dh (M, F); ``kind`` as _gemm.precision() says, ``plain`` as candidates()."""
    return pick(candidates(kind, plain, aligned, capability[0]), M, F, capability)


_RUNTIME = (
    "dy_ptr", "w2_ptr", "p_ptr", "g_ptr", "hidden_ptr", "dp_ptr", "dg_ptr", "db1_ptr", "seed_ptr", "rows_ptr", "M", "F",
    "Eo", "dy_stride_m", "w2_stride_o", "p_stride_m", "scale", "last_dropped",
)  # fmt: skip


@triton.jit
def finish(
    dh, p_ptr, g_ptr, hidden_ptr, dp_ptr, dg_ptr, db1_ptr, seed_ptr, rows_ptr, m, offs_m, first, M, F, p_stride_m,
    scale, last_dropped, ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """FFN.5's dropout and FFN.6 of columns first + 0, 1, ...: writes h, dp, dg and sums of dp over the tile's rows."""
    p = load_tile(p_ptr, offs_m, first, M, F, p_stride_m, BLOCK_M, BLOCK_N, ALIGNED)
    h, slope = activate_and_slope(p, ACTIVATION, p_ptr.dtype.element_ty == tl.float32)
    width = F.to(tl.int64)
    keep = dh == dh
    if seed_ptr is not None:
        row_numbers = load_row_numbers(rows_ptr, offs_m, M)
        keep = keep_tile(seed_ptr, row_numbers, first, last_dropped, BLOCK_M, BLOCK_N)
        dh = tl.where(keep, dh * scale, 0.0)  # a dropped inf or NaN is dropped, not multiplied
    dp = dh * slope
    if g_ptr is not None:
        g = load_tile(g_ptr, offs_m, first, M, F, p_stride_m, BLOCK_M, BLOCK_N, ALIGNED)
        dp *= g
        if dg_ptr is not None:
            store_strided(dh * h, dg_ptr, offs_m, first, M, F, width, BLOCK_N, ALIGNED)
        h *= g
    if hidden_ptr is not None:
        if seed_ptr is not None:
            h = tl.where(keep, h * scale, 0.0)
        store_strided(h, hidden_ptr, offs_m, first, M, F, width, BLOCK_N, ALIGNED)
    if dp_ptr is not None:
        store_strided(dp, dp_ptr, offs_m, first, M, F, width, BLOCK_N, ALIGNED)
    if db1_ptr is not None:  # rows that do not exist have dh = 0
        offs_n = first + tl.arange(0, BLOCK_N)
        tl.store(db1_ptr + m * width + offs_n, tl.sum(dp, 0), mask=offs_n < F)


@triton.jit(do_not_specialize=_RUNTIME)
def ffn_bwd_kernel(
    dy_ptr, w2_ptr, p_ptr, g_ptr, hidden_ptr, dp_ptr, dg_ptr, db1_ptr, seed_ptr, rows_ptr,
    M: tl.int64, F: tl.int32, Eo: tl.int64, dy_stride_m: tl.int64, w2_stride_o: tl.int64, p_stride_m: tl.int64,
    scale, last_dropped, ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """hidden_ptr, dp_ptr, dg_ptr (M, F); db1_ptr (tiles of rows, F) float32."""
    tiles_m = tl.cdiv(M, BLOCK_M).to(tl.int32)
    tiles_f = tl.cdiv(F, BLOCK_N)
    for number in tl.range(tl.program_id(0), tiles_m * tiles_f, tl.num_programs(0)):
        m, f = place(number, tiles_m, tiles_f, GROUP_M)
        offs_m = m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        offs_f = f.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
        dh = product(
            tl.zeros((BLOCK_M, BLOCK_N), tl.float32), dy_ptr, w2_ptr, offs_m, offs_f, M, F, Eo * 0, Eo, dy_stride_m,
            w2_stride_o, BLOCK_K, True, False, ALIGNED, PRECISION, STAGES,
        )  # fmt: skip
        PARTS: tl.constexpr = BLOCK_N // PART
        for part in tl.static_range(PARTS):
            finish(
                columns(dh, part, PARTS, BLOCK_M, BLOCK_N), p_ptr, g_ptr, hidden_ptr, dp_ptr, dg_ptr, db1_ptr, seed_ptr,
                rows_ptr, m, offs_m, f * BLOCK_N + part * PART, M, F, p_stride_m, scale, last_dropped, ACTIVATION,
                BLOCK_M, PART, ALIGNED,
            )  # fmt: skip


def ffn_bwd(
    dy: Tensor, x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, gate: Tensor | None, preact: Tensor,
    activation: int, dropout_p: float, seed: Tensor | None, dropout_rows: Tensor | None, need_x: bool, need_w1: bool,
    need_b1: bool, need_w2: bool, need_b2: bool, need_gate: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The operator ffn_bwd_triton; its contract is tfm_kernels/ops/ffn.py's."""
    op = "ffn_bwd_triton"
    _launch.check_device(op, x)
    M, E, F, Eo = call_shape(op, x, w1, w2, activation)
    one, (b1, b_gate) = (x.dtype,), biases_of(b1, gate, F)
    saved = preact.dim() == 2
    preact_shape = (M, F if gate is None else 2 * F) if saved else (0,)
    _launch.check(
        op, x, x=(x, (M, E), _launch.DTYPES), dy=(dy, (M, Eo), one), w1=(w1, (F, E), one), b1=(b1, (F,), one),
        w2=(w2, (Eo, F), one), gate=(gate, (F, E), one), preact=(preact, preact_shape, one),
        dropout_rows=(dropout_rows, (M,), (torch.int64,)), seed=(seed, (), (torch.int64,)),
    )  # fmt: skip
    scale, last_dropped = _launch.check_dropout(op, dropout_p, seed)
    if need_gate and gate is None:
        raise ValueError(f"{op}: need_gate must be False without a gate")

    kind, capability = _gemm.precision(x.dtype), _launch.capability(x)
    dy, x, w1, w2 = (_launch.matrix(t) for t in (dy, x, w1, w2))
    gate = None if gate is None else _launch.matrix(gate)
    b1, b_gate = (None if b is None else b.contiguous() for b in (b1, b_gate))
    preact = preact.contiguous()
    aligned = _launch.aligned(math.gcd(E, F, Eo), dy, x, w1, w2, gate, b1, b_gate, preact)
    new = lambda *size, dtype=x.dtype: torch.empty(size, dtype=dtype, device=x.device)  # noqa: E731

    def rows_by(a: Tensor, b: Tensor, k_inner: bool, **more: Any) -> Tensor:
        """a b, or a b^T where b is k inner: a result of M rows."""
        config = _gemm.pick_config(M, b.shape[0] if k_inner else b.shape[1], kind, aligned, capability)
        return gemm(a, b, config, kind, aligned, a_k_inner=True, b_k_inner=k_inner, **more)

    def weight(a: Tensor, b: Tensor) -> Tensor:
        """a^T b: the gradient of a weight."""
        config = _gemm.pick_split(a.shape[1], b.shape[1], M, kind, aligned, capability)
        return gemm(a, b, config, kind, aligned, a_k_inner=False, b_k_inner=False)

    need_b_gate = need_b1 and b_gate is not None
    need_dp, need_dg = need_x or need_w1 or need_b1, gate is not None and (need_x or need_gate or need_b_gate)
    hidden, dp, dg = (new(M if needed else 0, F) for needed in (need_w2, need_dp, need_dg))
    with _launch.on(x):
        if need_dp or need_dg or need_w2:
            if not saved:
                p = rows_by(x, w1, True, bias=b1)
                g = None if gate is None else rows_by(x, gate, True, bias=b_gate)
            else:
                p, g = preact[:, :F], None if gate is None else preact[:, F:]
            dropped = dropout_p > 0.0
            config = pick_config(M, F, kind, gate is None and not dropped, aligned, capability)
            kernel, sums, own = ffn_bwd_kernel, _launch.cdiv(M, config.block_m), {
                "ALIGNED": aligned, "PRECISION": "tf32" if kind == "tf32" else "ieee", "STAGES": config.num_stages,
                "maxnreg": config.max_registers,
            }  # fmt: skip
            if _gemm.AHEAD:
                from . import _ffn_bwd_ahead as ahead  # Gluon, which is Triton's experiment: not for every import

                chosen = ahead.pick_config(M, F, aligned, x.dtype, capability)
                if chosen is not None:
                    config, kernel, own = chosen, ahead.ffn_bwd_ahead_kernel, {}
                    sums = _launch.cdiv(M, config.block_m) * ahead.SUMS
            db1s = new(sums if need_b1 else 0, F, dtype=torch.float32)
            if M > 0 and F > 0:
                _launch.launch(
                    kernel, (config.programs,),
                    dy_ptr=dy, w2_ptr=w2, p_ptr=p, g_ptr=g, hidden_ptr=hidden if need_w2 else None,
                    dp_ptr=dp if need_dp else None, dg_ptr=dg if need_dg else None,
                    db1_ptr=db1s if need_b1 else None, seed_ptr=seed if dropped else None,
                    rows_ptr=dropout_rows.contiguous() if dropped and dropout_rows is not None else None,
                    M=M, F=F, Eo=Eo if need_dp or need_dg else 0, dy_stride_m=dy.stride(0), w2_stride_o=w2.stride(0),
                    p_stride_m=p.stride(0), scale=scale, last_dropped=last_dropped, ACTIVATION=activation,
                    BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, GROUP_M=_gemm.GROUP_M,
                    num_warps=config.num_warps, enable_fp_fusion=False, **own,
                )  # fmt: skip
        db1 = new((2 * F if need_b_gate else F) if need_b1 else 0)
        if need_b1:
            sum_rows(db1s, x.dtype, db1[:F])
        if need_b_gate:
            sum_rows(dg, x.dtype, db1[F:])
        return (
            rows_by(dp, w1, False, a2=dg if need_dg else None, b2=gate if need_dg else None) if need_x else new(0),
            weight(dp, x) if need_w1 else new(0),
            db1,
            weight(dy, hidden) if need_w2 else new(0),
            sum_rows(dy, x.dtype) if need_b2 else new(0),
            weight(dg, x) if need_gate else new(0),
        )
