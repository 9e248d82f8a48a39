"""Attention's gradients by Gluon's kernels for GPUs of compute capability 9: their launches.

Owns:    the launches of _attention_bwd_ahead_keys.py, _attention_bwd_ahead_queries.py and _attention_bwd_ahead_bias.py.
Dropout: the random rule is half of what both compute. So the queries' kernel writes what it has drawn, a bit a pair,
         for the keys', unless that were more than what the backward gives back: then both draw.
Config:  pick_config() below; not measured yet.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _launch
from ._attention_bwd_ahead_bias import attention_bwd_ahead_bias_kernel
from ._attention_bwd_ahead_keys import attention_bwd_ahead_keys_kernel
from ._attention_bwd_ahead_queries import attention_bwd_ahead_queries_kernel
from ._attention_call import Call, Config, pair_strides, rows_aligned


def pick_config(
    kernel: str, dim: int, length: int, pairs: int, dropout: str, dtype: torch.dtype, capability: tuple[int, int]
) -> Config | None:
    """The launch of "keys" or "queries" for heads of ``dim`` (the larger of D and Dv); None where there is none.

    ``length`` is how many keys (queries) there are; one or two warp groups keep 64 of each. As many rows pass at once
    as leave dk and dv (dq) in registers. The ``pairs`` bytes that each pair has in a bias and a keep matrix take more
    of these, ``dropout`` ("none", "read" as bits, "drawn") as well, and one group, whose threads copy twice as much,
    has less for them than two: with pairs it is left to plain Triton.
    """
    if capability[0] != 9 or dtype == torch.float32 or not 32 < dim <= 128 or (pairs and length <= 64):
        return None
    narrow, short = dim <= 64, length <= 64
    block_d, stays = 64 if narrow else 128, 64 if short else 128
    if kernel == "keys":
        few = short or pairs > 1 or (pairs == 1 and dropout != "none")
        passes = (32 if few or dropout == "drawn" else 64) if narrow else 16 if few else 32
        return Config(passes, stays, block_d, 0, stays // 16, num_stages=4)
    few = short or pairs not in (0, 2) or (pairs == 2 and dropout != "none")
    return Config(stays, 32 if few else 64, block_d, 0, stays // 16, num_stages=4)


def pick_bias_config(
    dim: int, queries: int, keys: int, alone: bool, dropout: bool, dtype: torch.dtype, capability: tuple[int, int]
) -> Config | None:
    """The launch for a broadcast bias' gradient; None where there is none.

    The larger a tile, the less is read: 128 keys where heads are narrow and the bias is ``alone``, without dropout,
    keep matrix and key lengths; else registers leave 64, and none for wide heads with dropout.
    """
    if capability[0] != 9 or dtype == torch.float32 or not 32 < dim <= 128 or min(queries, keys) <= 64:
        return None
    if dim > 64:
        return None if dropout else Config(128, 64, 128, 0, 4, num_stages=2)
    return Config(128, 128, 64, 0, 4, num_stages=2) if alone else Config(128, 64, 64, 0, 4, num_stages=4)


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


def scales_of(call: Call) -> dict[str, float]:
    """What dropout multiplies by, and its inverse; 1 where all is dropped, for 0 is not to be divided by."""
    factor = call.keep_scale or 1.0
    return {"keep_scale": factor, "unscale": 1.0 / factor}


def bias_launch(call: Call, capability: tuple[int, int]) -> tuple[Any, Config, dict[str, Any]] | None:
    """(kernel, launch, what it takes besides attention_bwd_bias_kernel's) where the call's dbias is this kernel's."""
    bias = call.bias
    if bias is None or bias.shape[2:] != (call.queries, call.keys) or call.extras() == "unaligned":
        return None
    width = max(call.dim, call.value_dim)
    dropout = call.seed is not None
    alone = call.keep is None and call.lengths is None and not dropout
    config = pick_bias_config(width, call.queries, call.keys, alone, dropout, call.query.dtype, capability)
    if config is None:
        return None
    return (
        attention_bwd_ahead_bias_kernel, config,
        {**scales_of(call), "RING": config.num_stages},
    )  # fmt: skip


def pass_back(
    call: Call, capability: tuple[int, int], shared: dict[str, Any], dq: Tensor, dk: Tensor, dv: Tensor,
    dbias: Tensor | None,
) -> bool:  # fmt: skip
    """Whether the call is one of these kernels', which then write dq, dk and dv, and dbias of all pairs if it is not
    None; ``shared`` as in attention_bwd.py.
    """
    if call.extras() == "unaligned":
        return False
    width, dtype = max(call.dim, call.value_dim), call.query.dtype
    pairs = sum(t.element_size() for t in (call.bias, call.keep) if t is not None)
    drawn = "none" if call.seed is None else "drawn"
    queries = pick_config("queries", width, call.queries, pairs, drawn, dtype, capability)
    if queries is None:
        return False
    bits, strides = bits_of(call, sum(t.numel() * t.element_size() for t in (dq, dk, dv)))
    keys = pick_config("keys", width, call.keys, pairs, drawn if bits is None else "read", dtype, capability)
    if keys is None:
        return False
    shared = {**shared, **strides, **scales_of(call), "bits_ptr": bits}
    call.launch(
        attention_bwd_ahead_queries_kernel, _launch.cdiv(call.queries, queries.block_m) * call.heads * call.batch,
        queries, **shared, **call.keep_tiles(queries.block_m, queries.block_n, of_keys=False), dq_ptr=dq,
        dbias_ptr=dbias, **pair_strides("dbias", dbias), **call.strides("dq", dq), DQ_D=call.dim,
        OUT_ALIGNED=rows_aligned(dq), WARPS=queries.num_warps, HELD=held("queries", queries),
    )  # fmt: skip
    call.launch(
        attention_bwd_ahead_keys_kernel, _launch.cdiv(call.keys, keys.block_n) * call.kv_heads * call.batch, keys,
        **{**shared, "seed_ptr": call.seed if bits is None else None},
        **call.keep_tiles(keys.block_m, keys.block_n, of_keys=True), dk_ptr=dk, dv_ptr=dv, **call.strides("dk", dk),
        **call.strides("dv", dv), DK_D=call.dim, DV_D=call.value_dim, OUT_ALIGNED=rows_aligned(dk, dv),
        scale=call.scale if call.bias is not None else abs(call.scale), WARPS=keys.num_warps, HELD=held("keys", keys),
    )  # fmt: skip
    return True
