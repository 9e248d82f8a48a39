"""torch.nn.functional.scaled_dot_product_attention on the operators of attention.py."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .. import _check
from .._autocast import as_autocast
from .._backend import Choices, Op, register, select
from .._library import signature
from ..mask import Mask
from .attention import SUPPORT, prefer, run, stand_in
from .attention_call import AttentionCall, bucket, check_device, checked_call, describe_dense

_NAME = "scaled_dot_product_attention"
_CAUSAL = Mask.causal()


def describe(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> AttentionCall:
    """Checks the arguments of ``scaled_dot_product_attention`` and brings them to (B, H, T, D)."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        _check.tensor(_NAME, name, tensor)
        if tensor.dim() < 2:
            raise ValueError(f"{_NAME}: {name} must have at least 2 dimensions, got shape {tuple(tensor.shape)}")
        if tensor.dim() != query.dim():
            raise ValueError(
                f"{_NAME}: {name} must have as many dimensions as query {tuple(query.shape)}, "
                f"got shape {tuple(tensor.shape)}"
            )
    for name, flag in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        if not isinstance(flag, bool):
            raise TypeError(f"{_NAME}: {name} must be True or False, got {type(flag).__name__}")
    _check.tensor(_NAME, "attn_mask", attn_mask, optional=True)
    query, key, value, attn_mask = as_autocast(query, key, value, attn_mask)
    if attn_mask is not None:
        check_device(_NAME, "attn_mask", attn_mask, query)
        if attn_mask.dtype not in (torch.bool, query.dtype, torch.float32):
            raise ValueError(
                f"{_NAME}: attn_mask must be bool (True = may attend) or floating like query (added to the scores), "
                f"got {_check.dtype_name(attn_mask)}"
            )
    if is_causal and attn_mask is not None:
        raise ValueError(f"{_NAME}: attn_mask must be None where is_causal is True, got shape {tuple(attn_mask.shape)}")
    mask: Mask | Tensor | None = _CAUSAL if is_causal else None
    alike = query.dim() == 4 and query.shape[0] == key.shape[0] and key.shape[:2] == value.shape[:2]
    if alike and (enable_gqa or query.shape[1] == key.shape[1]):
        if attn_mask is not None:
            mask = _mask(attn_mask, query, key, query.shape[:2], enable_gqa)
        return describe_dense(_NAME, query, key, value, mask, None, scale, dropout_p, None, False, True)
    leading = _leading(query, key, value, enable_gqa)
    if attn_mask is not None:
        mask = _mask(attn_mask, query, key, leading, enable_gqa)
    query, key, value = (_four_dims(t, leading, enable_gqa) for t in (query, key, value))
    return describe_dense(_NAME, query, key, value, mask, None, scale, dropout_p, None, False, True)


