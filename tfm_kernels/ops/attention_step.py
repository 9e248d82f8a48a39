"""One decoding step of an attention layer, in one call of the cpu backend.

    p = x in_weight^T + in_bias;  out = attention(q, keys, values);  y = out out_weight^T + out_bias

Not an op with backends of its own: bit for bit it is ops.linear, ops.attention and ops.linear with backend="cpu", and
their kernels run. In a step of few rows the way to three calls and the views between them costs as much as the kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _autograd, _backend, _library
from .attention_watch import is_watched


def _fake(x, in_weight, in_bias, out_weight, *rest):
    return x.new_empty((*x.shape[:-1], out_weight.shape[0]))


_STEP = _library.declare(
    "attention_step",
    "(Tensor x, Tensor in_weight, Tensor? in_bias, Tensor out_weight, Tensor? out_bias, Tensor(a!) keys, "
    "Tensor(b!) values, int length, bool grows, Tensor? keep) -> Tensor",
    _fake,
    ("cpu",),
)
_CHOICES = _backend.Choices()


def attention_step(
    x: Tensor,
    in_weight: Tensor,
    in_bias: Tensor | None,
    out_weight: Tensor,
    out_bias: Tensor | None,
    keys: Tensor,
    values: Tensor,
    length: int,
    grows: bool,
    keep: Tensor | None = None,
) -> Tensor | None:
    """Attends from each row of ``x`` to the first ``length`` keys that are kept.

    Args:
        x: (R, T, E), float16 | bfloat16 | float32 | float64; R * T is a multiple of B, equal to it where ``grows``.
        in_weight: (3 H D, E), the projections to q, k and v, of which k and v are left out unless ``grows``.
        in_bias: (3 H D,), or None for no bias.
        out_weight: (N, H D).
        out_bias: (N,), or None for no bias.
        keys: (B, H, S, D), D elements side by side.
        values: as ``keys``.
        length: how many keys are seen, the new one included.
        grows: the key and value of x are written at ``length`` - 1.
        keep: bool, broadcast to (B, H, T, length), True = attend; None shows everything.

    Returns:
        (R, T, N), or None where automatic choice does not run both projections on cpu, or where attention is watched:
        then nothing was written.

    Raises:
        TypeError, ValueError: the arguments of a projection are wrong.
        RuntimeError: those of the attention do not fit them.
    """
    key = _library.signature(x, in_weight, in_bias, out_weight, out_bias)
    taken = _CHOICES.get(key)
    if taken is None:
        taken = not torch.compiler.is_compiling() and _runs_on_cpu(x, in_weight, in_bias, out_weight, out_bias)
        _CHOICES.keep(key, taken)
    if not taken or is_watched():  # a watcher is told of ops.attention alone
        return None
    given = x, in_weight, in_bias, out_weight, out_bias, keys, values, length, grows, keep
    y = _autograd.below_autograd(_STEP["cpu"], *given)
    assert isinstance(y, Tensor)
    return y


def _runs_on_cpu(
    x: Tensor, in_weight: Tensor, in_bias: Tensor | None, out_weight: Tensor, out_bias: Tensor | None
) -> bool:
    if not _backend.offers("linear") or _library.kernels()["attention_step_cpu"] is not None:
        return False
    out = x.new_empty(*x.shape[:-1], out_weight.shape[1])
    first = _backend.chosen("linear", x, in_weight, in_bias)
    return first == "cpu" == _backend.chosen("linear", out, out_weight, out_bias)
