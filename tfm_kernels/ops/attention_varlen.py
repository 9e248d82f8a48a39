"""Attention over packed sequences: the public door to the packed form of the operators of attention.py."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _check
from .._backend import Choices, Op, register, select
from .._library import signature
from ..mask import Mask
from .attention import SUPPORT, prefer, run, stand_in
from .attention_call import (
    EVERYTHING,
    LONGEST,
    AttentionCall,
    bucket,
    check_device,
    check_heads,
    check_rest,
    check_scale,
    mask_parts,
    on_host,
)

_NAME = "attention_varlen"


def describe(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    mask: Mask | None = None,
    *,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = True,
) -> AttentionCall:
    """Checks the arguments of ``attention_varlen``."""
    op = _NAME
    check_heads(op, {"query": query, "key": key, "value": value}, "(total, H, D)", 3)
    _check.shape(op, "value", value, (*key.shape[:2], value.shape[2]), f"key {tuple(key.shape)}")
    _check_segments(op, "cu_seqlens_q", cu_seqlens_q, "max_seqlen_q", max_seqlen_q, query)
    _check_segments(op, "cu_seqlens_k", cu_seqlens_k, "max_seqlen_k", max_seqlen_k, key)
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"{op}: cu_seqlens_q and cu_seqlens_k must have one length, the number of sequences + 1, "
            f"got {cu_seqlens_q.shape[0]} and {cu_seqlens_k.shape[0]}"
        )
    if mask is None:
        mask = EVERYTHING
    elif not isinstance(mask, Mask):
        raise TypeError(f"{op}: mask must be a Mask (causal or window) or None, got {type(mask).__name__}")
    if mask.key_lengths is not None or mask.keep_matrix is not None:
        raise ValueError(
            f"{op}: mask must be causal or a window; lengths are what cu_seqlens_k says, got {mask.explain()}"
        )
    scale = check_scale(op, scale, query)
    check_rest(op, query, dropout_p, seed, return_lse=return_lse, deterministic=deterministic)
    return AttentionCall(
        query, key, value, mask, None, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, dropout_p, seed,
        return_lse, deterministic,
    )  # fmt: skip


def _check_segments(op: str, name: str, ends: Tensor, longest_name: str, longest: int, packed: Tensor) -> None:
    _check.tensor(op, name, ends)
    if ends.dtype not in (torch.int32, torch.int64) or ends.dim() != 1 or ends.shape[0] == 0:
        raise ValueError(
            f"{op}: {name} must be int32 or int64 of shape (B + 1,), "
            f"got {_check.dtype_name(ends)} of shape {tuple(ends.shape)}"
        )
    check_device(op, name, ends, packed)
    if isinstance(longest, bool) or not isinstance(longest, (int, torch.SymInt)):
        raise TypeError(f"{op}: {longest_name} must be an int, got {type(longest).__name__}")
    if not 0 <= longest < LONGEST:
        raise ValueError(f"{op}: {longest_name} must lie in [0, 2**31), got {longest}")
    _check_ends(op, name, ends, longest_name, longest, packed.shape[0])


def _check_ends(op: str, name: str, ends: Tensor, longest_name: str, longest: int, total: int) -> None:
    """Looks at the values, which the signature of a call does not hold."""
    if not on_host(ends):
        return
    values = ends.tolist()
    lengths = [end - start for start, end in zip(values, values[1:], strict=False)]
    if values[0] != 0 or values[-1] != total or min(lengths, default=0) < 0:
        raise ValueError(
            f"{op}: {name} must start at 0, never fall and end at {total}, the number of tokens, got {_short(values)}"
        )
    if max(lengths, default=0) > longest:
        raise ValueError(f"{op}: {longest_name} must be at least the longest sequence {max(lengths)}, got {longest}")


def _short(values: list[int]) -> str:
    return str(values) if len(values) <= 12 else f"[{', '.join(map(str, values[:6]))}, ..., {values[-1]}]"


_OP = register(Op(_NAME, SUPPORT, prefer, describe, bucket, stand_in))
_CHOICES = Choices()


def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    mask: Mask | None = None,
    *,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = True,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend within each of B sequences that lie packed behind one another, without padding.

    Sequence b holds the rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1 of ``query`` and likewise of ``key`` and
    ``value``; each is one attention call of its own (A.1 to A.4 of ``attention``).

    Args:
        query: (total_q, Hq, D), float16 | bfloat16 | float32 | float64, any strides.
        key: (total_k, Hk, D) of the same dtype and device; Hk divides Hq.
        value: (total_k, Hk, Dv).
        cu_seqlens_q: (B + 1,) int32 or int64, from 0 to total_q, never falling; equal neighbours are empty sequences.
        cu_seqlens_k: (B + 1,) as ``cu_seqlens_q``, from 0 to total_k.
        max_seqlen_q: at least the longest query sequence; also the row step of dropout's counter, so that a packed
            call repeats the padded call of that length.
        max_seqlen_k: at least the longest key sequence. On a GPU nobody looks at the lengths: rows beyond what they
            and these two cover are left undefined.
        mask: causal and window masks, measured within each sequence, or None.
        scale: factor of the scores, by default 1 / sqrt(D).
        dropout_p: probability to drop a weight, in [0, 1].
        seed: () int64 on query's device; None draws one from torch's generator where dropout_p > 0.
        return_lse: also return lse.
        deterministic: the backward repeats bit by bit; False allows atomic sums where they are faster.
        backend: "reference" | "aten" | "cpu" | "triton" | "cuda", or None to choose automatically.

    Returns:
        (total_q, Hq, Dv), dtype and device of ``query``, contiguous. With ``return_lse`` also lse (Hq, total_q),
        float32 (float64 for float64), differentiable.

    Raises:
        TypeError, ValueError: an argument is wrong (the message names it, what was expected and what it is).
        BackendError: ``backend`` was named and cannot run this call (the message says why).

    Numerics: as ``attention``.
    Cost: 4 Hq D sum(Tq_b Tk_b) operations forward and 10 backward, hidden tiles left out; extra memory O(total).

    Example:
        >>> q = k = v = torch.randn(7, 4, 16)
        >>> ends = torch.tensor([0, 3, 7])
        >>> attention_varlen(q, k, v, ends, ends, 4, 4, tfk.Mask.causal()).shape
        torch.Size([7, 4, 16])
    """
    ends, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    options = scale, dropout_p, return_lse, deterministic
    known = None
    if seed is None:
        known = signature(backend, query, key, value, *ends, *longest, mask_parts(mask), *options)
    name = _CHOICES.get(known)
    if name is None:
        call = describe(
            query, key, value, *ends, *longest, mask, scale=scale, dropout_p=dropout_p, seed=seed,
            return_lse=return_lse, deterministic=deterministic,
        )  # fmt: skip
        name = _CHOICES.keep(known, select(_OP, call, backend))
    else:
        _check_ends(_NAME, "cu_seqlens_q", cu_seqlens_q, "max_seqlen_q", max_seqlen_q, query.shape[0])
        _check_ends(_NAME, "cu_seqlens_k", cu_seqlens_k, "max_seqlen_k", max_seqlen_k, key.shape[0])
        factor = check_scale(_NAME, scale, query)
        shown = EVERYTHING if mask is None else mask
        call = AttentionCall(query, key, value, shown, None, *ends, *longest, factor, dropout_p, None, *options[2:])
    out, lse = run(call, name)
    return (out, lse) if return_lse else out
