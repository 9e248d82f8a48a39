"""int8_ffn_fwd, Triton. Implements INT8_FFN.1 to .4 of tfm_kernels/ops/int8_ffn.py.

Owns:    four launches. Rows of x are rounded (_int8.py). The product with w1, and with gate beside it from one tile of
         x, by persistent programs as in _int8_gemm.py, ends with bias, activation and gate, and leaves beside each tile
         of the hidden activation its rows' largest elements. With them a program rounds a piece of a row read once. The
         last is _int8_gemm.py's product. Where a product has fewer tiles than the GPU has multiprocessors, its k is cut
         in parts, which one launch more adds up in a fixed order.
Traffic: reads x and the weights, mostly from L2; writes the hidden activation once, 4 bytes an element, and reads it
         once, and writes and reads its integers, a byte each; writes y. 4 M E F operations, 6 gated, in int32, exactly.
Limits:  float16, bfloat16, float32; E and F at most 131,072. No float64, no atomics.
Config:  pick_config() below and of _int8.py and _int8_gemm.py; timed on an H200.
Source:  own work.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import _gemm, _int8, _int8_gemm, _launch
from ._activation import activate, call_shape
from ._gemm import Config, columns, load_factor, place, product, up_to_8
from ._int8 import magnitude
from ._int8_gemm import JOIN_N, add_parts, scaled, store_part
from ._tile import store_tile

# How often int8_ffn_fwd_kernel is compiled at most for one combination of the bias' type, activation and gate, whatever
# the shapes, as _int8_gemm.py counts; those that write parts, four of them, are the same for every bias and activation.
MAX_COMPILATIONS = _int8_gemm.MAX_COMPILATIONS
MAX_JOIN_COMPILATIONS = 2
RUN = tl.constexpr(_int8.RUN)


def candidates(gated: bool, aligned: bool, major: int) -> tuple[Config, ...]:
    """Those of _int8_gemm.py; with a gate a tile has two sums: 64 features, and at most 128 rows, for 256 spill."""
    found = _int8_gemm.candidates("int8", aligned, major)
    if not gated:
        return found
    *many, few = (replace(config, block_n=64) for config in found if config.block_m <= 128)
    if not aligned:
        return *many, replace(few, block_k=32)  # each byte has its address in a register
    large, small = many
    return replace(large, block_k=max(64, large.block_k)), small, few  # 256 threads copy 16 bytes each


def pick_config(M: int, F: int, E: int, gated: bool, aligned: bool, capability: tuple[int, int]) -> Config:
    """The launch for the hidden activation (M, F) of rows of E on a GPU of this compute capability."""
    return _int8_gemm.pick(candidates(gated, aligned, capability[0]), M, F, E, capability)


@triton.jit
def two_products(
    p, g, x_ptr, w1_ptr, gate_ptr, offs_f, offs_m, F, M, first, last, w1_stride_f, gate_stride_f, x_stride_m,
    BLOCK_K: tl.constexpr, ALIGNED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """p + w1 x^T and g + gate x^T (offs_f, offs_m) over k = first..last - 1, from one tile of x."""
    for k in tl.range(first, last, BLOCK_K, num_stages=STAGES):
        left = tl.minimum(last - k, BLOCK_K).to(tl.int32)
        at = tl.zeros((), tl.int64) + k
        w1 = load_factor(w1_ptr + at, offs_f, F, left, w1_stride_f, BLOCK_K, True, ALIGNED)
        gate = load_factor(gate_ptr + at, offs_f, F, left, gate_stride_f, BLOCK_K, True, ALIGNED)
        x = tl.trans(load_factor(x_ptr + at, offs_m, M, left, x_stride_m, BLOCK_K, True, ALIGNED))
        p = tl.dot(w1, x, p, out_dtype=tl.int32)
        g = tl.dot(gate, x, g, out_dtype=tl.int32)
    return p, g


@triton.jit
def finish(
    p, g, scale1_ptr, gate_scale_ptr, step_ptr, b1_ptr, hidden_ptr, largest_ptr, offs_m, first, block, blocks, M, F,
    ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, F_ALIGNED: tl.constexpr,
):  # fmt: skip
    """INT8_FFN.1 to .3 of columns first + 0, 1, ..., block number ``block``: writes h and its rows' largest elements.

    Behind F both scales are 0, and so is h, but for a row of NaN.
    """
    h = scaled(p, scale1_ptr, step_ptr, b1_ptr, offs_m, first, M, F, BLOCK_N, F_ALIGNED)
    h = activate(h, ACTIVATION, False)
    if gate_scale_ptr is not None:
        h *= scaled(g, gate_scale_ptr, step_ptr, None, offs_m, first, M, F, BLOCK_N, F_ALIGNED)
    store_tile(h, hidden_ptr, offs_m, first, M, (F + RUN - 1) // RUN * RUN, BLOCK_M, BLOCK_N, RUN)
    tl.store(largest_ptr + offs_m * blocks + block, tl.max(magnitude(h), 1), mask=offs_m < M)


_RUNTIME = (
    "x_ptr", "w1_ptr", "gate_ptr", "scale1_ptr", "gate_scale_ptr", "step_ptr", "b1_ptr", "hidden_ptr", "largest_ptr",
    "M", "F", "E", "part", "splits", "x_stride_m", "w1_stride_f", "gate_stride_f",
)  # fmt: skip


@triton.jit(do_not_specialize=_RUNTIME)
def int8_ffn_fwd_kernel(
    x_ptr, w1_ptr, gate_ptr, scale1_ptr, gate_scale_ptr, step_ptr, b1_ptr, hidden_ptr, largest_ptr, M: tl.int64,
    F: tl.int64, E: tl.int64, part: tl.int64, splits: tl.int32, x_stride_m: tl.int64, w1_stride_f: tl.int64,
    gate_stride_f: tl.int64, ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, ALIGNED: tl.constexpr, F_ALIGNED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """hidden_ptr (M, F up to a multiple of RUN) = h; largest_ptr (M, tiles of F), of each tile's rows.

    Without scales hidden_ptr (splits, M, F), with a gate (splits, 2, M, F), rows up to a multiple of 8: the sums of
    parts of ``part`` k. x_ptr: the integers that were made of x.
    """
    tiles_m = tl.cdiv(M, BLOCK_M).to(tl.int32)
    tiles_f = tl.cdiv(F, BLOCK_N).to(tl.int32)
    for number in tl.range(tl.program_id(0), tiles_m * tiles_f * splits, tl.num_programs(0)):
        split = (number // (tiles_m * tiles_f)).to(tl.int64)
        m, f = place(number % (tiles_m * tiles_f), tiles_m, tiles_f, GROUP_M)
        offs_m = m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        first = f.to(tl.int64) * BLOCK_N
        offs_f = first + tl.arange(0, BLOCK_N)
        p = tl.zeros((BLOCK_N, BLOCK_M), tl.int32)
        begin = split * part
        end = tl.minimum(begin + part, E)
        if gate_ptr is None:
            p = product(
                p, w1_ptr, x_ptr, offs_f, offs_m, F, M, begin, end, w1_stride_f, x_stride_m, BLOCK_K, True, True,
                ALIGNED, "ieee", STAGES,
            )  # fmt: skip
            g = p
        else:
            p, g = two_products(
                p, tl.zeros((BLOCK_N, BLOCK_M), tl.int32), x_ptr, w1_ptr, gate_ptr, offs_f, offs_m, F, M, begin, end,
                w1_stride_f, gate_stride_f, x_stride_m, BLOCK_K, ALIGNED, STAGES,
            )  # fmt: skip
        if scale1_ptr is None:
            if gate_ptr is None:
                store_part(p, hidden_ptr, split, offs_m, first, M, F, BLOCK_N)
            else:
                store_part(p, hidden_ptr, split * 2, offs_m, first, M, F, BLOCK_N)
                store_part(g, hidden_ptr, split * 2 + 1, offs_m, first, M, F, BLOCK_N)
        else:
            PARTS: tl.constexpr = BLOCK_M // 32 if BLOCK_M >= 128 else 1
            ROWS: tl.constexpr = BLOCK_M // PARTS
            for few in tl.static_range(PARTS):
                finish(
                    tl.trans(columns(p, few, PARTS, BLOCK_N, BLOCK_M)),
                    tl.trans(columns(g, few, PARTS, BLOCK_N, BLOCK_M)), scale1_ptr, gate_scale_ptr, step_ptr, b1_ptr,
                    hidden_ptr, largest_ptr, m.to(tl.int64) * BLOCK_M + few * ROWS + tl.arange(0, ROWS), first, f,
                    tiles_f, M, F, ACTIVATION, ROWS, BLOCK_N, F_ALIGNED,
                )  # fmt: skip


_JOIN_RUNTIME = (
    "parts_ptr", "scale1_ptr", "gate_scale_ptr", "step_ptr", "b1_ptr", "hidden_ptr", "largest_ptr", "M", "F", "splits",
)  # fmt: skip


@triton.jit(do_not_specialize=_JOIN_RUNTIME)
def int8_ffn_fwd_join_kernel(
    parts_ptr, scale1_ptr, gate_scale_ptr, step_ptr, b1_ptr, hidden_ptr, largest_ptr, M: tl.int64, F: tl.int64,
    splits: tl.int32, ACTIVATION: tl.constexpr, BLOCK_N: tl.constexpr, F_ALIGNED: tl.constexpr,
):  # fmt: skip
    """h and the largest elements of blocks of BLOCK_N, of the sums that ``splits`` parts left."""
    blocks = tl.cdiv(F, BLOCK_N)
    offs_m = tl.program_id(0).to(tl.int64) // blocks + tl.arange(0, 1)
    block = tl.program_id(0).to(tl.int64) % blocks
    first = block * BLOCK_N
    if gate_scale_ptr is None:
        p = add_parts(parts_ptr, offs_m, first, M, F, splits, 1, BLOCK_N)
        g = p
    else:
        p = add_parts(parts_ptr, offs_m, first, M, F, splits, 2, BLOCK_N)
        g = add_parts(parts_ptr + M * up_to_8(F), offs_m, first, M, F, splits, 2, BLOCK_N)
    finish(
        p, g, scale1_ptr, gate_scale_ptr, step_ptr, b1_ptr, hidden_ptr, largest_ptr, offs_m, first, block, blocks, M, F,
        ACTIVATION, 1, BLOCK_N, F_ALIGNED,
    )  # fmt: skip


def int8_ffn_fwd(
    x: Tensor, w1: Tensor, scale1: Tensor, b1: Tensor | None, w2: Tensor, scale2: Tensor, b2: Tensor | None,
    gate: Tensor | None, gate_scale: Tensor | None, activation: int, dynamic: bool,
) -> Tensor:  # fmt: skip
    """The operator int8_ffn_fwd_triton; its contract is tfm_kernels/ops/int8_ffn.py's."""
    op = "int8_ffn_fwd_triton"
    _launch.check_device(op, x)
    M, E, F, Eo = call_shape(op, x, w1, w2, activation)
    if (gate is None) != (gate_scale is None):
        raise ValueError(f"{op}: gate and gate_scale must come together")
    if not dynamic:
        raise ValueError(f"{op}: dynamic must be True")
    integers, steps, one = (torch.int8,), (torch.float32,), (x.dtype,)
    _launch.check(
        op, x, x=(x, (M, E), _launch.DTYPES), w1=(w1, (F, E), integers), scale1=(scale1, (F,), steps),
        b1=(b1, (F,), one), w2=(w2, (Eo, F), integers), scale2=(scale2, (Eo,), steps), b2=(b2, (Eo,), one),
        gate=(gate, (F, E), integers), gate_scale=(gate_scale, (F,), steps),
    )  # fmt: skip
    for name, width in (("x", E), ("w2", F)):
        if width > _int8.MAX_WIDTH:
            raise ValueError(f"{op}: {name} must have at most {_int8.MAX_WIDTH} columns, got {width}")
    y = torch.empty((M, Eo), dtype=x.dtype, device=x.device)
    if M == 0 or Eo == 0:
        return y
    x, w1, w2 = _launch.matrix(x), _launch.matrix(w1), _launch.matrix(w2)
    gate = None if gate is None else _launch.matrix(gate)
    contiguous = lambda t: None if t is None else t.contiguous()  # noqa: E731
    with _launch.on(x):
        numbers, step = _int8.round_rows(x)
        ends = {"scale1_ptr": contiguous(scale1), "gate_scale_ptr": contiguous(gate_scale), "b1_ptr": contiguous(b1)}
        hidden, largest = _hidden(numbers, w1, gate, E, activation, step_ptr=step, **ends)
        numbers, step = _int8.round_rows(hidden, largest)
        _int8_gemm.multiply(
            numbers, w2, F, y, scale_ptr=scale2.contiguous(), step_ptr=step, bias_ptr=contiguous(b2)
        )  # fmt: skip
    return y


