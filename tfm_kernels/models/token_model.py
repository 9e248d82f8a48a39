"""What the models share whose input and output are the same tokens: the output, and its weight's sharing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .config import StackConfig
from .embedding import InputEmbedding


class TokenModel(nn.Module):
    """A model with an input embedding and an output over the same tokens, whose weight they may share.

    Subclasses set ``embedding`` and ``output``. Sharing is of the parameter itself; it outlives copies, pickles,
    ``to`` and ``to_empty``.
    """

    embedding: InputEmbedding
    output: nn.Linear

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        self.config = config

    def _make_output(self, vocab: int, **factory: Any) -> None:
        """The projection to ``vocab`` scores: Xavier's rule and bias 0, or the embedding's weight."""
        self.output = nn.Linear(self.config.d_model, vocab, **factory)
        nn.init.zeros_(self.output.bias)
        nn.init.xavier_uniform_(self.output.weight)
        self._share()

    def _share(self) -> None:
        if self.config.share_embeddings and isinstance(self.output, nn.Linear):  # an Int8Linear has its own
            self.output.weight = self.embedding.tokens.weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TokenModel:
        super()._apply(fn, recurse)
        self._share()  # a move that had to make new parameters has made one for each place
        return self
