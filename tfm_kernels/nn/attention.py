"""MultiheadAttention, drop-in for torch.nn's, on ops.attention. Here, and only here, torch's masks become ours.

It subclasses torch.nn.MultiheadAttention: the parameters, their initialisation, ``__setstate__`` for old pickles and
isinstance checks in other people's code stay torch's. Nothing of torch's inference fast path is left, because
``forward`` is new, and it is the same in training and evaluation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import _check, ops
from .._autocast import autocast_dtype
from ..mask import Mask
from ..ops.attention_call import bias_sum
from ..ops.attention_step import attention_step
from . import _arguments
from ._bypass import cannot_be_kept, ordinary, plain
from ._projection import project, through
from .attention_weights import with_weights
from .cache import AttentionCache, Step
from .packed import Packed

_NAME = "MultiheadAttention"


class MultiheadAttention(nn.MultiheadAttention):
    """out = concat over heads h of attention(query W_q^h, key W_k^h, value W_v^h), times W_o.

    Drop-in for ``torch.nn.MultiheadAttention``: same arguments, same state_dict, same masks (True = ignore, floating =
    added). Differences: a query that may see no key gives the output bias, never NaN; ``attn_mask`` may also be a
    ``Mask``, whose True means attend; ``is_causal`` needs no ``attn_mask``, is trusted in every path where it has one,
    and never hides the keys of ``add_bias_kv`` and ``add_zero_attn``; ``out_proj`` is called, so that hooks on it, as
    of pruning and the older ``weight_norm`` and ``spectral_norm``, do what they do on any Linear; with ``batch_first``
    query, key and value are not copied, so that they must not be written into before the backward (``x = x + y``, not
    ``x += y``); bad arguments raise ValueError; nested tensors are refused.

    Args:
        embed_dim: E, width of query and output, a multiple of num_heads.
        num_heads: H.
        dropout: probability to drop an attention weight in training.
        bias: False leaves the biases of all projections out.
        add_bias_kv: learn one more key and value, which every query sees.
        add_zero_attn: one more key and value of zeros, which every query sees.
        kdim: width of key, None for E.
        vdim: width of value, None for E.
        batch_first: (B, T, E) instead of (T, B, E).
        device: of the parameters.
        dtype: of the parameters.
        backend: "reference" | "aten" | "cpu" | "triton" | "cuda", or None to choose automatically.

    Shape:
        query (Tq, B, E), key (Tk, B, kdim), value (Tk, B, vdim) -> (Tq, B, E) and the weights (B, Tq, Tk), or
        (B, H, Tq, Tk) for each head. With batch_first B comes first. Unbatched: without B.

    Example:
        >>> x = torch.randn(2, 5, 8)
        >>> out, weights = MultiheadAttention(8, 2, batch_first=True)(x, x, x)
        >>> out.shape, weights.shape
        (torch.Size([2, 5, 8]), torch.Size([2, 5, 5]))
    """

    backend: str | None = None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        backend: str | None = None,
    ) -> None:
        _arguments.heads(_NAME, "embed_dim", embed_dim, "num_heads", num_heads)
        for name, width in (("kdim", kdim), ("vdim", vdim)):
            if width is not None:
                _arguments.size(_NAME, name, width)
        _check.probability(_NAME, "dropout", dropout)
        _arguments.backend(_NAME, backend)
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        self.backend = backend

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | Mask | AttentionCache | Packed | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attends from ``query`` to ``key`` and ``value``.

        Args:
            query: (Tq, B, E), with batch_first (B, Tq, E), unbatched (Tq, E).
            key: as ``query`` with Tk and kdim.
            value: as ``query`` with Tk and vdim.
            key_padding_mask: (B, Tk), unbatched (Tk,): bool, True = ignore, or floating, added to the scores.
            need_weights: also return the weights; the output still comes from the fused attention.
            attn_mask: (Tq, Tk) or (B * H, Tq, Tk): bool, True = ignore, or floating; or a ``Mask``; or, in decoding, an
                ``AttentionCache``, which then says everything about the keys, and no weights are returned; or a
                ``Packed``, by which tokens (1, total, E) attend to those of a sequence each, and likewise.
            average_attn_weights: the mean over the heads instead of each head's weights.
            is_causal: query i sees keys j <= i; ``attn_mask``, which should say the same, is not looked at.

        Returns:
            The output in the layout of ``query``, and the weights (with dropout's effect in training) or None.
        """
        if isinstance(attn_mask, AttentionCache):
            return self._decode(query, key, attn_mask), None
        if isinstance(attn_mask, Packed):
            return self._packed(query, key, attn_mask), None
        self._check(query, key, value)
        batched = query.dim() == 3
        seq_axis = 1 if self.batch_first or not batched else 0
        if cannot_be_kept(query, key, value):  # torch trains on what inference mode made, by a copy
            copies = {id(each): each for each in (query, key, value)}
            copies = {name: each.clone() for name, each in copies.items()}
            query, key, value = (copies[id(each)] for each in (query, key, value))
        q, k, v = self._project(query, key, value)
        if not batched:
            q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
            if isinstance(key_padding_mask, Tensor):
                _check.shape(_NAME, "key_padding_mask", key_padding_mask, (k.shape[1],), "(Tk,) of key")
                key_padding_mask = key_padding_mask.unsqueeze(0)
        k, v, extra = self._extra_keys(k, v, seq_axis)
        q, k, v = (self._heads(t, seq_axis) for t in (q, k, v))
        sizes = q.shape[0], self.num_heads, q.shape[2], k.shape[2] - extra
        mask, bias = masks(_NAME, attn_mask, key_padding_mask, is_causal, sizes, q, extra)
        p = self.dropout if self.training else 0.0
        if need_weights:
            told: Any = {"bias": bias, "dropout_p": p, "average": average_attn_weights, "backend": self.backend}
            out, weights = with_weights(q, k, v, mask, **told)
            if autocast_dtype(q.device) is not None and q.device.type != "cpu":
                weights = weights.float()  # as the softmax of torch's autocast
        else:
            attended = ops.attention(q, k, v, mask, bias=bias, dropout_p=p, backend=self.backend)
            assert isinstance(attended, Tensor)
            out, weights = attended, None
        out = out.transpose(1, 2) if seq_axis == 1 else out.permute(2, 0, 1, 3)
        out = self._output(out.flatten(-2))
        if batched:
            return out, weights
        return out.squeeze(0), None if weights is None else weights.squeeze(0)

    def _packed(self, query: Tensor, memory: Tensor, packed: Packed) -> Tensor:
        """The sequences in ``query`` (1, total, E) attend to those in ``memory`` (1, total_k, E), one to one."""
        q, k, v = (self._heads(t, 1) for t in self._project(query, memory, memory))
        out = packed.attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, backend=self.backend)
        return self._output(out.transpose(1, 2).flatten(-2))

    def _decode(self, query: Tensor, memory: Tensor, cache: AttentionCache) -> Tensor:
        """``query`` (B, T, E) attends to the keys and values that ``cache`` keeps."""
        if not self.batch_first or self.bias_k is not None or self.add_zero_attn:
            raise ValueError(f"{_NAME}: a cache needs batch_first, and neither add_bias_kv nor add_zero_attn")
        cache.begin()
        if self._reads_parameters(query):
            y = self._step(query, cache.step(self))
            if y is not None:
                return y
        q, k, v, mask = cache.attended(self, query, memory)
        out: Any = ops.attention(q, k, v, mask, backend=self.backend)
        return through(self.out_proj, out.transpose(1, 2).reshape(query.shape))

    def _step(self, query: Tensor, step: Step | None) -> Tensor | None:
        """The whole of a decoding step in one call, where it is one and a kernel runs it."""
        if step is None:
            return None
        weights = self.in_proj_weight, self.in_proj_bias, self.out_proj.weight, self.out_proj.bias
        return attention_step(query, *weights, step.keys, step.values, step.length, step.grows, step.keep)

    def _reads_parameters(self, query: Tensor) -> bool:
        """Whether a step may run past ops.linear and ops.attention, because nobody could tell."""
        return (
            self.backend in (None, "cpu")
            and self._qkv_same_embed_dim
            and plain(self.out_proj, nn.modules.linear.NonDynamicallyQuantizableLinear)
            and autocast_dtype(query.device) is None
            and ordinary(query, self.in_proj_weight, self.in_proj_bias, self.out_proj.weight, self.out_proj.bias)
        )

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        if query is key and key is value and isinstance(query, Tensor) and self._qkv_same_embed_dim:
            if not query.is_nested and query.dim() in (2, 3) and query.shape[-1] == self.embed_dim:
                return  # the common call, told from the rest in a sixth of the time
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if isinstance(tensor, Tensor) and tensor.is_nested:
                raise ValueError(
                    f"{_NAME}: query, key and value must be padded tensors with a key_padding_mask, got a nested one"
                )
            _check.tensor(_NAME, name, tensor)
        _arguments.features(_NAME, "query", query, self.embed_dim, "embed_dim")
        _arguments.features(_NAME, "key", key, self.kdim, "kdim")
        _arguments.features(_NAME, "value", value, self.vdim, "vdim")
        if query.dim() not in (2, 3) or key.dim() != query.dim() or value.dim() != query.dim():
            raise ValueError(
                f"{_NAME}: query, key and value must all be batched, 3-D, or all unbatched, 2-D, got shapes "
                f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
            )
        if key.shape[:-1] != value.shape[:-1]:
            raise ValueError(
                f"{_NAME}: value must have shape {(*key.shape[:-1], self.vdim)} to match key {tuple(key.shape)}, got "
                f"{tuple(value.shape)}"
            )
        axis = 0 if self.batch_first else 1
        if query.dim() == 3 and query.shape[axis] != key.shape[axis]:
            raise ValueError(
                f"{_NAME}: key must have the batch size {query.shape[axis]} of query {tuple(query.shape)}, got shape "
                f"{tuple(key.shape)}"
            )

    def _project(
        self, query: Tensor, key: Tensor, value: Tensor, linear: Callable[..., Tensor] = F.linear
    ) -> tuple[Tensor, ...]:
        """q, k and v, all heads side by side, by as few matrix products as the inputs allow."""
        width, bias = self.embed_dim, self.in_proj_bias
        if not self._qkv_same_embed_dim:
            weights: tuple[Any, ...] = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
            biases = (None, None, None) if bias is None else bias.chunk(3)
            return tuple(map(linear, (query, key, value), weights, biases))
        weight = self.in_proj_weight
        if query is key and key is value:
            return linear(query, weight, bias).unflatten(-1, (3, width)).unbind(-2)
        if key is value:
            w_q, w_kv = weight.split([width, 2 * width])
            b_q, b_kv = (None, None) if bias is None else bias.split([width, 2 * width])
            return linear(query, w_q, b_q), *linear(key, w_kv, b_kv).unflatten(-1, (2, width)).unbind(-2)
        biases = (None, None, None) if bias is None else bias.chunk(3)
        return tuple(map(linear, (query, key, value), weight.chunk(3), biases))

    def _output(self, x: Tensor) -> Tensor:
        """What the heads give, side by side, through the output projection."""
        return self.out_proj(x)

    def _project_self(self, x: Tensor) -> tuple[Tensor, ...]:
        """q, k and v of ``x`` (B, T, E), each (B, H, T, D): for a decoding step, in as few calls as can be."""
        if not self._qkv_same_embed_dim:
            return tuple(self._heads(t, 1) for t in self._project(x, x, x, project))
        qkv = project(x, self.in_proj_weight, self.in_proj_bias)
        return qkv.view(*x.shape[:2], 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)

    def _project_query(self, query: Tensor) -> Tensor:
        """q alone, all heads side by side."""
        bias = None if self.in_proj_bias is None else self.in_proj_bias[: self.embed_dim]
        weight = self.in_proj_weight[: self.embed_dim] if self._qkv_same_embed_dim else self.q_proj_weight
        return project(query, weight, bias)

    def _extra_keys(self, k: Tensor, v: Tensor, seq_axis: int) -> tuple[Tensor, Tensor, int]:
        """k and v with what add_bias_kv and add_zero_attn append, and how many positions that is."""
        shape = [k.shape[0], k.shape[1], self.embed_dim]
        shape[seq_axis] = 1
        more_k, more_v = [], []
        if self.bias_k is not None and self.bias_v is not None:
            more_k.append(self.bias_k.to(k.dtype).expand(shape))
            more_v.append(self.bias_v.to(v.dtype).expand(shape))
        if self.add_zero_attn:
            more_k.append(k.new_zeros(shape))
            more_v.append(v.new_zeros(shape))
        if not more_k:
            return k, v, 0
        return torch.cat([k, *more_k], seq_axis), torch.cat([v, *more_v], seq_axis), len(more_k)

    def _heads(self, t: Tensor, seq_axis: int) -> Tensor:
        """(B, T, E) or (T, B, E) as (B, H, T, D), a view."""
        t = t.unflatten(-1, (self.num_heads, self.head_dim))
        return t.transpose(1, 2) if seq_axis == 1 else t.permute(1, 2, 0, 3)


