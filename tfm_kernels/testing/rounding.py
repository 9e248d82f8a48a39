"""The few constants every bound is made of: how a storage type rounds, and what its kernels sum in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rounding:
    """How one storage type rounds.

    Attributes:
        unit: unit roundoff of the storage type, half the distance from 1 to the next number.
        tiny: eta, the absolute error of a result too small for the relative one (fp16 rounds to subnormals; the others
            may be flushed to zero).
        sums: unit roundoff of the type that statistics and sums are kept in.
        narrow: whether the type has 16 bits, so that kernels round operands to it between two products.
        flushed: the size below which an operand of a product may count as 0: processors' bfloat16 products (AMX,
            AVX512_BF16) take subnormal operands for 0.
    """

    unit: float
    tiny: float
    sums: float
    narrow: bool
    flushed: float = 0.0


_ROUNDINGS = {
    torch.bfloat16: Rounding(2.0**-8, 2.0**-126, 2.0**-24, True, 2.0**-126),
    torch.float16: Rounding(2.0**-11, 2.0**-25, 2.0**-24, True),
    torch.float32: Rounding(2.0**-24, 2.0**-126, 2.0**-24, False),
    # R itself is computed in float64, so its error counts as well: twice the unit.
    torch.float64: Rounding(2.0**-52, 2.0**-1021, 2.0**-52, False),
}


def rounding(dtype: torch.dtype) -> Rounding:
    """The constants of a storage type."""
    return _ROUNDINGS[dtype]


@dataclass(frozen=True)
class Expected:
    """What one result of a call has to be.

    Attributes:
        value: R, float64.
        bound: the largest |K - R| that rounding explains, float64, without the slack; of the shape of ``value``.
        dtype: the result's storage type.
        zeros: where the result has to be exactly 0 (dropped elements), or None.
        extra: relative Frobenius error that a float32 kernel may have on top of the eager formula's (C2), where the
            algorithms differ.
        fair: whether the eager formula's error is a measure at all (C2): not where it is exact by luck, or rests on a
            handful of independent roundings.
        summed: what autograd adds to the error where it sums two gradients of one tensor, each rounded to its type:
            for reference and aten, which are composed of PyTorch's functions. None where it sums nothing.
        between: what PyTorch's functions add that round to the storage type what the next one reads: for aten. None
            where the bound holds such roundings anyway.
    """

    value: Tensor
    bound: Tensor
    dtype: torch.dtype
    zeros: Tensor | None = None
    extra: float = 0.0
    fair: bool = True
    summed: Tensor | None = None
    between: Tensor | None = None


def reach(t: Tensor, dtype: torch.dtype) -> Tensor:
    """|t|, or a size beyond all bounds where ``t`` overflows the storage type it may be rounded to in between."""
    return torch.where(t.abs() * (1 + 2**-12) < torch.finfo(dtype).max, t.abs(), 1e100)


def product_bound(
    value: Tensor,
    absolute: Tensor,
    ones: Tensor | float,
    length: int,
    dtype: torch.dtype,
    stored: torch.dtype,
    others: Tensor | float = 0.0,
) -> Tensor:
    """C1 for a result that is a sum of products of rounded factors.

    Args:
        value: R.
        absolute: A, the sum of the absolute products.
        ones: B, the same sum with 1 in place of the factor that is rounded in between.
        length: how many terms the longest sum behind it has.
        dtype: the type that factors are rounded to in between.
        stored: the type of the result.
        others: the sum of the absolute factors with 1 in place of the one that is read as it is stored.

    Returns:
        The bound, of the shape of ``value``.
    """
    r, s = rounding(dtype), rounding(stored)
    if r.narrow:
        return s.unit * value.abs() + r.unit * absolute + r.tiny * (1 + ones) + r.flushed * others
    return summing(value, value.abs() + absolute, length, r) + r.tiny * (1 + ones)


def score_error(r: Rounding, x: Tensor, weight: Tensor, bias: Tensor | float) -> Tensor:
    """The error of x weight^T + bias in float32 (float64) where it is not rounded to storage; ``bias`` is absolute."""
    wa = weight.abs()
    tiny = 2.0**-126 * (1 + wa.sum(1)) + r.flushed * x.abs().sum(1, True)
    return 2 * max(x.shape[1], 1) ** 0.5 * r.sums * (x.abs() @ wa.T + bias) + tiny


def walk(terms: int) -> float:
    """The relative error that a sum of so many terms may have beyond PyTorch's.

    torch.sum adds in a tree, which kernels that walk over rows need not (PyTorch's own layer_norm backward has 10 times
    the tree's error with 16,000 rows): a walk of n steps errs by about 0.2 sqrt(n) units. Nor does a BLAS say how it
    adds: of products of 400 numbers MKL had a third of a walk's error on one thread of a Xeon, and most of it on two.
    """
    return 0.25 * terms**0.5 * 2.0**-24


def summing(value: Tensor, absolute: Tensor, length: int, r: Rounding) -> Tensor:
    """What float32 (float64) rounding leaves in a sum of ``length`` terms of total size ``absolute``.

    Independent roundings grow with the root of their number. Those of equal terms (the gradient of a mean, rows that
    repeat) all go one way and grow with the number itself, but only where the sum is as large as its terms together.
    """
    return r.sums * (2 * max(length, 1) ** 0.5 * absolute + length / 4 * value.abs())


def sum_bound(value: Tensor, absolute: Tensor, length: int, dtype: torch.dtype, stored: torch.dtype) -> Tensor:
    """C1 for a plain sum of ``length`` exact terms in float32 (float64), rounded once to ``stored``."""
    r, s = rounding(dtype), rounding(stored)
    return s.unit * value.abs() + summing(value, absolute, length, r) + s.tiny
