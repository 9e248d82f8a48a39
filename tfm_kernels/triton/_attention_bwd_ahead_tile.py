"""What Gluon's backward kernels of attention share: weights with their marks, dx.

Hidden pairs and dropped weights are marks on a weight itself, p >= 0: where the registers of scores are, the next
product may be on its way already.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ._attention_bwd_tile import weight_of

RING = gl.constexpr(4)  # tiles that pass have a place at once: the stages of all launches


@gluon.jit
def negative(t):
    """-t; Triton's own is a difference with 0, which takes an instruction where this takes a bit of another's."""
    return gl.inline_asm_elementwise("neg.f32 $0, $1;", "=f,f", [t], gl.float32, is_pure=True, pack=1)


@gluon.jit
def marked(power, shown, kept, MASKED: gl.constexpr, DROPPED: gl.constexpr):
    """Weights, A.3: below 0 (or -0) where dropout drops them, -inf where they are not ``shown``."""
    p = weight_of(power)
    if DROPPED:
        p = gl.where(kept, p, negative(p))
    if MASKED:
        p = gl.where(shown, p, float("-inf"))
    return p


@gluon.jit
def gradient_of(p, products, delta, MASKED: gl.constexpr, DROPPED: gl.constexpr):
    """dx / keep_scale of a tile, A.7, by marked() weights and delta / keep_scale; 0, not a product with 0, where a pair
    is hidden.
    """
    if DROPPED:
        products = gl.where(p >= 0.0, products, 0.0)
    dx = gl.abs(p) * (products - delta)
    if MASKED:
        dx = gl.where(p == float("-inf"), 0.0, dx)
    return dx
