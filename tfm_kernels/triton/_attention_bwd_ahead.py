"""dq, dk and dv of attention by Gluon's kernels for GPUs of compute capability 9: their launches.

Owns:    the launches of _attention_bwd_ahead_keys.py and _attention_bwd_ahead_queries.py.
Dropout: the random rule is half of what both compute. So the queries' kernel writes what it has drawn, a bit a pair,
         for the keys', unless that were more than what the backward gives back: then both draw.
Config:  pick_config() below; not measured yet.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _launch
from ._attention_bwd_ahead_keys import attention_bwd_ahead_keys_kernel
from ._attention_bwd_ahead_queries import attention_bwd_ahead_queries_kernel
from ._attention_call import Call, Config, rows_aligned


def pick_config(
    kernel: str, dim: int, length: int, draws: bool, dtype: torch.dtype, capability: tuple[int, int]
) -> Config | None:
    """The launch of "keys" or "queries" for heads of ``dim`` (the larger of D and Dv); None where there is none.

    ``length`` is how many keys (queries) there are; one or two warp groups keep 64 of each. As many rows pass at once
    as leave dk and dv (dq) in registers, of which dropout takes more where a kernel ``draws`` itself, and one group,
    whose threads copy twice as much, has less for them than two.
    """
    if capability[0] != 9 or dtype == torch.float32 or not 32 < dim <= 128:
        return None
    narrow, short = dim <= 64, length <= 64
    block_d, stays = 64 if narrow else 128, 64 if short else 128
    if kernel == "keys":
        passes = 64 if narrow and not draws and not short else 16 if short and not narrow else 32
        return Config(passes, stays, block_d, 0, stays // 16, num_stages=4)
    return Config(stays, 32 if short else 64, block_d, 0, stays // 16, num_stages=4)


def held(kernel: str, config: Config) -> bool:
    """Whether a warp group keeps its keys and values (queries and dout) in registers and not in shared memory."""
    return config.block_d == 64 and (kernel == "queries" or config.block_m == 32)


def bits_of(call: Call, results: int) -> tuple[Tensor | None, dict[str, int]]:
    """(bits, strides) for what dropout draws (_attention_ahead_dropout.store_bits); None if larger than ``results``, in
    bytes, or without dropout.
    """
    stride = _launch.cdiv(call.queries, 128) * 8
    strides = {"bits_stride": stride, "bits_stride_h": _launch.cdiv(call.keys, 128) * 2 * stride * 32}
    words = call.batch * call.heads * strides["bits_stride_h"]
    if call.seed is None or words * 4 > results:
        return None, strides
    return torch.empty(words, dtype=torch.int32, device=call.query.device), strides


def pass_back(
    call: Call, capability: tuple[int, int], shared: dict[str, Any], dq: Tensor, dk: Tensor, dv: Tensor
) -> bool:
    """Whether the call is one of these kernels', which then write dq, dk and dv; ``shared`` as in attention_bwd.py."""
    if call.bias is not None or call.keep is not None:
        return False
    width, dtype = max(call.dim, call.value_dim), call.query.dtype
    queries = pick_config("queries", width, call.queries, call.seed is not None, dtype, capability)
    if queries is None:
        return False
    bits, strides = bits_of(call, sum(t.numel() * t.element_size() for t in (dq, dk, dv)))
    draws = call.seed is not None and bits is None
    keys = pick_config("keys", width, call.keys, draws, dtype, capability)
    if keys is None:
        return False
    factor = call.keep_scale or 1.0  # 0 where all is dropped, which is not to be divided by
    shared = {**shared, **strides, "bits_ptr": bits, "keep_scale": factor, "unscale": 1.0 / factor}
    call.launch(
        attention_bwd_ahead_queries_kernel, _launch.cdiv(call.queries, queries.block_m) * call.heads * call.batch,
        queries, **shared, dq_ptr=dq, **call.strides("dq", dq), DQ_D=call.dim, OUT_ALIGNED=rows_aligned(dq),
        WARPS=queries.num_warps, HELD=held("queries", queries),
    )  # fmt: skip
    call.launch(
        attention_bwd_ahead_keys_kernel, _launch.cdiv(call.keys, keys.block_n) * call.kv_heads * call.batch, keys,
        **{**shared, "seed_ptr": call.seed if draws else None}, dk_ptr=dk, dv_ptr=dv, **call.strides("dk", dk),
        **call.strides("dv", dv), DK_D=call.dim, DV_D=call.value_dim, OUT_ALIGNED=rows_aligned(dk, dv),
        scale=abs(call.scale), WARPS=keys.num_warps, HELD=held("keys", keys),
    )  # fmt: skip
    return True
