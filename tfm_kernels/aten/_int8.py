"""PyTorch's own functions for a linear layer with weights of int8, whose input may be rounded to int8 as well."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

_ZERO_BELOW = 2.0**-119
# Without VNNI oneDNN adds pairs of products in 16 bits, which saturate: torch._int_mm of 64 times 77 * 127 gave 8,160.
_EXACT_ON_CPU: bool = torch.cpu._is_vnni_supported()
_for_another_machine = False


@contextmanager
def products_of_int8() -> Iterator[None]:
    """Within the block graphs hold products of int8 also where this processor's are not exact: they run elsewhere."""
    global _for_another_machine
    before, _for_another_machine = _for_another_machine, True
    try:
        yield
    finally:
        _for_another_machine = before


def int8_linear(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dynamic: bool, differentiable: bool
) -> Tensor:
    """INT8_LINEAR.1, or .2 where ``dynamic``: (M, K) -> (M, N) in the type of ``x``.

    ``differentiable``: by a product of floats, whose derivatives PyTorch knows.
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    if dynamic:
        return _dynamic(x.to(compute), weight, scale, bias, differentiable).to(x.dtype)
    # scaled first: sums of the integers could overflow float16
    return F.linear(x, (weight.to(compute) * scale[:, None]).to(x.dtype), bias)


def _dynamic(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, differentiable: bool) -> Tensor:
    integers, step = _rounded(x.detach())
    if differentiable:
        x = x + (integers * step - x).detach()  # the rounding has no gradient of its own
        y = F.linear(x, weight.to(x.dtype)) * scale
    else:
        # in this order: onnxruntime fuses the product with the factor behind it, which it takes for one of columns
        y = _product(integers, weight) * scale * step
    return y if bias is None else y + bias


def _rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """The integers of x, in its type, and the step of each row, (M, 1)."""
    largest = x.abs().amax(1, keepdim=True) if x.shape[1] else x.new_zeros(x.shape[0], 1)
    integers = torch.round(x * (torch.full_like(largest, 127) / largest)).masked_fill(largest < _ZERO_BELOW, 0.0)
    finite = largest.isfinite()
    return integers.masked_fill(~finite, 0.0), (largest / 127).masked_fill(~finite, torch.nan)


def _product(integers: Tensor, weight: Tensor) -> Tensor:
    """By the matrix library's product of int8 where it takes the shape and is exact, else by one of floats."""
    rows, width = integers.shape
    if integers.is_cuda:  # what cuBLAS asks for
        taken = rows > 16 and width % 8 == 0 and weight.shape[0] % 8 == 0
    else:
        # of one column it gives what lies in memory (torch 2.13)
        exact = integers.device.type == "cpu" and (_EXACT_ON_CPU or _for_another_machine)
        taken = exact and width > 1 and min(rows, weight.shape[0]) > 0
    if taken:
        return torch._int_mm(integers.to(torch.int8), weight.T).to(integers.dtype)
    return F.linear(integers, weight.to(integers.dtype))