def _leading(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> torch.Size:
    """The axes before (T, D) after torch's broadcasting; with enable_gqa the heads stay out of it."""
    kept = -3 if enable_gqa and query.dim() >= 3 else -2
    shapes = [tuple(t.shape[:kept]) for t in (query, key, value)]
    try:
        broadcast = torch.broadcast_shapes(*shapes)
    except RuntimeError:
        hint = "" if enable_gqa else " (different numbers of heads need enable_gqa=True)"
        raise ValueError(
            f"{_NAME}: query, key and value must have leading axes that broadcast, "
            f"got {tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}{hint}"
        ) from None
    return torch.Size((*broadcast, *query.shape[kept:-2]))


def _four_dims(tensor: Tensor, leading: torch.Size, enable_gqa: bool) -> Tensor:
    """(..., H, T, D) as (B, H, T, D); fewer leading axes than two make size-1 axes, more are joined into B."""
    heads = tensor.shape[-3] if enable_gqa and tensor.dim() >= 3 else leading[-1] if leading else 1
    tensor = tensor.expand(*leading[:-1], *((heads,) if leading else ()), *tensor.shape[-2:])
    if len(leading) == 1:  # (B, T, D): torch's batch without heads
        return tensor.unsqueeze(1) if not enable_gqa else tensor.unsqueeze(0)
    return tensor.reshape(math.prod(leading[:-1]), heads, *tensor.shape[-2:])


def _mask(attn_mask: Tensor, query: Tensor, key: Tensor, leading: torch.Size, enable_gqa: bool) -> Tensor:
    """attn_mask with torch's broadcasting to (..., H, Tq, Tk), as four dimensions."""
    full = (*leading, query.shape[-2], key.shape[-2])
    if (
        attn_mask.dim() < 2
        or attn_mask.dim() > len(full)
        or any(
            given not in (1, wanted) for given, wanted in zip(reversed(attn_mask.shape), reversed(full), strict=False)
        )
    ):
        raise ValueError(
            f"{_NAME}: attn_mask must have at least 2 dimensions and broadcast to {full}, "
            f"got shape {tuple(attn_mask.shape)}"
        )
    if attn_mask.dim() == 3:  # its first axis is the batch where that is the only axis there is, else the heads
        attn_mask = attn_mask.unsqueeze(1 if len(leading) == 1 and not enable_gqa else 0)
    if len(leading) <= 2:
        return attn_mask
    attn_mask = attn_mask.expand(*leading, *attn_mask.shape[-2:])
    return attn_mask.reshape(math.prod(leading[:-1]), leading[-1], *attn_mask.shape[-2:])


_OP = register(Op(_NAME, SUPPORT, prefer, describe, bucket, stand_in))
_CHOICES = Choices()


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    backend: str | None = None,
) -> Tensor:
    """Drop-in for torch.nn.functional.scaled_dot_product_attention: same arguments, same meaning.

    out = dropout(softmax(scale * query key^T + attn_mask)) value      (A.1 to A.4 of ``attention``)

    Differences: dropout follows tfm_kernels.dropout (seeded from torch's generator); NaN in keys that no query may see
    reaches nothing; is_causal with attn_mask is always refused.

    Args:
        query: (..., Hq, Tq, D), float16 | bfloat16 | float32 | float64; 2 dimensions or more, any strides.
        key: (..., Hk, Tk, D) of the same dtype and device.
        value: (..., Hk, Tk, Dv).
        attn_mask: bool (True = may attend) or floating (added to the scores), broadcast to (..., Hq, Tq, Tk).
        dropout_p: probability to drop a weight, in [0, 1].
        is_causal: query i sees keys j <= i (top-left, also where Tq != Tk); not together with ``attn_mask``.
        scale: factor of the scores, by default 1 / sqrt(D).
        enable_gqa: Hk may be a divisor of Hq.
        backend: "reference" | "aten" | "cpu" | "triton" | "cuda", or None to choose automatically.

    Returns:
        (..., Hq, Tq, Dv), dtype and device of ``query``; under torch.autocast its dtype, to which, as for torch's own,
        all that is not float64 is cast.

    Raises:
        TypeError, ValueError: an argument is wrong (the message names it, what was expected and what it is).
        BackendError: ``backend`` was named and cannot run this call (the message says why).

    Numerics: as ``attention``.
    Cost: as ``attention``.

    Example:
        >>> q = k = v = torch.randn(2, 4, 10, 16)
        >>> scaled_dot_product_attention(q, k, v, is_causal=True).shape
        torch.Size([2, 4, 10, 16])
    """
    known = None
    if not torch._C._is_any_autocast_enabled():  # which may cast the tensors
        known = signature(backend, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    name = _CHOICES.get(known)
    if name is None:
        call = describe(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        name = select(_OP, call, backend)
        if call.query is query and call.key is key and call.value is value:
            _CHOICES.keep(known, name)
    else:
        shown = _CAUSAL if is_causal else attn_mask
        if attn_mask is not None and attn_mask.dim() == 3:
            shown = attn_mask.unsqueeze(0)
        call = checked_call(_NAME, query, key, value, shown, None, scale, dropout_p, False, True)
    out, _ = run(call, name)
    if query.dim() == 4 and out.shape[0] == query.shape[0]:
        return out
    return out.reshape(*_leading(query, key, value, enable_gqa), *out.shape[-2:])
