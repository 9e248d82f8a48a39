"""The feed-forward block of a Transformer layer: linear, activation, optional gate, dropout, linear.

For rows x (M, E), weights as in nn.Linear, mask R of tfm_kernels/dropout.py at (row, hidden column):

    p = x w1^T + b1                 (M, F)                                                    (FFN.1)
    g = x gate^T + b_g              (M, F), or 1 without a gate                               (FFN.2)
    h = act(p) g R / (1 - dropout_p), and exactly 0 where R drops                             (FFN.3)
    y = h w2^T + b2                 (M, Eo)                                                   (FFN.4)

    dw2 = dy^T h,  db2 = sum of dy over rows,  dh = (dy w2) R / (1 - dropout_p)               (FFN.5)
    dp = dh g act'(p),  dg = dh act(p)                                                        (FFN.6)
    dw1 = dp^T x,  db1 = sum of dp over rows,  dgate = dg^T x,  db_g = sum of dg over rows,
    dx = dp w1 + dg gate                                                                      (FFN.7)

The operators take b1 and b_g, where the gate has one, as one vector (2F,).

Residual: preact (M, F) = p, or (M, 2F) = [p, g] with a gate, in the storage dtype; (0,) where it is not saved, and then
the backward recomputes it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _autograd, _backend, _check, _library
from ..aten import ffn as aten
from ..reference import ffn as reference
from .ffn_call import ACTIVATIONS, Call, bucket, describe, is_turned, prefer

KERNELS = {"cpu": _backend.can, "triton": _backend.no_float64, "cuda": _backend.no_float64}
SUPPORT = _backend.support("ffn", KERNELS)


def _unproven(backend: str, call: Call) -> str | None:
    return "not proven on a GPU where the gate has a bias; name it explicitly" if call.gate_biased else None


def _stand_in(call: Call) -> _backend.StandIn:
    given: dict[str, Any] = {"dtype": call.dtype, "device": call.device}
    x = torch.randn(call.rows, call.width, **given)
    w1 = torch.randn(call.hidden, call.width, **given).div_(max(call.width, 1) ** 0.5)
    w2 = torch.randn(call.out, call.hidden, **given).div_(max(call.hidden, 1) ** 0.5)
    sizes = call.hidden * (2 if call.gate_biased else 1), call.out
    b1, b2 = (torch.zeros(size, **given) if call.biased else None for size in sizes)
    options: dict[str, Any] = {"activation": call.activation, "dropout_p": call.dropout_p}
    gate = torch.randn_like(w1).div_(max(call.width, 1) ** 0.5) if call.gated else None
    if call.turned:
        w1, w2 = w1.t().contiguous().t(), w2.t().contiguous().t()
        gate = None if gate is None else gate.t().contiguous().t()
    leaves = [leaf for leaf in (x, w1, b1, w2, b2, gate) if leaf is not None]
    return _backend.StandIn(
        lambda backend: (ffn(x, w1, b1, w2, b2, gate=gate, **options, backend=backend),),
        [leaf.requires_grad_() for leaf in leaves] if call.training else [],
    )


OP = _backend.register(_backend.Op("ffn", SUPPORT, prefer, describe, bucket, _stand_in, _unproven))
_CHOICES = _backend.Choices()  # (backend, Call)


def _fwd_fake(x, w1, b1, w2, b2, gate, activation, dropout_p, seed, dropout_rows, save_preact):
    columns = w1.shape[0] * (1 if gate is None else 2)
    preact = x.new_empty((x.shape[0], columns) if save_preact else (0,))
    return x.new_empty((x.shape[0], w2.shape[0])), preact


def _bwd_fake(dy, x, w1, b1, w2, gate, preact, activation, dropout_p, seed, dropout_rows, *needs):
    (E, F), Eo = (x.shape[1], w1.shape[0]), w2.shape[0]
    shapes = (x.shape, (F, E), (F,) if b1 is None else b1.shape, (Eo, F), (Eo,), (F, E))
    return tuple(x.new_empty(shape if need else (0,)) for shape, need in zip(shapes, needs, strict=True))


FWD = _library.declare(
    "ffn_fwd",
    "(Tensor x, Tensor w1, Tensor? b1, Tensor w2, Tensor? b2, Tensor? gate, int activation, float dropout_p, "
    "Tensor? seed, Tensor? dropout_rows, bool save_preact) -> (Tensor y, Tensor preact)",
    _fwd_fake,
    KERNELS,
)
BWD = _library.declare(
    "ffn_bwd",
    "(Tensor dy, Tensor x, Tensor w1, Tensor? b1, Tensor w2, Tensor? gate, Tensor preact, int activation, "
    "float dropout_p, Tensor? seed, Tensor? dropout_rows, bool need_x, bool need_w1, bool need_b1, bool need_w2, "
    "bool need_b2, bool need_gate) -> (Tensor dx, Tensor dw1, Tensor db1, Tensor dw2, Tensor db2, Tensor dgate)",
    _bwd_fake,
    KERNELS,
)


_apply = _autograd.differentiate(FWD, BWD)


def ffn(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    *,
    activation: str = "relu",
    gate: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    dropout_rows: Tensor | None = None,
    recompute: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Runs each row of ``x`` through linear, activation, optional gate, dropout and linear.

    y = dropout(act(x w1^T + b1) [* (x gate^T + b_g)]) w2^T + b2      (FFN.1 to FFN.4)

    Args:
        x: (..., E), float16 | bfloat16 | float32 | float64. Any strides.
        w1: (F, E), dtype of ``x``, as in nn.Linear.
        b1: (F,), or None for no bias. With a gate also (2F,), b1 and b_g one behind the other, as a layer has it that
            computes both products at once; on a GPU automatic choice leaves such calls to PyTorch.
        w2: (Eo, F); Eo is E in a Transformer, any other width is allowed.
        b2: (Eo,), or None for no bias.
        activation: "relu" | "gelu" (by erf) | "gelu_tanh" | "silu".
        gate: (F, E) of the gated family (GEGLU, SwiGLU): its product multiplies the activation. None for no gate.
        dropout_p: probability that an element of the hidden activation is zeroed, in [0, 1]; the rest grow by
            1 / (1 - dropout_p).
        seed: () int64 on the device of ``x``. None draws one from torch's generator where dropout_p > 0.
        dropout_rows: (M,) int64, the number that each row has in the dropout rule; None counts 0..M-1. Packed
            execution passes the rows' places in the padded run and gets that run's masks.
        recompute: True keeps no (M, F) tensor for the backward, which then computes it again: memory for time.
        backend: "reference" | "aten" | "cpu" | "triton" | "cuda", or None to choose automatically.

    Returns:
        (..., Eo), dtype and device of ``x``, contiguous.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: shapes, dtypes or devices disagree (the message names argument, expected, got).
        BackendError: ``backend`` was named and cannot run this call (the message says why).

    Numerics: sums in float32 (float64 for float64). The hidden activation is rounded at most once to the storage dtype;
        float32 means float32. Deterministic, forward and backward. Differentiable once in x, the weights and biases
        (twice on reference and aten).
    Cost: 4 M E F FLOPs forward (6 with a gate), twice that backward; M = product of the leading dimensions. The cpu
        backend needs no memory that grows with M beyond x, y and, where a gradient will be needed, preact.
    Source: Vaswani et al. 2017, arXiv:1706.03762, eq. 2; gates: Shazeer 2020, arXiv:2002.05202.

    Example:
        >>> w1, w2 = torch.randn(32, 8), torch.randn(8, 32)
        >>> ffn(torch.randn(2, 5, 8), w1, torch.zeros(32), w2, None, activation="gelu").shape
        torch.Size([2, 5, 8])
    """
    turned = is_turned(w1, w2, gate)
    key = _library.signature(backend, x, w1, b1, w2, b2, activation, gate, dropout_p, dropout_rows, recompute, turned)
    choice = _CHOICES.get(key)
    if choice is None:
        options = {"activation": activation, "gate": gate, "dropout_p": dropout_p, "seed": seed}
        call = describe(x, w1, b1, w2, b2, **options, dropout_rows=dropout_rows, recompute=recompute)
        choice = _CHOICES.keep(key, (_backend.select(OP, call, backend), call))
    name, call = choice
    if seed is not None or dropout_p > 0.0:
        seed = _check.seed("ffn", dropout_p, seed, x.device)
    if name == "aten":
        return aten.ffn(x, w1, b1, w2, b2, activation, gate, dropout_p, seed, dropout_rows, recompute)
    rows = x if x.dim() == 2 else x.reshape(call.rows, call.width)
    if name == "reference":
        y = reference.ffn(rows, w1, b1, w2, b2, activation, gate, dropout_p, seed, dropout_rows)
        return y if x.dim() == 2 else y.view(*x.shape[:-1], call.out)
    index, save = ACTIVATIONS.index(activation), call.training and not recompute
    dropout_rows = None if dropout_rows is None else dropout_rows.contiguous()
    y, _ = _apply(name, rows, w1, b1, w2, b2, gate, index, float(dropout_p), seed, dropout_rows, save)
    return _autograd.shaped_like(y, x)
