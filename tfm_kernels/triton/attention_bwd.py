"""attention_bwd, Triton. Implements A.5 to A.10 of tfm_kernels/ops/attention.py.

Owns:    three launches, four where a broadcast bias gets its gradient, each with results of its own: numbers per row
         (_attention_bwd_rows.py), dk and dv by tiles of keys (_attention_bwd_keys.py), dq by tiles of queries
         (_attention_bwd_queries.py), dbias (_attention_bwd_bias.py). No atomics: every sum has a fixed order.
Method:  weights are recomputed from lse, twice: two products more than with atomic sums of dq. Results that are not
         finite are computed once more with rows as 0 that count for nothing; see attention_fwd. Wide heads, and dk and
         dv of a bias with dropout, which leave no registers for two ways, are computed that way at once.
Traffic: reads q, k, v, dout, lse and what hides, by tiles, out once; writes dq, dk, dv once, dbias once where it is
         broadcast along nothing. Else dbias takes two more products and float32 sums: of the bias' size, times the
         splits where tiles are few, and one row (column) of tiles where it is broadcast along queries (keys).
Limits:  D, Dv <= 256; float16, bfloat16, float32 (IEEE unless TF32 is allowed). No float64.
Config:  pick_config() below; for compute capability 9 measured on an H200.
Source:  own work, after Dao 2023, arXiv:2307.08691, algorithm 2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _launch
from ._attention_bwd_bias import attention_bwd_bias_kernel
from ._attention_bwd_keys import attention_bwd_keys_kernel
from ._attention_bwd_queries import attention_bwd_queries_kernel
from ._attention_bwd_rows import attention_bwd_rows_kernel
from ._attention_bwd_tile import NUMBERS
from ._attention_call import Call, Config, pair_strides, rows_aligned

PARTS = (("both",), ("dk", "dv"))  # wide heads: dk and dv do not fit into the registers together
KERNELS = ("rows", "keys", "queries", "bias")
# Compilations of one of the kernels for one combination of storage types and of optional arguments, whatever the
# shapes: five head widths, the widest in two parts; rows of results, of bias and of keep that are aligned or not; four
# kinds of broadcast of a bias.
MAX_COMPILATIONS = 40
# Whether calls that _attention_bwd_ahead.py can do are done there, as in attention_fwd.py.
AHEAD = False
MOST_SPLITS = 64  # of a bias gradient's sums over sequences and heads


def pick_config(kernel: str, dim: int, extras: str, dtype: torch.dtype, capability: tuple[int, int]) -> Config:
    """The launch of one of KERNELS for heads of ``dim`` (the larger of D and Dv) on a GPU of this compute capability.

    ``extras`` as in the forward. The tile that stays is the larger one; the wider the heads, the fewer rows pass at
    once, since dk and dv (dq) stay in registers. float32 multiplies without matrix units, 16 rows at once.
    """
    block_d = max(16, _launch.next_power_of_2(dim))
    if dtype == torch.float32:
        stays = 32 if block_d <= 128 else 16
        block_m, block_n = (16, stays) if kernel == "keys" else (stays, 16)
        return Config(block_m, block_n, block_d, 16, 4 if block_d <= 64 else 8, num_stages=1, max_registers=255)
    if kernel == "rows":
        return Config(64, 32, block_d, 0, 4 if block_d <= 64 else 8, num_stages=1)
    if capability[0] == 9:
        return _hopper(kernel, block_d, extras)
    if _launch.by_warps(capability):
        return _by_warps(kernel, block_d, extras)
    narrow, wide = block_d <= 64, block_d == 256
    if kernel == "bias":
        return Config(64, 16 if wide else 32, block_d, 0, 4 if narrow else 8, num_stages=1)
    if kernel == "keys":  # wider ones spill where they are asked for ahead
        return Config(16, 128 if narrow else 64, block_d, 0, num_warps=8, num_stages=2 if narrow else 1)
    if extras == "none":
        stays, passes = (64, 32) if wide else (128, 64 if narrow else 32)
    else:
        stays, passes = (128, 16 if extras == "unaligned" else 32) if narrow else (64, 16)
    return Config(stays, passes, block_d, 0, num_warps=8, num_stages=2)


def _hopper(kernel: str, block_d: int, extras: str) -> Config:
    """What was fastest on an H200 of what keeps out of the stack where it multiplies (tests/aot/attention_bwd.json).

    A warpgroup multiplies 64 rows: four warps to 64 rows that stay, or eight to 128, never eight to 64, which took 1.5
    to 3 times as long.
    """
    narrow, wide, plain = block_d <= 64, block_d == 256, extras == "none"
    if kernel == "bias":
        return Config(64, 64 if narrow else 16 if wide else 32, block_d, 0, 8 if wide else 4, num_stages=1)
    if kernel == "keys":
        if narrow and extras != "unaligned":
            return Config(32, 64, block_d, 0, num_warps=4, num_stages=3 if plain else 2)
        if narrow:
            return Config(16, 64, block_d, 0, num_warps=4, num_stages=3)
        if extras == "unaligned":
            return Config(16, 64, block_d, 0, num_warps=8, num_stages=2)
        passes = 32 if plain and not wide else 16
        return Config(passes, 128, block_d, 0, num_warps=8, num_stages=1 if passes == 32 else 2)
    if wide and plain:
        return Config(128, 16, block_d, 0, num_warps=8, num_stages=2)
    if wide:  # 64 rows of warp-group products that are not aligned spill in the loop
        stays, passes = (32, 32) if extras == "unaligned" else (64, 16)
        return Config(stays, passes, block_d, 0, num_warps=8, num_stages=2)
    if plain and not narrow:
        return Config(64, 64, block_d, 0, num_warps=4, num_stages=2)
    passes = 32 if narrow and extras != "unaligned" else 16
    return Config(64, passes, block_d, 0, num_warps=4, num_stages=3)


def _by_warps(kernel: str, block_d: int, extras: str) -> Config:
    """Where each warp multiplies by itself, chosen as in attention_fwd.py: no GPU has told which is fastest."""
    narrow, wide, plain = block_d <= 64, block_d == 256, extras == "none"
    if kernel == "bias":
        stays, passes = (64, 32) if narrow else (64 if wide else 128, 16)
        return Config(stays, passes, block_d, 0, 4 if narrow else 8, num_stages=1)
    if wide:
        return Config(32, 32, block_d, 0, num_warps=4, num_stages=2)
    if kernel == "queries":
        passes = 16 if extras == "unaligned" else (32 if narrow else 16) * (2 if plain else 1)
        return Config(128, passes, block_d, 0, num_warps=8, num_stages=2)
    if narrow and plain:
        return Config(32, 64, block_d, 0, num_warps=4, num_stages=2)
    if narrow or plain:
        return Config(16, 128, block_d, 0, num_warps=8, num_stages=2)
    return Config(64, 64, block_d, 0, num_warps=8, num_stages=1 if extras == "unaligned" else 2)


def attention_bwd(
    dout: Tensor, dlse: Tensor | None, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor,
    bias: Tensor | None, keep: Tensor | None, key_lengths: Tensor | None, cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None, max_seqlen_q: int, max_seqlen_k: int, window: list[int], scale: float,
    dropout_p: float, seed: Tensor | None, deterministic: bool, need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The operator attention_bwd_triton; its contract is tfm_kernels/ops/attention.py's."""
    op = "attention_bwd_triton"
    call = Call(
        op, query, key, value, bias, keep, key_lengths, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, window,
        scale, dropout_p, seed,
    )  # fmt: skip
    if need_bias and bias is None:
        raise ValueError(f"{op}: need_bias needs a bias, got None")
    single, numbers = (*query.shape[:-1], value.shape[-1]), call.statistics_shape()
    _launch.check(
        op, query, dout=(dout, single, (query.dtype,)), out=(out, single, (query.dtype,)),
        lse=(lse, numbers, (torch.float32,)), dlse=(dlse, numbers, (torch.float32,)),
    )  # fmt: skip
    dq, dk, dv = call.like(query, call.dim), call.like(key, call.dim), call.like(value, call.value_dim)
    like = bias if bias is not None and need_bias else query.new_empty(0)
    dbias = torch.zeros(like.shape, dtype=like.dtype, device=query.device)
    if out.numel() == 0 or key.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_(), dbias
    full = (call.batch, call.heads, call.queries, call.keys)
    own_dbias = need_bias and tuple(dbias.shape) == full

    capability, width, extras = _launch.capability(query), max(call.dim, call.value_dim), call.extras()
    configs = {name: pick_config(name, width, extras, query.dtype, capability) for name in KERNELS}
    readable = call.readable(dout)
    statistics = torch.empty((*numbers, NUMBERS), dtype=torch.float32, device=query.device)
    shared: dict[str, Any] = {"statistics_ptr": statistics, "dout_ptr": readable, **call.strides("dout", readable)}
    with _launch.on(query):
        saved = call.readable(out)
        config = configs["rows"]
        call.launch(
            attention_bwd_rows_kernel, _launch.cdiv(call.queries, config.block_m) * call.heads * call.batch, config,
            out_ptr=saved, lse_ptr=lse.contiguous(), dlse_ptr=None if dlse is None else dlse.contiguous(), **shared,
            **call.strides("out", saved),
        )  # fmt: skip
        results, done = (dq, dk, dv, dbias if own_dbias else None), False
        of_bias: tuple[Any, Config, dict[str, Any]] = attention_bwd_bias_kernel, configs["bias"], {}
        if AHEAD:
            from . import _attention_bwd_ahead as ahead  # Gluon, which is Triton's experiment: not for every import

            done = ahead.pass_back(call, capability, shared, *results)
            if need_bias and not own_dbias:
                of_bias = ahead.bias_launch(call, capability) or of_bias
        if not done:
            _pass_back(call, configs, shared, *results)
        if need_bias and not own_dbias:
            dbias = _broadcast_dbias(call, *of_bias, dbias, shared, capability)
    return dq, dk, dv, dbias


