"""ffn_fwd, Triton. Implements FFN.1 to FFN.4 of tfm_kernels/ops/ffn.py.

Owns:    the first launch, persistent programs: each takes every programs-th tile of the hidden activation, sums p (and
         g beside it) in registers and ends with bias, activation, gate, dropout. The second is the product with w2.
Traffic: reads x and the weights, mostly from L2; writes h (and preact), reads h, writes y. 4 M E F FLOPs, 6 gated.
Limits:  float16, bfloat16, float32, sums float32; h is rounded once to the storage type. No float64, no atomics.
Config:  pick_config() below and of _gemm.py; 16-bit launches are measured on an H200, float32 and other GPUs not yet.
Source:  own work.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import _gemm, _launch
from ._activation import activate, biases_of, call_shape
from ._gemm import PART, Config, add_product, columns, gemm, load_factor, pick, place, product
from ._tile import keep_tile, load_columns, load_row_numbers, store_strided

# How often ffn_fwd_kernel is compiled at most for one combination of storage type, precision, activation and optional
# arguments, whatever the shapes: two launches of aligned rows, one of others.
MAX_COMPILATIONS = 3


def candidates(kind: str, gated: bool, aligned: bool, major: int) -> tuple[Config, ...]:
    """From the largest tile to the smallest; ``programs`` is the number planned on one multiprocessor.

    The end of a tile is arithmetic, random numbers above all, so that two programs share a multiprocessor: one
    multiplies while the other ends. With a gate a tile is half as wide, for it has two sums.

    On an H200 the whole forward of 8192 rows of 1024 and 4096 in bfloat16 takes 269 us with 4 warps, 326 with dropout
    and 394 gated (silu), against 287, 332 and 399 with 8 warps that share the registers.
    """
    wide = 64 if gated else 128
    if kind == "ieee":  # no tensor cores: every thread multiplies, from registers
        if not aligned:  # left alone, the compiler spills for the gate
            return (Config(32, 32, 16, 4, 2, 2, 168 if gated else None),)
        stages = 3 if major in (9, 10) and not gated else 2  # 3 spill on sm_80, with a gate, and in the small tile
        return Config(128, wide, 16, 8, stages, 1), Config(64, wide // 2, 16, 4, 2, 2)
    block_k = 64 if kind == "half" and major in (9, 10) else 32  # others have half of their shared memory
    if not aligned:  # read element by element
        return (Config(64, wide // 2, block_k, 8, 2, 1),)
    large = Config(128, wide, block_k, 8, 3, 1)
    if kind == "half" and major == 9:
        large = replace(large, num_warps=4, programs=2)
    return large, Config(64, wide // 2, block_k, 4, 3, 2)


def pick_config(M: int, F: int, kind: str, gated: bool, aligned: bool, capability: tuple[int, int]) -> Config:
    """The first launch, for the hidden activation (M, F); ``kind`` as _gemm.precision() says."""
    return pick(candidates(kind, gated, aligned, capability[0]), M, F, capability)


_RUNTIME = (
    "x_ptr", "w1_ptr", "b1_ptr", "gate_ptr", "b_gate_ptr", "hidden_ptr", "preact_ptr", "seed_ptr", "rows_ptr", "M", "E",
    "F", "x_stride_m", "w1_stride_f", "gate_stride_f", "scale", "last_dropped",
)  # fmt: skip


@triton.jit
def gated_products(
    x_ptr, w1_ptr, gate_ptr, offs_m, offs_f, M, E, F, x_stride_m, w1_stride_f, gate_stride_f,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """x w1^T and x gate^T, (BLOCK_M, BLOCK_N) each, from one tile of x."""
    p = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    g = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in tl.range(0, E, BLOCK_K, num_stages=STAGES):
        left = tl.minimum(E - k, BLOCK_K).to(tl.int32)
        x = load_factor(x_ptr + k, offs_m, M, left, x_stride_m, BLOCK_K, True, ALIGNED)
        w1 = load_factor(w1_ptr + k, offs_f, F, left, w1_stride_f, BLOCK_K, True, ALIGNED)
        gate = load_factor(gate_ptr + k, offs_f, F, left, gate_stride_f, BLOCK_K, True, ALIGNED)
        p = add_product(p, x, tl.trans(w1), PRECISION)
        g = add_product(g, x, tl.trans(gate), PRECISION)
    return p, g


@triton.jit
def finish(
    p, g, b1_ptr, gate_ptr, b_gate_ptr, hidden_ptr, preact_ptr, seed_ptr, rows_ptr, offs_m, first, M, F, scale,
    last_dropped, ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """The biases of FFN.1 and FFN.2, and FFN.3, of columns first + 0, 1, ...: writes preact and h."""
    if b1_ptr is not None:
        p += load_columns(b1_ptr, first, F, BLOCK_N, ALIGNED)
    if b_gate_ptr is not None:
        g += load_columns(b_gate_ptr, first, F, BLOCK_N, ALIGNED)
    if preact_ptr is not None:
        width = F.to(tl.int64) if gate_ptr is None else F.to(tl.int64) * 2
        store_strided(p, preact_ptr, offs_m, first, M, F, width, BLOCK_N, ALIGNED)
        if gate_ptr is not None:
            store_strided(g, preact_ptr + F, offs_m, first, M, F, width, BLOCK_N, ALIGNED)
    EXACT: tl.constexpr = hidden_ptr.dtype.element_ty == tl.float32
    h = activate(p, ACTIVATION, EXACT)
    if gate_ptr is not None:
        h *= g
    if seed_ptr is not None:
        row_numbers = load_row_numbers(rows_ptr, offs_m, M)
        # two sums leave no registers, nor do exact activations
        FRUGAL: tl.constexpr = gate_ptr is not None or EXACT
        keep = keep_tile(seed_ptr, row_numbers, first, last_dropped, BLOCK_M, BLOCK_N, FRUGAL)
        h = tl.where(keep, h * scale, 0.0)  # a dropped inf or NaN is dropped, not multiplied
    store_strided(h, hidden_ptr, offs_m, first, M, F, F.to(tl.int64), BLOCK_N, ALIGNED)


@triton.jit(do_not_specialize=_RUNTIME)
def ffn_fwd_kernel(
    x_ptr, w1_ptr, b1_ptr, gate_ptr, b_gate_ptr, hidden_ptr, preact_ptr, seed_ptr, rows_ptr, M: tl.int64, E: tl.int64,
    F: tl.int32, x_stride_m: tl.int64, w1_stride_f: tl.int64, gate_stride_f: tl.int64, scale, last_dropped,
    ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """hidden_ptr (M, F) = h; preact_ptr (M, F) = p, or (M, 2F) = [p, g]."""
    tiles_m = tl.cdiv(M, BLOCK_M).to(tl.int32)
    tiles_f = tl.cdiv(F, BLOCK_N)
    for number in tl.range(tl.program_id(0), tiles_m * tiles_f, tl.num_programs(0)):
        m, f = place(number, tiles_m, tiles_f, GROUP_M)
        offs_m = m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        offs_f = f.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
        if gate_ptr is None:
            p = product(
                tl.zeros((BLOCK_M, BLOCK_N), tl.float32), x_ptr, w1_ptr, offs_m, offs_f, M, F, E * 0, E, x_stride_m,
                w1_stride_f, BLOCK_K, True, True, ALIGNED, PRECISION, STAGES,
            )  # fmt: skip
            g = p
        else:
            p, g = gated_products(
                x_ptr, w1_ptr, gate_ptr, offs_m, offs_f, M, E, F, x_stride_m, w1_stride_f, gate_stride_f,
                BLOCK_M, BLOCK_N, BLOCK_K, ALIGNED, PRECISION, STAGES,
            )  # fmt: skip
        PARTS: tl.constexpr = BLOCK_N // PART
        for part in tl.static_range(PARTS):
            finish(
                columns(p, part, PARTS, BLOCK_M, BLOCK_N), columns(g, part, PARTS, BLOCK_M, BLOCK_N), b1_ptr, gate_ptr,
                b_gate_ptr, hidden_ptr, preact_ptr, seed_ptr, rows_ptr, offs_m, f * BLOCK_N + part * PART, M, F, scale,
                last_dropped, ACTIVATION, BLOCK_M, PART, ALIGNED,
            )  # fmt: skip


def ffn_fwd(
    x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, gate: Tensor | None, activation: int,
    dropout_p: float, seed: Tensor | None, dropout_rows: Tensor | None, save_preact: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The operator ffn_fwd_triton; its contract is tfm_kernels/ops/ffn.py's."""
    op = "ffn_fwd_triton"
    _launch.check_device(op, x)
    M, E, F, Eo = call_shape(op, x, w1, w2, activation)
    one, (b1, b_gate) = (x.dtype,), biases_of(b1, gate, F)
    _launch.check(
        op, x, x=(x, (M, E), _launch.DTYPES), w1=(w1, (F, E), one), b1=(b1, (F,), one), w2=(w2, (Eo, F), one),
        b2=(b2, (Eo,), one), gate=(gate, (F, E), one), dropout_rows=(dropout_rows, (M,), (torch.int64,)),
        seed=(seed, (), (torch.int64,)),
    )  # fmt: skip
    scale, last_dropped = _launch.check_dropout(op, dropout_p, seed)

    dropped, gated, kind = dropout_p > 0.0, gate is not None, _gemm.precision(x.dtype)
    x, w1, w2 = _launch.matrix(x), _launch.matrix(w1), _launch.matrix(w2)
    gate = None if gate is None else _launch.matrix(gate)
    b1, b_gate, b2 = (None if b is None else b.contiguous() for b in (b1, b_gate, b2))
    aligned = _launch.aligned(math.gcd(E, F, Eo), x, w1, w2, gate, b1, b_gate, b2)
    new = lambda *size: torch.empty(size, dtype=x.dtype, device=x.device)  # noqa: E731
    preact = new(M, 2 * F if gated else F) if save_preact else new(0)
    hidden = new(M, F)
    with _launch.on(x):
        if M > 0 and F > 0:
            capability = _launch.capability(x)
            config = pick_config(M, F, kind, gated, aligned, capability)
            kernel, own = ffn_fwd_kernel, {
                "ALIGNED": aligned, "PRECISION": "tf32" if kind == "tf32" else "ieee", "STAGES": config.num_stages,
                "maxnreg": config.max_registers,
            }  # fmt: skip
            if _gemm.AHEAD:
                from . import _ffn_fwd_ahead as ahead  # Gluon, which is Triton's experiment: not for every import

                chosen = ahead.pick_config(M, F, gated, aligned, x.dtype, capability)
                if chosen is not None:
                    config, kernel, own = chosen, ahead.ffn_fwd_ahead_kernel, {}
            _launch.launch(
                kernel, (config.programs,),
                x_ptr=x, w1_ptr=w1, b1_ptr=b1, gate_ptr=gate, b_gate_ptr=b_gate, hidden_ptr=hidden,
                preact_ptr=preact if save_preact else None, seed_ptr=seed if dropped else None,
                rows_ptr=dropout_rows.contiguous() if dropped and dropout_rows is not None else None,
                M=M, E=E, F=F, x_stride_m=x.stride(0), w1_stride_f=w1.stride(0),
                gate_stride_f=0 if gate is None else gate.stride(0), scale=scale, last_dropped=last_dropped,
                ACTIVATION=activation, BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
                GROUP_M=_gemm.GROUP_M, num_warps=config.num_warps, enable_fp_fusion=False, **own,
            )  # fmt: skip
        config = _gemm.pick_config(M, Eo, kind, aligned, _launch.capability(x))
        y = gemm(hidden, w2, config, kind, aligned, a_k_inner=True, b_k_inner=True, bias=b2)
    return y, preact
