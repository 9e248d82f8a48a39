"""The arguments of an attention call, checked and brought to one form that every backend understands."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from .. import _check, _library, _measured
from ..mask import Mask

EVERYTHING = Mask()
_LEAST, _MOST = 2.0**-126, 2.0**127  # limits of a scale that is no float64
LONGEST = 1 << 31  # positions of one sequence; also what the dropout counter leaves room for


class AttentionCall(NamedTuple):  # a frozen dataclass of so many fields takes 3 us to make, this 0.5
    """A checked call. Dense calls have no cu_seqlens; bias is 4-D; a float mask has become part of the bias."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Mask
    bias: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    scale: float
    dropout_p: float
    seed: Tensor | None
    return_lse: bool
    deterministic: bool

    @property
    def device(self) -> str:
        """The type of device that the tensors are on."""
        return self.query.device.type

    @property
    def dtype(self) -> torch.dtype:
        """The tensors' dtype."""
        return self.query.dtype


def bucket(call: AttentionCall) -> tuple[str, str]:
    """The device, and what a measured time depends on."""
    query, key, mask, rounded = call.query, call.key, call.mask, _measured.rounded
    packed = call.cu_seqlens_q is not None
    sequences = call.cu_seqlens_q.shape[0] - 1 if call.cu_seqlens_q is not None else query.shape[0]
    return query.device.type, _measured.bucket(
        query.dtype, sequences=rounded(sequences), heads=query.shape[1], key_heads=key.shape[1],
        tokens=rounded(query.shape[0]) if packed else None, queries=rounded(call.max_seqlen_q),
        keys=rounded(call.max_seqlen_k), dim=query.shape[-1], value_dim=call.value.shape[-1], banded=mask.has_band(),
        lengths=mask.key_lengths is not None, kept=mask.keep_matrix is not None, biased=call.bias is not None,
        dropout=call.dropout_p > 0.0, lse=call.return_lse,
        training=_check.records_graph(query, key, call.value, call.bias),
    )  # fmt: skip


def describe_dense(
    op: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | Tensor | None,
    bias: Tensor | None,
    scale: float | None,
    dropout_p: float,
    seed: Tensor | None,
    return_lse: bool,
    deterministic: bool,
) -> AttentionCall:
    """Checks a dense call: (B, Hq, Tq, D), (B, Hk, Tk, D), (B, Hk, Tk, Dv)."""
    check_heads(op, {"query": query, "key": key, "value": value}, "(B, H, T, D)", 4)
    batch, heads, queries, _ = query.shape
    keys = key.shape[2]
    if key.shape[0] != batch:
        raise ValueError(f"{op}: key must have the batch size {batch} of query, got shape {tuple(key.shape)}")
    _check.shape(op, "value", value, (*key.shape[:3], value.shape[3]), f"key {tuple(key.shape)}")
    if _library.certain(queries >= LONGEST) or _library.certain(keys >= LONGEST):
        raise ValueError(f"{op}: Tq and Tk must be below 2**31, got {queries} and {keys}")
    sizes = (batch, heads, queries, keys)
    bias = check_bias(op, "bias", bias, query, sizes)
    mask, bias = mask_and_bias(op, mask, bias, query, sizes)
    scale = check_scale(op, scale, query)
    check_rest(op, query, dropout_p, seed, return_lse=return_lse, deterministic=deterministic)
    return AttentionCall(
        query, key, value, mask, bias, None, None, queries, keys, scale, dropout_p, seed, return_lse, deterministic
    )


def checked_call(
    op: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | Tensor | None,
    bias: Tensor | None,
    scale: float | None,
    dropout_p: float,
    return_lse: bool,
    deterministic: bool,
) -> AttentionCall:
    """The same as ``describe_dense`` for arguments like those that it has accepted, without a seed.

    Only lengths, whose values are not in the signature of a call, are looked at again.
    """
    queries, keys = query.shape[2], key.shape[2]
    if bias is not None and bias.dim() == 2:
        bias = bias[None, None]
    if mask is None:
        mask = EVERYTHING
    elif not isinstance(mask, Mask):
        four = mask[None, None] if mask.dim() == 2 else mask
        if mask.dtype == torch.bool:
            mask = Mask(keep_matrix=four)
        else:
            mask, bias = EVERYTHING, four if bias is None else bias_sum(four, bias, query.dtype)
    elif mask.key_lengths is not None:
        _check_lengths(op, mask.key_lengths, keys)
    scale = check_scale(op, scale, query)
    return AttentionCall(
        query, key, value, mask, bias, None, None, queries, keys, scale, dropout_p, None, return_lse, deterministic
    )


