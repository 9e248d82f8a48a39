"""The one random rule of all backends: Philox4x32-10, counted by (row, column), in plain torch.

Key = low and high 32 bits of the seed. Counter = (column // 4, low 32 bits of row, high 32 bits of row, 0), lane =
column % 4. An element is kept where its draw >= ceil(p * 2**32) and scaled by 1 / (1 - p). The rule knows nothing of
tiles, strides, padding or backends, so every backend drops the same elements, forward and backward.

Source: Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3", doi:10.1145/2063384.2063405.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW32 = 0xFFFFFFFF
SEEDS = 2**63 - 1  # seeds are drawn below it


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Ten rounds of Philox4x32 on int64 tensors that hold 32-bit values; the four words of output, broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW32, (k1 + _KEY_STEPS[1]) & _LOW32
    return c0, c1, c2, c3


def _multiply(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of the 64-bit product a * b, in halves because int64 has no unsigned product."""
    low, high = a * (b & 0xFFFF), a * (b >> 16)
    return (high + (low >> 16)) >> 16, (low + ((high & 0xFFFF) << 16)) & _LOW32


def draws(seed: Tensor, rows: Tensor, columns: int) -> Tensor:
    """The 32-bit draws of whole rows.

    Args:
        seed: () int64.
        rows: (...) int64 row numbers, any shape.
        columns: how many columns, from 0.

    Returns:
        (..., columns) int64, values in [0, 2**32).
    """
    blocks = torch.arange((columns + 3) // 4, device=rows.device)
    row = rows.unsqueeze(-1)
    counter = (blocks, row & _LOW32, (row >> 32) & _LOW32, torch.zeros_like(row))
    words = philox(counter, (seed & _LOW32, (seed >> 32) & _LOW32))
    return torch.stack(words, dim=-1).flatten(-2)[..., :columns]


def threshold(p: float) -> int:
    """ceil(p * 2**32), computed in double on the host: draws below it are dropped."""
    return math.ceil(p * 4294967296.0)


def keep_mask(seed: Tensor, p: float, rows: Tensor, columns: int) -> Tensor:
    """(..., columns) bool, True = kept, for the row numbers ``rows`` (...)."""
    return draws(seed, rows, columns) >= threshold(p)


def keep_scale(p: float) -> float:
    """1 / (1 - p), the factor of kept elements; 0 for p = 1, where none is kept."""
    return 1.0 / (1.0 - p) if p < 1.0 else 0.0


def attention_rows(batch: int, heads: int, queries: int, device: torch.device | str) -> Tensor:
    """(B, H, Tq) int64 row numbers of attention: (b * H + h) * Tq + i."""
    return torch.arange(batch * heads * queries, device=device).view(batch, heads, queries)


def draw_seed(device: torch.device | str, p: float = 0.0) -> Tensor:
    """A fresh () int64 seed on ``device`` from torch's generator, so torch.manual_seed repeats a run.

    Where ``p`` is 1 it is 0, and nothing is drawn, as PyTorch draws nothing for a dropout that drops everything.
    """
    if p >= 1.0:
        return torch.zeros((), dtype=torch.int64, device=device)
    return torch.randint(0, SEEDS, (), dtype=torch.int64, device=device)