def masks(
    op: str,
    attn_mask: Tensor | Mask | None,
    key_padding_mask: Tensor | None,
    is_causal: bool,
    sizes: tuple[int, int, int, int],
    query: Tensor,
    extra: int = 0,
) -> tuple[Mask | None, Tensor | None]:
    """torch's masks (True = ignore, floating = added) as a Mask (True = attend) and a bias.

    Args:
        op: who asks, for the errors.
        attn_mask: (Tq, Tk), (B * H, Tq, Tk), or already a Mask.
        key_padding_mask: (B, Tk).
        is_causal: hide the future; ``attn_mask`` is then not looked at.
        sizes: (B, H, Tq, Tk) without the extra keys.
        query: for its dtype and device.
        extra: keys behind the others that every query sees.

    Returns:
        (mask or None, bias or None) over Tk + extra keys.
    """
    batch, heads, queries, keys = sizes
    mask, bias = Mask(), None
    if isinstance(attn_mask, Mask):
        mask, attn_mask = attn_mask, None
    elif attn_mask is not None:
        _mask_tensor(op, "attn_mask", attn_mask, query)
        shape = (queries, keys) if attn_mask.dim() == 2 else (batch * heads, queries, keys)
        if attn_mask.shape != shape:
            raise ValueError(
                f"{op}: attn_mask must have shape {(queries, keys)} or {(batch * heads, queries, keys)}, (Tq, Tk) or "
                f"(B * H, Tq, Tk), got {tuple(attn_mask.shape)}"
            )
        attn_mask = attn_mask[None, None] if attn_mask.dim() == 2 else attn_mask.unflatten(0, sizes[:2])
    if is_causal and (attn_mask is None or extra == 0):
        mask, attn_mask = mask & Mask.causal(), None
    if key_padding_mask is not None:
        _mask_tensor(op, "key_padding_mask", key_padding_mask, query)
        _check.shape(op, "key_padding_mask", key_padding_mask, (batch, keys), "(B, Tk) of query and key")
        key_padding_mask = key_padding_mask.view(batch, 1, 1, keys)
    for given in (attn_mask, key_padding_mask):
        if given is None:
            continue
        if given.dtype == torch.bool:
            mask = mask & Mask.hide(given)
        else:
            given = given if given.dtype == query.dtype else given.float()
            bias = given if bias is None else bias_sum(bias, given, query.dtype)
    if extra:
        mask, bias = _padded(mask, sizes, query, extra), None if bias is None else F.pad(bias, (0, extra))
    return (mask if mask.hides() else None), bias