def mask_parts(mask: Mask | Tensor | None) -> Any:
    """What ``_library.signature`` is to see of a mask."""
    return (mask.top_left, mask.bottom_right, mask.key_lengths, mask.keep_matrix) if isinstance(mask, Mask) else mask


def check_heads(op: str, given: dict[str, Tensor], layout: str, dims: int) -> None:
    """Refuses tensors of another layout, of several dtypes or devices, or whose heads do not match."""
    for name, tensor in given.items():
        _check.tensor(op, name, tensor)
    query, key = given["query"], given["key"]
    for name, tensor in given.items():
        if tensor.dim() != dims:
            raise ValueError(f"{op}: {name} must be {layout}, {dims} dimensions, got shape {tuple(tensor.shape)}")
        if tensor.dtype not in _check.FLOATING:
            _check.floating(op, **given)
        if tensor.layout is not torch.strided:
            _check.dense(op, **given)
        if tensor.dtype != query.dtype or tensor.device != query.device:
            _check.same(op, **given)
        if tensor.shape[-1] == 0:
            raise ValueError(f"{op}: {name} must have a last dimension of at least 1, got shape {tuple(tensor.shape)}")
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"{op}: key must have the head dimension {query.shape[-1]} of query, got shape {tuple(key.shape)}"
        )
    heads, key_heads = query.shape[1], key.shape[1]
    if heads != key_heads and (key_heads == 0 or heads % key_heads != 0):
        raise ValueError(f"{op}: query must have a multiple of key's {key_heads} heads, got {heads}")


def check_bias(
    op: str, name: str, bias: Tensor | None, query: Tensor, sizes: tuple[int, int, int, int]
) -> Tensor | None:
    """The bias as 4-D tensor that broadcasts to (B, Hq, Tq, Tk)."""
    if bias is None:
        return None
    _check.tensor(op, name, bias, optional=True)
    if bias.dtype not in (query.dtype, torch.float32):
        wanted = "float32" if query.dtype == torch.float32 else f"float32 or query's {_check.dtype_name(query.dtype)}"
        raise ValueError(f"{op}: {name} must be {wanted}, got {_check.dtype_name(bias.dtype)}")
    _check.dense(op, **{name: bias})
    return _broadcastable(op, name, bias, query, sizes)


def check_scale(op: str, scale: float | None, query: Tensor) -> float:
    """The scale of a call, 1/sqrt(D) by default."""
    if scale is None:
        return 1.0 / math.sqrt(query.shape[-1])
    _check.number(op, "scale", scale)
    if not -math.inf < scale < math.inf:
        raise ValueError(f"{op}: scale must be a finite number, got {scale}")
    if query.dtype != torch.float64:  # a factor of scores in float32, where these would be 0 or infinite
        if -_LEAST < scale < _LEAST:
            return 0.0
        if not -_MOST < scale < _MOST:
            raise ValueError(f"{op}: scale must be below 2**127, as scores are float32, got {scale}")
    return float(scale)


def check_rest(op: str, query: Tensor, dropout_p: float, seed: Tensor | None, **flags: bool) -> None:
    """Refuses a bad dropout_p, seed or flag; draws nothing."""
    _check.probability(op, "dropout_p", dropout_p)
    if seed is not None:
        _check.seed(op, dropout_p, seed, query.device)
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{op}: {name} must be True or False, got {type(flag).__name__}")


def check_mask(op: str, mask: Mask, query: Tensor, sizes: tuple[int, int, int, int]) -> Mask:
    """Refuses a Mask whose tensors do not fit (B, Hq, Tq, Tk)."""
    lengths, keep = mask.key_lengths, mask.keep_matrix
    if lengths is not None:
        batch, _, _, keys = sizes
        _check.shape(op, "mask's key_lengths", lengths, (batch,), f"query {tuple(query.shape)}")
        check_device(op, "mask's key_lengths", lengths, query)
        _check_lengths(op, lengths, keys)
    if keep is not None:
        _broadcastable(op, "mask", keep, query, sizes)
    return mask


