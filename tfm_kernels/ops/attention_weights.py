"""The attention maps themselves, for the rows and heads one wants to look at, recomputed from lse."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import _check, dropout
from .._autocast import beyond_autocast
from ..mask import Mask
from .attention_call import check_bias, check_heads, check_rest, check_scale, mask_and_bias, on_host

_NAME = "attention_weights"
_product = beyond_autocast(torch.matmul)


def attention_weights(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    mask: Mask | Tensor | None = None,
    *,
    bias: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    rows: Tensor | Sequence[int] | int | None = None,
    heads: Tensor | Sequence[int] | int | None = None,
    average: bool = False,
) -> Tensor:
    """The weights that an ``attention`` call gave to its values, exact and for the asked rows and heads only.

    weights_ij = f_ij exp(scale query_i . key_j + bias_ij - lse_i)      (A.3, f of A.4)

    Args:
        query: (B, Hq, Tq, D), as the call had it.
        key: (B, Hk, Tk, D), as the call had it.
        lse: (B, Hq, Tq), what the call returned with ``return_lse``.
        mask: the call's.
        bias: the call's.
        scale: the call's.
        dropout_p: the call's, where the maps shall show what dropout left, as torch's module returns them in training.
        seed: the call's; must be given where dropout_p > 0.
        rows: the queries to show, an int in [0, Tq) or several; None shows all.
        heads: the heads to show, an int in [0, Hq) or several; None shows all.
        average: the mean over the shown heads instead of each.

    Returns:
        (B, heads, rows, Tk), with ``average`` (B, rows, Tk); dtype and device of ``query``. A row that sees no key
        is 0.

    Raises:
        TypeError, ValueError: an argument is wrong (the message names it, what was expected and what it is).

    Numerics: in float32 (float64 for float64), each row brought to the sum 1 that it has in exact arithmetic.
        Composed of torch's functions and differentiable as often as one likes; lse counts as a constant there, which
        is exact, because a row's weights do not change with it.
    Cost: 2 B heads rows Tk D operations, memory O(B heads rows Tk).

    Example:
        >>> q = k = v = torch.randn(2, 4, 10, 16)
        >>> out, lse = tfk.ops.attention(q, k, v, return_lse=True)
        >>> attention_weights(q, k, lse, rows=[9], average=True).shape
        torch.Size([2, 1, 10])
    """
    check_heads(_NAME, {"query": query, "key": key}, "(B, H, T, D)", 4)
    batch, all_heads, queries, _ = query.shape
    keys = key.shape[2]
    if key.shape[0] != batch:
        raise ValueError(f"{_NAME}: key must have the batch size {batch} of query, got shape {tuple(key.shape)}")
    _check.tensor(_NAME, "lse", lse)
    _check.shape(_NAME, "lse", lse, query.shape[:3], f"query {tuple(query.shape)}")
    _check.same_device(_NAME, query=query, lse=lse)
    statistics = torch.float64 if query.dtype == torch.float64 else torch.float32
    if lse.dtype != statistics:
        raise ValueError(
            f"{_NAME}: lse must be {_check.dtype_name(statistics)}, as attention returns it, "
            f"got {_check.dtype_name(lse)}"
        )
    sizes = (batch, all_heads, queries, keys)
    bias = check_bias(_NAME, "bias", bias, query, sizes)
    mask, bias = mask_and_bias(_NAME, mask, bias, query, sizes)
    scale = check_scale(_NAME, scale, query)
    check_rest(_NAME, query, dropout_p, seed, average=average)
    if dropout_p > 0.0 and seed is None:
        raise ValueError(f"{_NAME}: seed must be given where dropout_p > 0, the one of the call whose maps these are")
    i = _positions("rows", rows, queries, query.device)
    h = _positions("heads", heads, all_heads, query.device)

    def shown(t: Tensor) -> Tensor:  # the asked heads and rows of what broadcasts to (B, Hq, Tq, ...)
        t = t if h is None or t.shape[1] < all_heads else t.index_select(1, h)
        return t if i is None or t.shape[2] < queries else t.index_select(2, i)

    visible = mask.dense(*sizes, query.device)
    if bias is not None:
        visible = visible & (bias != -torch.inf)
    seen = visible.any(-2).unsqueeze(-1)
    visible = shown(visible)
    sees = visible.any(-1, keepdim=True)

    group = all_heads // key.shape[1] if key.shape[1] else 1
    k = key.to(statistics).repeat_interleave(group, dim=1).masked_fill(~seen, 0.0)
    k = k if h is None else k.index_select(1, h)
    x = _product(shown(query).to(statistics).masked_fill(~sees, 0.0), k.transpose(-1, -2)) * scale  # A.1
    if bias is not None:
        x = x + shown(bias.masked_fill(bias == -torch.inf, 0.0)).to(statistics)
    shift = shown(lse.detach().unsqueeze(-1)).masked_fill(~sees, 0.0)
    weights = (x.masked_fill(~visible, -torch.inf) - shift).exp()  # A.3
    weights = weights / weights.sum(-1, keepdim=True).masked_fill(~sees, 1.0)
    if dropout_p > 0.0 and seed is not None:
        counted = shown(dropout.attention_rows(batch, all_heads, queries, query.device))
        kept = dropout.keep_mask(seed, dropout_p, counted, keys)
        weights = weights * kept * dropout.keep_scale(dropout_p)
    if average:
        weights = weights.mean(1)
    return weights.to(query.dtype)


def _positions(name: str, given: Tensor | Sequence[int] | int | None, size: int, device: torch.device) -> Tensor | None:
    if given is None:
        return None
    if isinstance(given, int) and not isinstance(given, bool):
        given = [given]
    if isinstance(given, (str, bytes)) or not isinstance(given, (Tensor, Sequence)):
        raise TypeError(
            f"{_NAME}: {name} must be an int, a tensor or a sequence of ints or None, got {type(given).__name__}"
        )
    if not isinstance(given, Tensor):
        if any(isinstance(value, bool) or not isinstance(value, int) for value in given):
            raise TypeError(f"{_NAME}: {name} must hold ints, got {list(given)}")
        given = torch.tensor(list(given), dtype=torch.int64)
    if given.dtype not in (torch.int32, torch.int64) or given.dim() != 1:
        raise ValueError(
            f"{_NAME}: {name} must be a list of ints, got {_check.dtype_name(given)} of shape {tuple(given.shape)}"
        )
    if on_host(given) and given.numel() and (given.min() < 0 or given.max() >= size):
        raise ValueError(
            f"{_NAME}: {name} must lie in [0, {size}), got values from {int(given.min())} to {int(given.max())}"
        )
    return given.to(device)
