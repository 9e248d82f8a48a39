"""How many floating-point operations the products of our operators take, for ``torch.utils.flop_counter``.

torch's counter knows torch's operators alone, and would count none in ours. As there, a multiplication and an addition
count as two, a mask takes nothing off, and what attention's backward computes again counts.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._library import NAMESPACE

_COUNTER = "torch.utils.flop_counter"
_BACKENDS = ("cpu", "triton", "cuda")


def _product(rows: int, *weights: Any) -> int:
    return 2 * rows * sum(weight.numel() for weight in weights if weight is not None)


def _linear(x: Tensor, weight: Tensor, *rest: Any, **told: Any) -> int:
    return _product(math.prod(x.shape[:-1]), weight)


def _ffn(x: Tensor, w1: Tensor, b1: Any, w2: Tensor, b2: Any, gate: Any, *rest: Any, **told: Any) -> int:
    return _product(x.shape[0], w1, w2, gate)


def _int8_ffn(
    x: Tensor, w1: Tensor, s1: Any, b1: Any, w2: Tensor, s2: Any, b2: Any, gate: Any, *rest: Any, **told: Any
) -> int:
    return _product(math.prod(x.shape[:-1]), w1, w2, gate)


def _ffn_bwd(
    dy: Tensor, x: Tensor, w1: Tensor, b1: Any, w2: Tensor, gate: Any, preact: Tensor, *rest: Any, **told: Any
) -> int:
    need_x, need_w1, need_b1, need_w2, _, need_gate = rest[-6:]
    hidden = need_x or need_w1 or need_b1 or need_gate  # whether anything needs the gradient of the hidden activation
    wanted = [w2] * (hidden + need_w2) + [w1, gate] * need_x + [w1] * need_w1 + [gate] * need_gate
    if preact.dim() != 2 and (hidden or need_w2):
        wanted += [w1, gate]
    return _product(x.shape[0], *wanted)


def _pairs(query: Tensor, key: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None) -> int:
    """Scores of all heads; packed sequences have those of their own keys alone, which no fake tensor tells."""
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]
    if type(cu_seqlens_q) is not Tensor or cu_seqlens_q.is_meta:
        return query.shape[0] * query.shape[1] * key.shape[0]
    return query.shape[1] * int((cu_seqlens_q.diff().long() * cu_seqlens_k.diff().long()).sum())


def _attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Any, keep: Any, lengths: Any, cu_q: Any, cu_k: Any, *rest: Any, **told: Any
) -> int:
    return 2 * _pairs(q, k, cu_q, cu_k) * (q.shape[-1] + v.shape[-1])


def _attention_bwd(
    dout: Tensor, dlse: Any, q: Tensor, k: Tensor, v: Tensor, out: Any, lse: Any, *rest: Any, **told: Any
) -> int:
    return 2 * _pairs(q, k, *rest[3:5]) * (3 * q.shape[-1] + 2 * v.shape[-1])


def _attention_step(x: Tensor, w_in: Tensor, b_in: Any, w_out: Tensor, *rest: Any, **told: Any) -> int:
    length, grows = rest[3:5]
    rows, width = x.shape[0] * x.shape[1], w_in.shape[0] // 3
    return _product(rows, w_in if grows else w_in[:width], w_out) + 4 * rows * width * length


def _cross_entropy(x: Tensor, weight: Tensor, bias: Any, target: Tensor, *rest: Any, **told: Any) -> int:
    save_x, save_weight = rest[2:4]  # whose gradients are formed in the forward, where the logits are
    return _product(target.numel(), weight) * (1 + save_x + save_weight)


def _cross_entropy_bwd(
    dloss: Tensor, x: Tensor, weight: Tensor, bias: Any, target: Tensor, lse: Any, gx: Tensor, gweight: Tensor,
    *rest: Any, **told: Any,
) -> int:  # fmt: skip
    need_x, need_weight = rest[3:5]
    again = (need_x and gx.numel() == 0) + (need_weight and gweight.numel() == 0)
    return _product(target.numel(), weight) * (again + 1 if again else 0)


FORMULAS: dict[str, Callable[..., int]] = {
    "attention_fwd": _attention,
    "attention_bwd": _attention_bwd,
    "attention_step": _attention_step,
    "ffn_fwd": _ffn,
    "ffn_bwd": _ffn_bwd,
    "int8_ffn_fwd": _int8_ffn,
    "int8_linear_fwd": _linear,
    "linear_fwd": _linear,
    "linear_cross_entropy_fwd": _cross_entropy,
    "linear_cross_entropy_bwd": _cross_entropy_bwd,
}


def tell_torch() -> None:
    """Gives torch's counter the formulas, where it is there: importing it takes a second, and imports Triton."""
    counter = sys.modules.get(_COUNTER)
    known = getattr(counter, "flop_registry", None)
    if known is None:
        return
    for name, formula in FORMULAS.items():
        for backend in _BACKENDS:
            operator = getattr(getattr(torch.ops, NAMESPACE), f"{name}_{backend}", None)
            if operator is not None and operator not in known:
                counter.register_flop_formula(operator, get_raw=True)(formula)  # type: ignore[union-attr]