def _hidden(
    numbers: Tensor, w1: Tensor, gate: Tensor | None, E: int, activation: int, **ends: Tensor | None
) -> tuple[Tensor, Tensor]:
    """h (M, F up to a multiple of RUN), zeros behind F, and the largest elements (M, blocks) of its rows' blocks.

    Args:
        numbers: the integers that were made of x.
        w1: (F, E).
        gate: (F, E) or None.
        E: columns of x.
        activation: the index of ACTIVATIONS.
        **ends: what scales and shifts sums, by the kernel's names.
    """
    M, F, device = numbers.shape[0], w1.shape[0], numbers.device
    aligned, f_aligned = _launch.aligned(E, numbers, w1, gate), _launch.aligned(F, *ends.values())
    config = pick_config(M, F, E, gate is not None, aligned, _launch.capability(numbers))
    splits, part = _int8_gemm.cut(config, E)
    hidden = torch.empty((M, _launch.cdiv(F, _int8.RUN) * _int8.RUN), dtype=torch.float32, device=device)
    blocks = _launch.cdiv(F, config.block_n if splits == 1 else JOIN_N)
    largest = torch.empty((M, blocks), dtype=torch.int32, device=device)
    if F == 0:
        return hidden, largest
    results = {"hidden_ptr": hidden, "largest_ptr": largest}
    finishes = {**ends, **results, "ACTIVATION": activation, "F_ALIGNED": f_aligned}
    if splits > 1:
        shape = (splits, 1 if gate is None else 2, M, _launch.cdiv(F, 8) * 8)
        parts = torch.empty(shape, dtype=torch.int32, device=device)
        given = {**dict.fromkeys((*ends, *results)), "hidden_ptr": parts, "ACTIVATION": 0, "F_ALIGNED": True}
    _launch.launch(
        int8_ffn_fwd_kernel, (config.programs,),
        x_ptr=numbers, w1_ptr=w1, gate_ptr=gate, M=M, F=F, E=E, part=part, splits=splits, x_stride_m=numbers.stride(0),
        w1_stride_f=w1.stride(0), gate_stride_f=0 if gate is None else gate.stride(0), BLOCK_M=config.block_m,
        BLOCK_N=config.block_n, BLOCK_K=config.block_k, GROUP_M=_gemm.GROUP_M, ALIGNED=16 if aligned else 0,
        STAGES=config.num_stages, num_warps=config.num_warps, maxnreg=config.max_registers, enable_fp_fusion=False,
        **(finishes if splits == 1 else given),
    )  # fmt: skip
    if splits > 1:
        _launch.launch(
            int8_ffn_fwd_join_kernel, (M * _launch.cdiv(F, JOIN_N),), parts_ptr=parts, M=M, F=F, splits=splits,
            BLOCK_N=JOIN_N, num_warps=4, enable_fp_fusion=False, **finishes,
        )  # fmt: skip
    return hidden, largest