def _check_lengths(op: str, lengths: Tensor, keys: int) -> None:
    if not on_host(lengths):
        return
    values = lengths.tolist()  # less than what min() and max() of a tensor cost
    if values and (min(values) < 0 or max(values) > keys):
        raise ValueError(
            f"{op}: mask's key_lengths must lie in [0, {keys}], the number of keys, got values from "
            f"{min(values)} to {max(values)}"
        )


def check_device(op: str, name: str, tensor: Tensor, query: Tensor) -> None:
    """Refuses a tensor that is not where query is."""
    if tensor.device != query.device:
        raise ValueError(f"{op}: {name} must be on query's device {query.device}, got {tensor.device}")


def on_host(tensor: Tensor) -> bool:
    """Whether the values may be looked at: in host memory, and nothing is being traced or transformed."""
    return tensor.device.type == "cpu" and not _library.transformed() and has_values(tensor)


def has_values(tensor: Tensor) -> bool:
    """Whether there are values to be read, wherever they are: not in a graph, and not of a tensor that has none."""
    if torch.compiler.is_compiling() or tensor.is_meta or isinstance(tensor, (FakeTensor, FunctionalTensor)):
        return False
    return not (torch._is_functional_tensor(tensor) or torch._C._functorch.is_batchedtensor(tensor))


def mask_and_bias(
    op: str, mask: object, bias: Tensor | None, query: Tensor, sizes: tuple[int, int, int, int]
) -> tuple[Mask, Tensor | None]:
    """The mask argument as a Mask, and the bias: a bool tensor becomes a keep matrix, a floating one joins the bias."""
    if mask is None:
        return EVERYTHING, bias
    if isinstance(mask, Mask):
        return check_mask(op, mask, query, sizes), bias
    if not isinstance(mask, Tensor):
        raise TypeError(f"{op}: mask must be a Mask, a tensor or None, got {type(mask).__name__}")
    if mask.dtype == torch.bool:
        return Mask(keep_matrix=_broadcastable(op, "mask", mask, query, sizes)), bias
    if mask.dtype not in (query.dtype, torch.float32):
        raise ValueError(
            f"{op}: mask must be bool (True = may attend) or floating like query (added to the scores), "
            f"got {_check.dtype_name(mask.dtype)}"
        )
    added = _broadcastable(op, "mask", mask, query, sizes)
    return EVERYTHING, added if bias is None else bias_sum(added, bias, query.dtype)


def bias_sum(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Two biases as one, for scores of ``dtype``, in float32 at least.

    -inf hides whatever the other says, and what is finite stays finite.
    """
    total = a.to(torch.promote_types(dtype, torch.float32)) + b
    limit = torch.finfo(total.dtype).max
    overflows = a.isfinite() & b.isfinite() & total.isinf()
    # clamp's own gradient at its bounds, where masks of the least number are, is not the same in all PyTorch releases
    total = torch.where(overflows, total.detach().clamp(-limit, limit), total)
    return total.masked_fill((a == -torch.inf) | (b == -torch.inf), -torch.inf)


def _broadcastable(op: str, name: str, tensor: Tensor, query: Tensor, sizes: tuple[int, int, int, int]) -> Tensor:
    check_device(op, name, tensor, query)
    if tensor.dim() == 3:
        raise ValueError(
            f"{op}: {name} of shape {tuple(tensor.shape)} is ambiguous; write (B, 1, Tq, Tk) with .unsqueeze(1), or "
            "(1, H, Tq, Tk) with .unsqueeze(0)"
        )
    if tensor.dim() == 2:
        tensor = tensor[None, None]
    if tensor.dim() != 4 or any(given not in (1, full) for given, full in zip(tensor.shape, sizes, strict=True)):
        raise ValueError(
            f"{op}: {name} must be (Tq, Tk) or 4-D and broadcast to (B, H, Tq, Tk) = {sizes}, "
            f"got shape {tuple(tensor.shape)}"
        )
    return tensor