def _pass_back(
    call: Call, configs: dict[str, Config], shared: dict[str, Any], dq: Tensor, dk: Tensor, dv: Tensor,
    dbias: Tensor | None,
) -> None:  # fmt: skip
    """Writes dq, dk and dv, and dbias of all pairs if it is not None."""
    config = configs["keys"]
    lists = call.keep_tiles(config.block_m, config.block_n, of_keys=True)
    for part in PARTS[config.block_d == 256]:
        call.launch(
            attention_bwd_keys_kernel, _launch.cdiv(call.keys, config.block_n) * call.kv_heads * call.batch, config,
            **shared, **lists, dk_ptr=dk, dv_ptr=dv, **call.strides("dk", dk), **call.strides("dv", dv),
            DK_D=call.dim, DV_D=call.value_dim, OUT_ALIGNED=rows_aligned(dk, dv), PART=part,
            scale=call.scale if call.bias is not None else abs(call.scale), SHIELDED=call.shielded(config.block_n),
        )  # fmt: skip
    config = configs["queries"]
    call.launch(
        attention_bwd_queries_kernel, _launch.cdiv(call.queries, config.block_m) * call.heads * call.batch, config,
        **shared, **call.keep_tiles(config.block_m, config.block_n, of_keys=False), dq_ptr=dq,
        dbias_ptr=dbias, **pair_strides("dbias", dbias), **call.strides("dq", dq), DQ_D=call.dim,
        OUT_ALIGNED=rows_aligned(dq), SHIELDED=call.shielded(config.block_m),
    )  # fmt: skip


