"""The activations of ffn and their slopes on the device, FFN.3 and FFN.6 of tfm_kernels/ops/ffn.py.

float32 in and out. Errors are a few units of 1, not of the result: 0.5 (1 + erf(p)) far below 0 keeps its absolute
precision, as PyTorch's own does. An inf or NaN gives what the formula gives in IEEE arithmetic.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ._tile import INTERPRETED, power_of_e

# the order of ACTIVATIONS in tfm_kernels/_library.py, whose index the operators take
RELU = tl.constexpr(0)
GELU = tl.constexpr(1)
GELU_TANH = tl.constexpr(2)
SILU = tl.constexpr(3)
COUNT = 4


@triton.jit
def exponential(p, EXACT: tl.constexpr):
    """e^p, by power_of_e() where it is not to be EXACT."""
    if EXACT:
        power = tl.exp(p)
    else:
        power = power_of_e(p)
    return power


@triton.jit
def reciprocal(t, EXACT: tl.constexpr):
    """1 / t of t >= 1; where it is not to be EXACT by one instruction, and 0 below 2^-126."""
    if EXACT or INTERPRETED:
        value = 1.0 / t
    else:
        value = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", (t,), dtype=tl.float32, is_pure=True, pack=1
        )
    return value


@triton.jit
def sigmoid(p, EXACT: tl.constexpr):
    """1 / (1 + e^-p): 1 and 0 far out."""
    return reciprocal(1.0 + exponential(-p, EXACT), EXACT)


@triton.jit
def sigmoid_and_slope(p, EXACT: tl.constexpr):
    """(s, s (1 - s)) of s = sigmoid(p), each to a few units of itself: 1 - s, of which little is left, is not taken."""
    small = exponential(-tl.abs(p), EXACT)
    share = reciprocal(1.0 + small, EXACT)
    rest = small * share
    return tl.where(p < 0.0, rest, share), rest * share


@triton.jit
def twice_u(p):
    """2 sqrt(2 / pi) (p + 0.044715 p^3): 0.5 (1 + tanh(u)) = sigmoid(2 u)."""
    return p * (1.59576912160573071176 + 0.07135481627260025 * p * p)


@triton.jit
def normal_area(p, EXACT: tl.constexpr):
    """0.5 (1 + erf(p / sqrt(2))), the standard normal's area up to p.

    To 6e-8 where it is not to be EXACT, by a third of erf's instructions, which is both of its branches for every
    element. The smaller of p's two areas is 2^(a r(a) - 1) of a = |p|; r was fitted to its absolute error, and from 14
    on the power is 0.
    """
    if EXACT:
        area = 0.5 + 0.5 * tl.math.erf(p * 0.70710678118654752440)
    else:
        a = tl.minimum(tl.abs(p), 14.0)
        r = tl.fma(a, -7.801691594977456e-07, 1.740825791785028e-05)
        r = tl.fma(a, r, -9.433949162485078e-05)
        r = tl.fma(a, r, -3.2857232145033777e-04)
        r = tl.fma(a, r, 7.274520117789507e-03)
        r = tl.fma(a, r, -5.2615296095609665e-02)
        r = tl.fma(a, r, -4.5917779207229614e-01)
        r = tl.fma(a, r, -1.151107668876648)
        smaller = tl.exp2(tl.fma(a, r, -1.0))
        area = tl.where(p < 0.0, smaller, 1.0 - smaller)
    return area


@triton.jit
def activate(p, ACTIVATION: tl.constexpr, EXACT: tl.constexpr):
    """act(p); EXACT where it is to be kept as float32."""
    if ACTIVATION == RELU:
        value = tl.where(p < 0.0, 0.0, p)
    elif ACTIVATION == GELU:
        value = p * normal_area(p, EXACT)
    elif ACTIVATION == GELU_TANH:
        value = p * sigmoid(twice_u(p), EXACT)
    else:
        value = p * sigmoid(p, EXACT)
    return value


@triton.jit
def activate_and_slope(p, ACTIVATION: tl.constexpr, EXACT: tl.constexpr):
    """act(p) and act'(p); EXACT where they are to be kept as float32."""
    if ACTIVATION == RELU:
        value = tl.where(p < 0.0, 0.0, p)
        slope = tl.where(p <= 0.0, 0.0, 1.0)
    elif ACTIVATION == GELU:
        area = normal_area(p, EXACT)
        value = p * area
        slope = area + p * (0.39894228040143267794 * exponential(-0.5 * p * p, EXACT))
    elif ACTIVATION == GELU_TANH:
        area, rest = sigmoid_and_slope(twice_u(p), EXACT)  # rest is 0 far out, where the cubic may have overflowed
        square = tl.where(rest == 0.0, 0.0, p * p)
        value = p * area
        slope = area + p * rest * (1.59576912160573071176 + 0.21406444881780075 * square)
    else:
        area, rest = sigmoid_and_slope(p, EXACT)
        value = p * area
        slope = area + p * rest
    return value, slope


def call_shape(op: str, x: Tensor, w1: Tensor, w2: Tensor, activation: int) -> tuple[int, int, int, int]:
    """(M, E, F, Eo) of a call whose tensors have two axes."""
    for name, t in (("x", x), ("w1", w1), ("w2", w2)):
        if t.dim() != 2:
            raise ValueError(f"{op}: {name} must have 2 dimensions, got shape {tuple(t.shape)}")
    if not 0 <= activation < COUNT:
        raise ValueError(f"{op}: activation must lie in 0..{COUNT - 1}, got {activation}")
    return *x.shape, w1.shape[0], w2.shape[0]


def biases_of(b1: Tensor | None, gate: Tensor | None, F: int) -> tuple[Tensor | None, Tensor | None]:
    """b1 and b_g of ops/ffn.py's one vector."""
    if b1 is None or gate is None or b1.shape != (2 * F,):
        return b1, None
    return b1[:F], b1[F:]
