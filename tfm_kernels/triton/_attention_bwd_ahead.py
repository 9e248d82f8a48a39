"""dq, dk and dv of attention by Gluon's kernels for GPUs of compute capability 9: their launches.

Owns:    the launches of _attention_bwd_ahead_keys.py and _attention_bwd_ahead_queries.py.
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
    kernel: str, dim: int, length: int, dropped: bool, dtype: torch.dtype, capability: tuple[int, int]
) -> Config | None:
    """The launch of "keys" or "queries" for heads of ``dim`` (the larger of D and Dv); None where there is none.

    ``length`` is how many keys (queries) there are; one or two warp groups keep 64 of each. As many rows pass at once
    as leave dk and dv (dq) in registers: one group copies twice as many for each of its threads as two.
    """
    if capability[0] != 9 or dtype == torch.float32 or not 32 < dim <= 128:
        return None
    narrow, short = dim <= 64, length <= 64
    block_d, stays = 64 if narrow else 128, 64 if short else 128
    if kernel == "keys":
        passes = 64 if narrow and not dropped and not short else 16 if short and not narrow else 32
        return Config(passes, stays, block_d, 0, stays // 16, num_stages=4)
    return Config(stays, 32 if short and not narrow else 64, block_d, 0, stays // 16, num_stages=4)


def held(kernel: str, config: Config) -> bool:
    """Whether a warp group keeps its keys and values (queries and dout) in registers and not in shared memory."""
    return config.block_d == 64 and (kernel == "queries" or config.block_m == 32)


def pass_back(
    call: Call, capability: tuple[int, int], shared: dict[str, Any], dq: Tensor, dk: Tensor, dv: Tensor
) -> bool:
    """Whether the call is one of these kernels', which then write dq, dk and dv; ``shared`` as in attention_bwd.py."""
    if call.bias is not None or call.keep is not None:
        return False
    width, dropped, dtype = max(call.dim, call.value_dim), call.seed is not None, call.query.dtype
    keys = pick_config("keys", width, call.keys, dropped, dtype, capability)
    queries = pick_config("queries", width, call.queries, dropped, dtype, capability)
    if keys is None or queries is None:
        return False
    shared = {**shared, "keep_scale": call.keep_scale or 1.0}  # which these divide by; where all is dropped it is 0
    call.launch(
        attention_bwd_ahead_keys_kernel, _launch.cdiv(call.keys, keys.block_n) * call.kv_heads * call.batch, keys,
        **shared, dk_ptr=dk, dv_ptr=dv, **call.strides("dk", dk), **call.strides("dv", dv), DK_D=call.dim,
        DV_D=call.value_dim, OUT_ALIGNED=rows_aligned(dk, dv), scale=abs(call.scale), WARPS=keys.num_warps,
        HELD=held("keys", keys),
    )  # fmt: skip
    call.launch(
        attention_bwd_ahead_queries_kernel, _launch.cdiv(call.queries, queries.block_m) * call.heads * call.batch,
        queries, **shared, dq_ptr=dq, **call.strides("dq", dq), DQ_D=call.dim, OUT_ALIGNED=rows_aligned(dq),
        WARPS=queries.num_warps, HELD=held("queries", queries),
    )  # fmt: skip
    return True
