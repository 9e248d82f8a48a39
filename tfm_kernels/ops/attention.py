"""Attention: softmax(scale q k^T + bias) v over the keys that a mask shows.

Per batch b, query head h, query i and key j; key head h // (Hq / Hk); f are dropout's factors, 0 or 1 / (1 - p), with
row (b Hq + h) Tq + i and column j in the rule of tfm_kernels/dropout.py.

    x_ij  = scale q_i . k_j + bias_ij                                       (A.1)  in float32 (float64 for float64)
    lse_i = log sum_j exp(x_ij)        over the keys that row i may see     (A.2)  -inf where it sees none
    p_ij  = exp(x_ij - lse_i)          0 at hidden keys                     (A.3)
    out_i = sum_j f_ij p_ij v_j                                             (A.4)

    dv_j    = sum_i f_ij p_ij dout_i   over the group's heads               (A.5)
    dp_ij   = f_ij dout_i . v_j                                             (A.6)
    dx_ij   = p_ij (dp_ij - dout_i . out_i + dlse_i)                        (A.7)
    dq_i    = scale sum_j dx_ij k_j                                         (A.8)
    dk_j    = scale sum_i dx_ij q_i    over the group's heads               (A.9)
    dbias   = dx summed over the axes that bias was broadcast along         (A.10)

Hidden are the pairs that the mask hides and those whose bias is -inf. A row that sees no key gives 0 and has gradient
0; a key that no query of its head may see counts as 0, so that what lies in padding reaches nothing.

The operators serve dense and packed calls. Dense: (B, H, T, D), lse (B, Hq, Tq). Packed ("varlen", with cu_seqlens):
(total, H, D), lse (Hq, total_q), dropout row (b Hq + h) max_seqlen_q + i with i, j counted within the segment.
window = [low, high] of the band measured from the top-left corner, then of the one from the bottom-right (mask.Band).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _check, _library, dropout
from .._autograd import differentiate
from .._backend import Choices, Op, StandIn, can, no_float64, on_gpu, register, select, support
from .._library import declare, signature
from ..aten import attention as aten
from ..mask import Band, Mask
from ..reference import attention as reference
from .attention_call import LONGEST, AttentionCall, bucket, checked_call, describe_dense, has_values, mask_parts
from .attention_watch import is_watched, tell

_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, {residuals}Tensor? bias, Tensor? keep, Tensor? key_lengths, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, int[] window, float scale, "
    "float dropout_p, Tensor? seed, bool deterministic"
)


def _fwd_fake(query, key, value, bias, keep, key_lengths, cu_seqlens_q, *rest):
    statistics = torch.float64 if query.dtype == torch.float64 else torch.float32
    if cu_seqlens_q is not None:
        total, heads, _ = query.shape
        return query.new_empty(total, heads, value.shape[2]), query.new_empty(heads, total, dtype=statistics)
    batch, heads, queries, _ = query.shape
    out = query.new_empty(batch, queries, heads, value.shape[3]).transpose(1, 2)
    return out, query.new_empty(batch, heads, queries, dtype=statistics)


def _bwd_fake(dout, dlse, query, key, value, out, lse, bias, keep, key_lengths, cu_seqlens_q, *rest):
    need_bias = rest[-1]
    dbias = torch.empty_like(bias, memory_format=torch.contiguous_format) if need_bias else query.new_empty(0)
    if cu_seqlens_q is not None:
        return *(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (query, key, value)), dbias
    swapped = lambda t: t.new_empty(t.shape[0], t.shape[2], t.shape[1], t.shape[3]).transpose(1, 2)  # noqa: E731
    return swapped(query), swapped(key), swapped(value), dbias


def _aten(call: AttentionCall) -> str | None:
    if call.return_lse:
        return "F.scaled_dot_product_attention does not return lse"
    if call.dropout_p > 0.0:
        return "F.scaled_dot_product_attention draws dropout from torch's generator, not by tfm_kernels.dropout"
    if call.cu_seqlens_q is not None and call.cu_seqlens_k is not None:
        if not (has_values(call.cu_seqlens_q) and has_values(call.cu_seqlens_k)):
            return "it loops over the segments, whose lengths a compiled graph does not know"
    if _library.differentiates_twice() and torch.backends.cuda.flash_sdp_enabled():  # which a CPU's goes by as well
        return "F.scaled_dot_product_attention is differentiable once outside of sdpa_kernel(SDPBackend.MATH)"
    return None


def _gpu(call: AttentionCall) -> str | None:
    widest = max(call.query.shape[-1], call.value.shape[-1])
    if widest > 256:
        return f"needs head dimensions of at most 256, got {widest}"
    longest = max(call.max_seqlen_q, call.max_seqlen_k)
    if longest >= 1 << 30:
        return f"needs sequences shorter than 2**30, got {longest}"
    return no_float64(call)


KERNELS = {"cpu": can, "triton": _gpu, "cuda": _gpu}
SUPPORT = support("attention", KERNELS, aten=_aten)

_forward = declare(
    "attention_fwd", f"({_ARGUMENTS.format(residuals='')}) -> (Tensor out, Tensor lse)", _fwd_fake, KERNELS
)
_backward = declare(
    "attention_bwd",
    f"(Tensor dout, Tensor? dlse, {_ARGUMENTS.format(residuals='Tensor out, Tensor lse, ')}, bool need_bias) "
    "-> (Tensor dquery, Tensor dkey, Tensor dvalue, Tensor dbias)",
    _bwd_fake,
    KERNELS,
)
_apply = differentiate(_forward, _backward, like="out")


def prefer(call: AttentionCall) -> tuple[str, ...]:
    """Backends in the order of automatic choice."""
    if call.query.device.type != "cpu":
        return _gpu_order(call)
    return ("aten", "cpu", "reference") if _has_few_queries(call) else ("cpu", "aten", "reference")


def _gpu_order(call: AttentionCall) -> tuple[str, ...]:
    """On an H200 PyTorch's best, cuDNN's, is faster where it needs no matrix of who sees whom: 0.5 to 0.9 of the time.

    Where aten has to make one, or calls it segment by segment, Triton's kernels take 0.06 to 0.7 of its time in 16
    bits, csrc/cuda's 1.5 to 4 times Triton's, but half of the host's 0.34 ms. float32 is multiplied without matrix
    units, by csrc/cuda in half the time of Triton.
    """
    if call.query.dtype == torch.float32:
        return on_gpu("aten", "cuda", compiled=True)
    masked = call.mask.key_lengths is not None or call.mask.keep_matrix is not None or call.bias is not None
    if call.cu_seqlens_q is None and not masked:
        queries, keys = call.max_seqlen_q, call.max_seqlen_k
        band = call.mask.band(queries, keys)
        if not call.mask.has_band() or band == Band(high=0) or (band.high >= keys and band.low <= -queries):
            return on_gpu("aten", "triton", compiled=True)
    sequences = call.query.shape[0] if call.cu_seqlens_q is None else call.cu_seqlens_q.shape[0] - 1
    scores = sequences * call.query.shape[1] * call.max_seqlen_q * call.max_seqlen_k
    small = _library.certain(scores * call.query.shape[-1] < 1 << 33)
    return on_gpu(*(("cuda", "triton") if small else ("triton",)), compiled=True)


# (dtype, training) -> queries from which cpu is faster than PyTorch's plain attention, which needs no keys turned for
# matrix tiles and keeps less per tile. Times over PyTorch's with as many keys as queries (two threads, 8 to 192
# sequence-heads 32 to 128 wide, Xeon with AMX): float32 0.9 to 1.2 at 24 and 32 queries, 0.7 to 0.9 at 48; in training
# 1.0 to 1.2 and 0.7 to 1.03, 0.75 to 1.03 at 64, 0.7 to 1.15 at 96. bfloat16 0.7 to 1.05 at 24 and 32 queries (1.17 of
# 2048 keys), 0.5 to 0.75 at 48, 0.4 to 1.0 at 64, 0.4 to 1.2 at 96; in training 1.2 to 3.4 up to 4 queries, 0.2 to 1.2
# at 8, 0.1 to 0.4 from 12 and, of 128 keys and more, 0.2 to 0.6. float16 is slower in PyTorch nearly everywhere.
# float64, which is there to check gradients, has no tiles: 2 at 256.
_XEON = {
    (torch.float32, False): 48, (torch.float32, True): 48,
    (torch.float64, False): LONGEST, (torch.float64, True): LONGEST,
}  # fmt: skip
_XEON_WITH_TILES = {(torch.bfloat16, False): 48, (torch.bfloat16, True): 8, **_XEON}
# (dtype, training) -> keys from which another limit holds, and that limit. float32: 16 x 1024 0.99, in training 0.96;
# 32 x 512 0.90 and 0.95; 48 x 256 0.74 and 0.84. On Zen 4 8 x 512 0.97 and 1.37, 16 x 1024 0.87 and 0.86.
_MANY_KEYS = {(torch.float32, False): (256, 16), (torch.float32, True): (256, 16)}
_MANY_KEYS_WITH_TILES = {(torch.bfloat16, True): (128, 0), **_MANY_KEYS}
# Zen 3 (1 to 256 sequence-heads 32 to 128 wide): float32 0.44 to 1.02 from 2 queries (1.12 of 4096 keys); in training
# 0.85 to 1.13 at 32, 0.6 to 0.96 at 48, and 1.0 to 1.8 below 8. bfloat16 0.2 to 1.02, in training 0.15 to 1.1. Where
# the sequence-heads have many queries together, float32 in training 0.5 to 1.08 from 12.
_ZEN3 = {**_XEON, (torch.float32, False): 0, (torch.float32, True): 32}
_ZEN3_MANY_ROWS, _ZEN3_MANY_FROM = 384, 12
# Zen 4 (8 to 128 sequence-heads 32 to 128 wide): float32 0.8 to 1.2 at 4 queries, 0.5 to 0.85 at 8; in training 1.0 to
# 1.6 and 0.55 to 1.0. bfloat16 0.45 to 1.25 at 2 and 4 queries and 0.35 to 0.9 from 8; in training 0.75 to 1.55 at 4
# and 0.25 to 0.95 from 8.
_ZEN4 = {**_XEON, (torch.float32, False): 8, (torch.float32, True): 8, (torch.bfloat16, True): 4}
_QUERIES_FROM = {_library.XEON: _XEON, _library.ZEN3: _ZEN3, _library.ZEN4: _ZEN4}
# One query needs no tiles, but for its gradients (1.2 to 1.8 in float32): cpu is faster where there is much to read.
# Elements of key: (two threads, 2.6 GHz Xeon) float32 1.0 to 1.2 below 2**16 and 0.7 to 1.1 from there, bfloat16 0.55
# to 1.0, but 1.15 to 1.3 for some of 2**21. Zen 4: float32 0.5 to 0.9, bfloat16 0.1 to 0.4 from 2**13. Zen 3: float32
# 0.6 to 1.02, bfloat16 0.2 to 0.4.
_ONE_QUERY_FROM = {_library.XEON: 1 << 16, _library.ZEN3: 0, _library.ZEN4: 0}


def _has_few_queries(call: AttentionCall) -> bool:
    """Whether a plain call is too small to gain."""
    if torch.compiler.is_compiling():  # a compiled graph must not depend on the lengths
        return False
    if call.cu_seqlens_q is not None or call.bias is not None or call.mask.hides():
        return False
    kind = call.query.dtype, _check.records_graph(call.query, call.key, call.value)
    if call.max_seqlen_q == 1 and not kind[1] and call.key.numel() >= _ONE_QUERY_FROM[_library.nearest]:
        return False
    tiles = _library.bf16_tiles and _library.nearest == _library.XEON
    if _library.nearest != _library.ZEN3:  # vectors are long
        many, queries_from = (_MANY_KEYS_WITH_TILES if tiles else _MANY_KEYS).get(kind, (LONGEST, 0))
        if call.max_seqlen_k >= many:
            return call.max_seqlen_q < queries_from
    elif kind == (torch.float32, True) and call.query.shape[:-1].numel() >= _ZEN3_MANY_ROWS:
        return call.max_seqlen_q < _ZEN3_MANY_FROM
    return call.max_seqlen_q < (_XEON_WITH_TILES if tiles else _QUERIES_FROM[_library.nearest]).get(kind, 0)


def run(call: AttentionCall, backend: str) -> tuple[Tensor, Any]:
    """(out, lse) of a checked call on one backend; aten has no lse."""
    out, lse = _run(call, backend)
    tell(call, lse)
    return out, lse


def _run(call: AttentionCall, backend: str) -> tuple[Tensor, Any]:
    seed, mask = call.seed, call.mask
    cu_seqlens: tuple[Any, Any] = (call.cu_seqlens_q, call.cu_seqlens_k)
    if call.dropout_p == 0.0:
        seed = None
    elif seed is None:
        seed = dropout.draw_seed(call.query.device, call.dropout_p)
    tensors, longest = (call.query, call.key, call.value), (call.max_seqlen_q, call.max_seqlen_k)
    if backend in KERNELS:
        window = [mask.top_left.low, mask.top_left.high, mask.bottom_right.low, mask.bottom_right.high]
        indices = call.bias, mask.keep_matrix, mask.key_lengths, *cu_seqlens
        return _apply(
            backend, *tensors, *indices, *longest, window, call.scale, call.dropout_p, seed, call.deterministic
        )
    random: tuple[Any, Any, Any] = (call.scale, call.dropout_p, seed)
    if call.cu_seqlens_q is None:
        if backend == "aten":
            return aten.attention(*tensors, mask, call.bias, call.scale), None
        return reference.attention(*tensors, mask, call.bias, *random)
    if backend == "aten":
        return aten.attention_varlen(*tensors, mask, *cu_seqlens, call.scale), None
    return reference.attention_varlen(*tensors, mask, *cu_seqlens, *longest, *random)


def describe(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | Tensor | None = None,
    *,
    bias: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = True,
) -> AttentionCall:
    """Checks the arguments of ``attention``."""
    return describe_dense("attention", query, key, value, mask, bias, scale, dropout_p, seed, return_lse, deterministic)


def stand_in(call: AttentionCall) -> StandIn:
    """The call on random queries, keys and values that lie as its own do, with its own mask and a copy of its bias."""
    query, key, value = (torch.empty_like(t).normal_() for t in (call.query, call.key, call.value))
    bias = None if call.bias is None else call.bias.detach().clone()
    leaves: list[Tensor] = []
    if _check.records_graph(call.query, call.key, call.value, call.bias):
        leaves = [query, key, value]
        if bias is not None and call.bias is not None and call.bias.requires_grad:
            leaves.append(bias)
    for leaf in leaves:
        leaf.requires_grad_()
    like = call._replace(query=query, key=key, value=value, bias=bias)

    def outputs(backend: str) -> tuple[Tensor, ...]:
        out, lse = run(like, backend)
        return (out, lse) if call.return_lse else (out,)

    return StandIn(outputs, leaves)


_OP = register(Op("attention", SUPPORT, prefer, describe, bucket, stand_in))
_CHOICES = Choices()


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | Tensor | None = None,
    *,
    bias: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = True,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend: every query takes the average of the values, weighted by how well it matches their keys.

    out = dropout(softmax(scale * query key^T + bias, over the keys that mask shows)) value      (A.1 to A.4)

    Args:
        query: (B, Hq, Tq, D), float16 | bfloat16 | float32 | float64. Any strides: a transposed view of (B, T, H, D)
            costs no copy.
        key: (B, Hk, Tk, D) of the same dtype and device; Hk divides Hq, and key head h // (Hq / Hk) serves head h.
        value: (B, Hk, Tk, Dv).
        mask: a ``Mask``; or a tensor as F.scaled_dot_product_attention takes it: bool (True = may attend), or floating
            (added like ``bias``). (Tq, Tk) or 4-D, broadcast to (B, Hq, Tq, Tk). None shows everything.
        bias: added to the scores, in float32; of query's dtype or float32, (Tq, Tk) or 4-D, broadcast to
            (B, Hq, Tq, Tk). -inf hides. Its gradient is summed over the axes it was broadcast along.
        scale: factor of the scores, by default 1 / sqrt(D).
        dropout_p: probability to drop a weight, in [0, 1].
        seed: () int64 on query's device; None draws one from torch's generator where dropout_p > 0.
        return_lse: also return lse.
        deterministic: the backward repeats bit by bit; False allows atomic sums where they are faster.
        backend: "reference" | "aten" | "cpu" | "triton" | "cuda", or None to choose automatically.

    Returns:
        (B, Hq, Tq, Dv), dtype and device of ``query``; a transposed view of contiguous (B, Tq, Hq, Dv), on aten as
        PyTorch's kernel lays it. With ``return_lse`` also lse (B, Hq, Tq), float32 (float64 for float64),
        differentiable.

    Raises:
        TypeError, ValueError: an argument is wrong (the message names it, what was expected and what it is).
        BackendError: ``backend`` was named and cannot run this call (the message says why).

    Numerics: scores, softmax and sums in float32 (float64 for float64); one rounding, at the store. A row that sees no
        key gives 0, lse -inf and gradients 0. NaN in a key that no query may see reaches nothing; where it is seen, and
        in a query, it gives NaN, but from PyTorch's CPU kernel, which is aten's, a query of NaN gives 0 where there are
        fewer keys than a vector register holds (16 in float32 with AVX-512); its gradients of a row whose keys all have
        one large bias, as -1e9, are too large by the number of keys. NaN in a value that some queries see may
        reach those that do not: all on reference and aten, those in the same tile on the others. Deterministic.
        Differentiable once in query, key, value, bias; twice on reference, and on aten within
        torch.nn.attention.sdpa_kernel(SDPBackend.MATH); in forward mode, also over reverse mode, on both.
    Cost: 4 B Hq Tq Tk D operations forward and 10 backward, hidden tiles left out; extra memory O(T).
    Source: Vaswani et al. 2017, arXiv:1706.03762, eq. 1; Dao 2023, arXiv:2307.08691, algorithms 1 and 2.

    Example:
        >>> q = k = v = torch.randn(2, 4, 10, 16)
        >>> attention(q, k, v, tfk.Mask.causal()).shape
        torch.Size([2, 4, 10, 16])
    """
    options = scale, dropout_p, return_lse, deterministic
    known = None
    if seed is None:
        known = signature(backend, query, key, value, mask_parts(mask), bias, *options)
    name = _CHOICES.get(known)
    if name is None:
        call = describe_dense("attention", query, key, value, mask, bias, scale, dropout_p, seed, *options[2:])
        name = _CHOICES.keep(known, select(_OP, call, backend))
    elif name == "aten" and mask is None and bias is None and not is_watched():  # no form to bring it to; 2 us less
        return aten.plain_attention(query, key, value, scale)
    else:
        call = checked_call("attention", query, key, value, mask, bias, *options)
    out, lse = run(call, name)
    return (out, lse) if return_lse else out
