"""The input of a stack: scaled token embeddings plus positions, and dropout."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..nn import PositionalEncoding, TokenEmbedding
from .config import StackConfig


class InputEmbedding(nn.Module):
    """y = dropout(sqrt(d_model) * tokens.weight[ids] + positions[t]).

    Args:
        vocab: V, how many tokens there are.
        config: width, dropout, kind and number of positions, padding.
        tokens: an embedding to share, None for one of its own.
        factory: device and dtype of the parameters.

    Shape:
        ids (B, T) -> (B, T, E).
    """

    def __init__(self, vocab: int, config: StackConfig, tokens: TokenEmbedding | None = None, **factory: Any) -> None:
        super().__init__()
        width = config.d_model
        self.tokens = TokenEmbedding(vocab, width, config.pad_id, **factory) if tokens is None else tokens
        self.positions: nn.Module
        if config.positions == "learned":
            self.positions = LearnedPositions(width, config.dropout, config.max_length, **factory)
        else:
            self.positions = PositionalEncoding(width, config.dropout, config.max_length, **factory)

    def forward(self, ids: Tensor, positions: Tensor | None = None, offset: int = 0) -> Tensor:
        """Embeds ``ids`` at ``positions`` (B, T), or in columns ``offset``, ``offset`` + 1, ..."""
        x = self.tokens(ids)
        if positions is None:
            return self.positions(x, offset)
        table = self.positions.weight if isinstance(self.positions, LearnedPositions) else self.positions.pe
        return self.positions.dropout(x + F.embedding(positions, table).to(x.dtype))  # type: ignore[arg-type, operator]


class LearnedPositions(nn.Module):
    """y = dropout(x + weight[t]), one learned row for each position.

    Args:
        d_model: E.
        dropout: probability to drop an element of the sum in training.
        max_length: how many positions there are.
        device: of the weight.
        dtype: of the weight.

    Shape:
        x (B, T, E) -> the same.
    """

    def __init__(
        self,
        d_model: int,
        dropout: float,
        max_length: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(max_length, d_model, device=device, dtype=dtype))
        self.dropout = nn.Dropout(dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the rows anew, from N(0, 1 / d_model)."""
        nn.init.normal_(self.weight, 0.0, self.weight.shape[1] ** -0.5)

    def forward(self, x: Tensor, offset: int = 0) -> Tensor:
        """Adds the rows of positions ``offset``, ``offset`` + 1, ... to ``x``."""
        return self.dropout(x + self.weight[offset : offset + x.shape[1]].to(x.dtype))
