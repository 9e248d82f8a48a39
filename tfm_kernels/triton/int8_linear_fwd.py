"""int8_linear_fwd, Triton. Implements INT8_LINEAR.1 and .2 of tfm_kernels/ops/int8_linear.py.

Owns:    the product of _int8_gemm.py, whose second factor are the rows of x. Dynamic: a launch before rounds them
         (_int8.py), and the product is one of integers.
Traffic: as there, and dynamic x once more, its integers written and read.
Limits:  float16, bfloat16, float32; dynamic at most 131,072 columns. No float64.
Config:  pick_config() of both; timed on an H200.
Source:  own work.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _int8, _int8_gemm, _launch


def int8_linear_fwd(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dynamic: bool) -> Tensor:
    """The operator int8_linear_fwd_triton; its contract is tfm_kernels/ops/int8_linear.py's."""
    op = "int8_linear_fwd_triton"
    _launch.check_device(op, x)
    if x.dim() != 2 or weight.dim() != 2:
        raise ValueError(f"{op}: x and weight must have 2 dimensions, got {x.dim()} and {weight.dim()}")
    (M, K), N = x.shape, weight.shape[0]
    _launch.check(
        op, x, x=(x, (M, K), _launch.DTYPES), weight=(weight, (N, K), (torch.int8,)),
        scale=(scale, (N,), (torch.float32,)), bias=(bias, (N,), (x.dtype,)),
    )  # fmt: skip
    if dynamic and K > _int8.MAX_WIDTH:
        raise ValueError(f"{op}: x must have at most {_int8.MAX_WIDTH} columns, got {K}")
    y = torch.empty((M, N), dtype=x.dtype, device=x.device)
    if M == 0 or N == 0:
        return y
    x, weight, scale = _launch.matrix(x), _launch.matrix(weight), scale.contiguous()
    bias = None if bias is None else bias.contiguous()
    with _launch.on(x):
        factor, step = _int8.round_rows(x) if dynamic else (x, None)
        _int8_gemm.multiply(factor, weight, K, y, scale_ptr=scale, step_ptr=step, bias_ptr=bias)
    return y
