"""What turns token numbers into the input of a Transformer: TokenEmbedding and PositionalEncoding."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import _check
from . import _arguments


class TokenEmbedding(nn.Embedding):
    """y = sqrt(d_model) * weight[ids].

    A ``torch.nn.Embedding`` whose output is scaled, and whose rows start as N(0, 1 / d_model), so that the output
    starts with variance 1 and the weight may be shared with the output projection. One parameter, ``weight``.

    Args:
        vocab_size: how many tokens there are.
        d_model: E, width of an embedding.
        padding_idx: a token whose row starts as zeros and gets no gradient, None for no such token.
        device: of the weight.
        dtype: of the weight.

    Shape:
        ids (...), int32 or int64 -> (..., E).

    Example:
        >>> TokenEmbedding(100, 8)(torch.tensor([[1, 2, 3]])).shape
        torch.Size([1, 3, 8])
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        padding_idx: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _arguments.size("TokenEmbedding", "vocab_size", vocab_size)
        _arguments.size("TokenEmbedding", "d_model", d_model)
        if padding_idx is not None:
            _arguments.size("TokenEmbedding", "padding_idx", padding_idx, -vocab_size)
            if padding_idx >= vocab_size:
                raise ValueError(
                    f"TokenEmbedding: padding_idx must be below vocab_size {vocab_size}, got {padding_idx}"
                )
        super().__init__(vocab_size, d_model, padding_idx, device=device, dtype=dtype)

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, embeddings: Tensor, freeze: bool = True, padding_idx: int | None = None
    ) -> TokenEmbedding:
        """A table of ready rows (vocab_size, d_model), which are not learned unless ``freeze`` is False."""
        _check.tensor("TokenEmbedding.from_pretrained", "embeddings", embeddings)
        if embeddings.dim() != 2:
            raise ValueError(
                "TokenEmbedding.from_pretrained: embeddings must have shape (vocab_size, d_model), got "
                f"{tuple(embeddings.shape)}"
            )
        vocab_size, d_model = embeddings.shape
        table = cls(vocab_size, d_model, padding_idx, device="meta", dtype=embeddings.dtype)
        table.weight = nn.Parameter(embeddings, requires_grad=not freeze)
        return table

    def reset_parameters(self) -> None:
        """Draws the rows anew, from N(0, 1 / d_model)."""
        nn.init.normal_(self.weight, 0.0, self.embedding_dim**-0.5)
        self._fill_padding_idx_with_zero()

    def forward(self, input: Tensor) -> Tensor:
        """Looks the tokens ``input`` up."""
        _check.tensor("TokenEmbedding", "ids", input)
        if input.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"TokenEmbedding: ids must be int32 or int64, got {_check.dtype_name(input)}")
        rows = F.embedding(
            input, self.weight, self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse
        )
        return rows * math.sqrt(self.embedding_dim)


class PositionalEncoding(nn.Module):
    """y = dropout(x + pe[positions]), pe[t, 2i] = sin(t / 10000^(2i / E)), pe[t, 2i + 1] = cos of the same.

    Nothing is learned. The buffer ``pe`` (max_len, E) follows from the arguments, so it is not in the state_dict.

    Args:
        d_model: E, any width, also odd.
        dropout: probability to drop an element of the sum in training.
        max_len: longest position there is.
        batch_first: x is (B, T, E); False for (T, B, E).
        device: of the buffer.
        dtype: of the buffer; it is computed in float64 and rounded once.

    Shape:
        x (B, T, E) or (T, E) -> the same.

    Example:
        >>> PositionalEncoding(8)(torch.zeros(2, 5, 8)).shape
        torch.Size([2, 5, 8])
    """

    pe: Tensor

    def __init__(
        self,
        d_model: int,
        dropout: float = 0.1,
        max_len: int = 5000,
        *,
        batch_first: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _arguments.size("PositionalEncoding", "d_model", d_model)
        _arguments.size("PositionalEncoding", "max_len", max_len)
        _check.probability("PositionalEncoding", "dropout", dropout)
        super().__init__()
        self.d_model, self.max_len, self.batch_first = d_model, max_len, batch_first
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("pe", torch.empty(max_len, d_model, device=device, dtype=dtype), persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Computes ``pe``; call it after ``to_empty`` where the module was made on the meta device."""
        # on the CPU, because not every device has float64: MPS does not
        position = torch.arange(self.max_len, device="cpu", dtype=torch.float64).unsqueeze(1)
        pairs = torch.arange(0, self.d_model, 2, device="cpu", dtype=torch.float64)
        angle = position * torch.exp(pairs * (-math.log(10000.0) / self.d_model))  # (max_len, ceil(E / 2))
        table = torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1)[:, : self.d_model]
        self.pe.copy_(table)

    def forward(self, x: Tensor, offset: int = 0) -> Tensor:
        """Adds the encodings of positions ``offset``, ``offset`` + 1, ... to ``x``."""
        _arguments.features("PositionalEncoding", "x", x, self.d_model, "d_model")
        if x.dim() not in (2, 3):
            raise ValueError(f"PositionalEncoding: x must be (B, T, E) or (T, E), got shape {tuple(x.shape)}")
        axis = 1 if self.batch_first and x.dim() == 3 else 0
        length = x.shape[axis]
        if offset < 0 or offset + length > self.max_len:
            raise ValueError(
                f"PositionalEncoding: positions must lie in [0, {self.max_len}), max_len, got {offset} to "
                f"{offset + length - 1}"
            )
        encoding = self.pe[offset : offset + length].to(x.dtype)
        return self.dropout(x + (encoding.unsqueeze(1) if axis == 0 and x.dim() == 3 else encoding))

    def extra_repr(self) -> str:
        """The arguments."""
        return f"{self.d_model}, max_len={self.max_len}, batch_first={self.batch_first}"