def _mask_tensor(op: str, name: str, value: object, query: Tensor) -> None:
    _check.tensor(op, name, value)
    assert isinstance(value, Tensor)
    if value.dtype != torch.bool and not value.is_floating_point():
        raise ValueError(
            f"{op}: {name} must be bool (True = ignore) or floating (added to the scores), got "
            f"{_check.dtype_name(value)}"
        )
    if value.device != query.device:
        raise ValueError(f"{op}: {name} must be on query's device {query.device}, got {value.device}")


def _padded(mask: Mask, sizes: tuple[int, int, int, int], query: Tensor, extra: int) -> Mask:
    """The mask with ``extra`` keys behind the others that every query sees."""
    batch, heads, queries, keys = sizes
    if not mask.hides():
        return mask
    distinct = heads if mask.keep_matrix is not None and mask.keep_matrix.shape[1] > 1 else 1
    whole = mask.dense(batch, distinct, queries, keys, query.device)
    return Mask.keep(F.pad(whole, (0, extra), value=True))


def causal_hint(mask: Tensor | Mask | None, is_causal: bool | None) -> bool:
    """Whether a stack may tell its layers that ``mask`` is the causal one: what the caller says, else a look at it.

    As in torch the look happens once in a stack and only where the caller said nothing. Under compilation and tracing,
    while a CUDA graph is captured, and for masks that learn, nothing is looked at and the mask itself is used.
    """
    if is_causal is not None:
        return bool(is_causal)
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[0] != mask.shape[1] or mask.requires_grad:
        return False
    if torch.compiler.is_compiling() or type(mask) is not Tensor or mask.is_meta:
        return False
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    future = torch.ones(mask.shape, dtype=torch.bool, device=mask.device).triu(1)
    if mask.dtype == torch.bool:
        return torch.equal(mask, future)
    return mask.is_floating_point() and torch.equal(mask, torch.zeros_like(mask).masked_fill(future, -torch.inf))
