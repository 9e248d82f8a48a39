"""The host side of the attention kernels: checks an operator's arguments and turns them into a kernel's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import _launch
from ._attention_tiles import keep_tiles_kernel

WIDEST = 256  # head dimensions
LONGEST = 1 << 30
MAX_COMPILATIONS = 40  # of the lists of tiles: twice (of queries, of keys) for each launch and each alignment
FAR = 1 << 40  # a limit that no pair of positions reaches
LOG2_E = 1.4426950408889634
NOTHING = 2.0**-120  # a scale that leaves no score in float32
INDICES = (torch.int32, torch.int64)
OPTIONS = ("num_warps", "maxnreg", "enable_fp_fusion")


@dataclass(frozen=True)
class Config:
    """How a kernel is launched.

    Attributes:
        block_m: queries in a tile.
        block_n: keys in a tile.
        block_d: head dimensions held, a power of two of at least 16.
        chunk: head dimensions that a product of queries and keys takes at once, or 0: all.
        num_warps: warps of one program.
        num_stages: how many of the tiles that pass are on their way at once.
        max_registers: what a thread may take; None leaves it to the compiler, which spills to keep programs together.
    """

    block_m: int
    block_n: int
    block_d: int
    chunk: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None

    def arguments(self) -> dict[str, Any]:
        """What every kernel over pairs of tiles is launched with; sums and products are not fused."""
        return {
            "BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "BLOCK_D": self.block_d, "CHUNK": self.chunk,
            "STAGES": self.num_stages, "num_warps": self.num_warps, "maxnreg": self.max_registers,
            "enable_fp_fusion": False,
        }  # fmt: skip


class Call:
    """A checked call. Nothing that a caller passes lets a kernel read outside of its tensors.

    Attributes:
        packed: (total, H, D) tensors with cu_seqlens; else (B, H, T, D).
        batch, heads, kv_heads, queries, keys, dim, value_dim: B, Hq, Hk, Tq, Tk, D, Dv; packed: the longest sequences.
        scale: the scores' factor.
    """

    def __init__(
        self, op: str, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, keep: Tensor | None,
        key_lengths: Tensor | None, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, max_seqlen_q: int,
        max_seqlen_k: int, window: list[int], scale: float, dropout_p: float, seed: Tensor | None,
    ) -> None:  # fmt: skip
        self.op, self.query = op, query
        self.scale = scale if abs(scale) > NOTHING else 0.0
        self.packed = cu_seqlens_q is not None
        _launch.check_device(op, query)
        self._check_shapes(query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        self._check_masks(bias, keep, key_lengths)
        if len(window) != 4:
            raise ValueError(f"{op}: window must hold 4 limits, got {len(window)}")
        self.keep_scale, self.last_dropped = _launch.check_dropout(op, dropout_p, seed)
        if dropout_p > 0.0:
            _launch.check(op, query, seed=(seed, (), (torch.int64,)))
        if bias is None and self.scale <= 0.0:  # so that the largest dot product is the largest score
            query = -query if self.scale < 0.0 else query * 0
        self.tensors = tuple(self.readable(t) for t in (query, key, value))
        self.bias = None if bias is None else bias.detach()
        self.keep = None if keep is None else keep.view(torch.uint8)
        self.pairs_aligned = all(_pairs_aligned(t) for t in (bias, keep)) and not (bias is None and keep is None)
        self.lengths = None if key_lengths is None else key_lengths.contiguous()
        self.ends = cu_seqlens_q, cu_seqlens_k
        self.seed = seed if dropout_p > 0.0 else None
        self.window = [max(-FAR, min(limit, FAR)) for limit in window]

    def _check_shapes(self, query, key, value, cu_q, cu_k, max_q, max_k) -> None:
        op, dims = self.op, 3 if self.packed else 4
        if (cu_q is None) != (cu_k is None):
            raise ValueError(f"{op}: cu_seqlens_q and cu_seqlens_k go together")
        for name, t in (("query", query), ("key", key), ("value", value)):
            if t.dim() != dims or t.shape[-1] < 1 or t.shape[-1] > WIDEST:
                raise ValueError(
                    f"{op}: {name} must have {dims} dimensions, the last of 1 to {WIDEST}, got shape {tuple(t.shape)}"
                )
        self.heads, self.kv_heads, self.dim, self.value_dim = query.shape[1], key.shape[1], query.shape[-1], 0
        self.value_dim = value.shape[-1]
        if self.heads != self.kv_heads and (self.kv_heads == 0 or self.heads % self.kv_heads):
            raise ValueError(f"{op}: query must have a multiple of key's {self.kv_heads} heads, got {self.heads}")
        if cu_q is not None:
            self.batch, self.queries, self.keys = cu_q.numel() - 1, max_q, max_k
            around: tuple[int, ...] = (key.shape[0], self.kv_heads)
            ends = (self.batch + 1,)
            _launch.check(op, query, cu_seqlens_q=(cu_q, ends, INDICES), cu_seqlens_k=(cu_k, ends, INDICES))
        else:
            self.batch, self.queries, self.keys = query.shape[0], query.shape[2], key.shape[2]
            around = (self.batch, self.kv_heads, self.keys)
        single = (query.dtype,)
        _launch.check(
            op, query, query=(query, query.shape, _launch.DTYPES), key=(key, (*around, self.dim), single),
            value=(value, (*around, self.value_dim), single),
        )  # fmt: skip
        if self.batch < 0 or not (0 <= self.queries < LONGEST and 0 <= self.keys < LONGEST):
            raise ValueError(f"{op}: lengths must lie in [0, 2**30), got {self.queries} and {self.keys}")

    def _check_masks(self, bias: Tensor | None, keep: Tensor | None, key_lengths: Tensor | None) -> None:
        given = bias is not None or keep is not None or key_lengths is not None
        if self.packed and given:
            raise ValueError(f"{self.op}: packed calls take neither bias, keep nor key_lengths")
        full = (self.batch, self.heads, self.queries, self.keys)
        for name, t, dtypes in (
            ("bias", bias, (self.query.dtype, torch.float32)),
            ("keep", keep, (torch.bool,)),
        ):
            if t is None:
                continue
            if t.dim() != 4 or any(size not in (1, most) for size, most in zip(t.shape, full, strict=True)):
                raise ValueError(f"{self.op}: {name} must broadcast to {full}, got {tuple(t.shape)}")
            _launch.check(self.op, self.query, **{name: (t, t.shape, dtypes)})
        _launch.check(self.op, self.query, key_lengths=(key_lengths, (self.batch,), INDICES))

    def reach(self) -> int:
        """The most keys that the band shows to a sequence's queries together."""
        low, high, end_low, end_high = self.window
        most = min(high, -end_low, high - low, end_high - end_low) + self.queries
        return max(0, min(self.keys, most))

    def extras(self) -> str:
        """What a tile of scores meets: "none"; dropout, bias or keep, "aligned" or "unaligned"."""
        if self.bias is None and self.keep is None:
            return "none" if self.seed is None else "aligned"
        return "aligned" if self.pairs_aligned else "unaligned"

    def like(self, t: Tensor, width: int, dtype: torch.dtype | None = None) -> Tensor:
        """An empty tensor of t's shape but for the last axis, stored as (B, T, H, width)."""
        shape = t.shape[:-1] if self.packed else (t.shape[0], t.shape[2], t.shape[1])
        found = torch.empty((*shape, width), dtype=dtype or t.dtype, device=t.device)
        return found if self.packed else found.transpose(1, 2)

    def readable(self, t: Tensor) -> Tensor:
        """``t`` with rows that start and end at multiples of 16 bytes: itself, or a copy, padded with zeros."""
        if rows_aligned(t):
            return t
        width = _launch.cdiv(t.shape[-1], 8) * 8
        copy = self.like(t, width)
        copy[..., t.shape[-1] :].zero_()
        copy[..., : t.shape[-1]].copy_(t)
        return copy

    def statistics(self) -> Tensor:
        """An empty float32 number per row, laid out as lse."""
        return torch.empty(self.statistics_shape(), dtype=torch.float32, device=self.query.device)

    def statistics_shape(self) -> tuple[int, ...]:
        """(B, Hq, Tq), or (Hq, total_q)."""
        return (self.heads, self.query.shape[0]) if self.packed else tuple(self.query.shape[:3])

    def strides(self, name: str, t: Tensor) -> dict[str, int]:
        """Strides of (B, H, T, D) or (total, H, D) as a kernel takes them; those along D are 1."""
        b, h, row = (0, t.stride(1), t.stride(0)) if self.packed else (t.stride(0), t.stride(1), t.stride(2))
        return {f"{name}_stride_b": b, f"{name}_stride_h": h, f"{name}_stride_t": row}

    def units(self) -> dict[str, float]:
        """How scores become powers of two: x = q k^T, p = 2^((x - top) step), lse = top unit + log(sum).

        With a bias x is the score itself, scale q k^T + bias, and step is log2(e).
        """
        if self.bias is not None:
            return {"scale": self.scale, "step": LOG2_E, "unit": 1.0}
        size = abs(self.scale) or 1.0
        return {"scale": self.scale, "step": size * LOG2_E, "unit": size}

    def arguments(self) -> dict[str, Any]:
        """What all kernels over pairs of tiles take by the same names."""
        q, k, v = self.tensors
        row_step = self.queries
        statistics = (0, self.query.shape[0]) if self.packed else (self.heads * self.queries, self.queries)
        names = "low", "high", "end_low", "end_high"
        return {
            "q_ptr": q, "k_ptr": k, "v_ptr": v, "bias_ptr": self.bias, "keep_ptr": self.keep,
            "lengths_ptr": self.lengths, "cu_q_ptr": _index(self.ends[0]), "cu_k_ptr": _index(self.ends[1]),
            "seed_ptr": self.seed, "H": self.heads, "G": max(1, self.heads // max(1, self.kv_heads)),
            "Tq": self.queries, "Tk": self.keys, "total_q": q.shape[0], "total_k": k.shape[0], "row_step": row_step,
            "D": q.shape[-1], "DV": v.shape[-1], **self.strides("q", q), **self.strides("k", k), **self.strides("v", v),
            "lse_stride_b": statistics[0], "lse_stride_h": statistics[1], **pair_strides("bias", self.bias),
            **pair_strides("keep", self.keep), **dict(zip(names, self.window, strict=True)), **self.units(),
            "keep_scale": self.keep_scale, "last_dropped": self.last_dropped,
            "PAIRS_ALIGNED": self.pairs_aligned, "PRECISION": self.precision(),
        }  # fmt: skip

    def precision(self) -> str:
        """How the kernels multiply float32."""
        return _launch.float32_products() if self.query.dtype == torch.float32 else "ieee"

    def shielded(self, rows: int) -> bool:
        """Whether a kernel whose tiles of weights have so many rows looks at keep behind a branch."""
        both = self.keep is not None and self.seed is not None
        return both and shielded(self.query.dtype, self.precision(), rows, _launch.capability(self.query))

    def launch(self, kernel: Any, programs: int, config: Config, **more: Any) -> None:
        """Launches a kernel with what it takes of the call's, the launch's and these arguments."""
        given = {**self.arguments(), **config.arguments(), **more}
        options = {name: given[name] for name in OPTIONS}
        _launch.launch(kernel, (programs,), **{name: given[name] for name in kernel.arg_names}, **options)

    def keep_tiles(self, block_m: int, block_n: int, of_keys: bool) -> dict[str, Any]:
        """The lists of _attention_tiles.py as a kernel takes them; empty without a keep matrix."""
        if self.keep is None:
            none = dict.fromkeys(("list_stride_b", "list_stride_h", "list_width"), 0)
            return {"counts_ptr": None, "tiles_ptr": None, **none}
        across, along = _launch.cdiv(self.queries, block_m), _launch.cdiv(self.keys, block_n)
        rows, width = (along, across) if of_keys else (across, along)
        batch = self.batch if self.lengths is not None else self.keep.shape[0]
        heads = self.keep.shape[1]
        device = self.query.device
        counts = torch.empty(batch * heads * rows, dtype=torch.int32, device=device)
        tiles = torch.empty(batch * heads * rows * width, dtype=torch.int32, device=device)
        if counts.numel():
            names = "low", "high", "end_low", "end_high"
            _launch.launch(
                keep_tiles_kernel, (counts.numel(),),
                keep_ptr=self.keep, lengths_ptr=self.lengths, counts_ptr=counts, tiles_ptr=tiles, H=heads,
                Tq=self.queries, Tk=self.keys, **pair_strides("keep", self.keep), list_width=width,
                **dict(zip(names, self.window, strict=True)), BLOCK_M=block_m, BLOCK_N=block_n, OF_KEYS=of_keys,
                PAIRS_ALIGNED=self.pairs_aligned, num_warps=4, maxnreg=255, enable_fp_fusion=False,
            )  # fmt: skip
        return {
            "counts_ptr": counts, "tiles_ptr": tiles, "list_stride_b": heads * rows if batch > 1 else 0,
            "list_stride_h": rows if heads > 1 else 0, "list_width": width,
        }  # fmt: skip


def pair_strides(name: str, t: Tensor | None) -> dict[str, int]:
    """Strides of a 4-D tensor that broadcasts to (B, H, Tq, Tk), 0 where it does."""
    found = [0] * 4 if t is None else [0 if t.shape[i] == 1 else t.stride(i) for i in range(4)]
    return {f"{name}_stride_{axis}": stride for axis, stride in zip("bhtd", found, strict=True)}


def rows_aligned(*tensors: Tensor) -> bool:
    """Whether all rows along the last axis start and end at multiples of 16 bytes: loads of 16 bytes are possible."""
    for t in tensors:
        if t.shape[-1] % 8 or t.stride(-1) != 1 or t.data_ptr() % 16:
            return False
        if any(size > 1 and stride % 8 for size, stride in zip(t.shape[:-1], t.stride()[:-1], strict=True)):
            return False
    return True


def shielded(dtype: torch.dtype, precision: str, rows: int, capability: tuple[int, int]) -> bool:
    """Whether a kernel of a call with keep and dropout, whose tiles of weights have ``rows``, looks at keep behind one.

    Triton 3.6.0 plans the factors of mma.sync by the fewest bits that what they are made of was loaded with, halved by
    the joins of dropout, and does not look through branches. By keep's 8 bits it misplaces weights of 16 keys or
    queries at a time; its pull request 11691 mends that. Warp groups take 64 rows, and factors that are not so planned.
    """
    by_warps = rows < 64 or _launch.by_warps(capability)
    return precision == "tf32" or (dtype != torch.float32 and by_warps)


def _pairs_aligned(t: Tensor | None) -> bool:
    if t is None:
        return True
    step = 16 // t.element_size()
    strides = [0 if t.shape[i] == 1 else t.stride(i) for i in range(3)]
    return (
        t.shape[3] > 1 and t.shape[3] % 8 == 0 and t.stride(3) == 1 and t.data_ptr() % 16 == 0
        and not any(stride % step for stride in strides)
    )  # fmt: skip


def _index(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()
