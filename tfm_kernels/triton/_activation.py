"""The activations of ffn and their slopes on the device, FFN.3 and FFN.6 of tfm_kernels/ops/ffn.py.

float32 in and out. Errors are a few units of 1, not of the result: 0.5 (1 + erf(p)) far below 0 keeps its absolute
precision, as PyTorch's own does. An inf or NaN gives what the formula gives in IEEE arithmetic.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

# the order of ACTIVATIONS in tfm_kernels/_library.py, whose index the operators take
RELU = tl.constexpr(0)
GELU = tl.constexpr(1)
GELU_TANH = tl.constexpr(2)
SILU = tl.constexpr(3)
COUNT = 4


@triton.jit
def sigmoid(p):
    """1 / (1 + e^-p): 1 and 0 far out."""
    return 1.0 / (1.0 + tl.exp(-p))


@triton.jit
def sigmoid_and_slope(p):
    """(s, s (1 - s)) of s = sigmoid(p), each to a few units of itself: 1 - s, of which little is left, is not taken."""
    small = tl.exp(-tl.abs(p))
    share = 1.0 / (1.0 + small)
    rest = small * share
    return tl.where(p < 0.0, rest, share), rest * share


@triton.jit
def twice_u(p):
    """2 sqrt(2 / pi) (p + 0.044715 p^3): 0.5 (1 + tanh(u)) = sigmoid(2 u)."""
    return p * (1.59576912160573071176 + 0.07135481627260025 * p * p)


@triton.jit
def activate(p, ACTIVATION: tl.constexpr):
    """act(p)."""
    if ACTIVATION == RELU:
        value = tl.where(p < 0.0, 0.0, p)
    elif ACTIVATION == GELU:
        value = p * (0.5 + 0.5 * tl.math.erf(p * 0.70710678118654752440))
    elif ACTIVATION == GELU_TANH:
        value = p * sigmoid(twice_u(p))
    else:
        value = p * sigmoid(p)
    return value


@triton.jit
def activate_and_slope(p, ACTIVATION: tl.constexpr):
    """act(p) and act'(p)."""
    if ACTIVATION == RELU:
        value = tl.where(p < 0.0, 0.0, p)
        slope = tl.where(p <= 0.0, 0.0, 1.0)
    elif ACTIVATION == GELU:
        area = 0.5 + 0.5 * tl.math.erf(p * 0.70710678118654752440)
        value = p * area
        slope = area + p * (0.39894228040143267794 * tl.exp(-0.5 * p * p))
    elif ACTIVATION == GELU_TANH:
        area, rest = sigmoid_and_slope(twice_u(p))  # rest is 0 far out, where the cubic may have overflowed
        square = tl.where(rest == 0.0, 0.0, p * p)
        value = p * area
        slope = area + p * rest * (1.59576912160573071176 + 0.21406444881780075 * square)
    else:
        area, rest = sigmoid_and_slope(p)
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