def splits_of(programs: int, sharing: int, multiprocessors: int) -> int:
    """In how many parts the sequences and heads that share a matrix are summed: enough for two programs each."""
    return max(1, min(sharing, MOST_SPLITS, _launch.cdiv(2 * multiprocessors, programs)))


def _broadcast_dbias(
    call: Call, kernel: Any, config: Config, more: dict[str, Any], dbias: Tensor, shared: dict[str, Any],
    capability: tuple[int, int],
) -> Tensor:  # fmt: skip
    """A.10 of a bias that is broadcast along some axis."""
    own_b, own_h, own_q, own_k = dbias.shape
    sharing_b, sharing_h = call.batch // own_b, call.heads // own_h
    across, along = _launch.cdiv(call.queries, config.block_m), _launch.cdiv(call.keys, config.block_n)
    programs = own_b * own_h * across * along
    multiprocessors = _launch.MULTIPROCESSORS.get(capability[0], 132)
    splits = splits_of(programs, sharing_b * sharing_h, multiprocessors)
    per_row, per_column = own_q == call.queries, own_k == call.keys
    rows, columns = own_q if per_row else across, own_k if per_column else along
    sums = torch.empty((splits, own_b, own_h, rows, columns), dtype=torch.float32, device=dbias.device)
    call.launch(
        kernel, programs * splits, config, **{**shared, **more}, sums_ptr=sums, B=call.batch, SHARING_B=sharing_b,
        SHARING_H=sharing_h, SPLITS=splits, ROWS=rows, COLUMNS=columns, PER_ROW=per_row, PER_COLUMN=per_column,
    )  # fmt: skip
    total = sums[0] if splits == 1 else sums.sum(0)
    if not per_row:
        total = total.sum(2, keepdim=True)
    if not per_column:
        total = total.sum(3, keepdim=True)
    return total.to(dbias.dtype)
