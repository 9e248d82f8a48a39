"""What causal and masked language models share: one stack between the embedding and the output of the same tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..mask import Mask
from ..nn import _arguments
from .config import StackConfig
from .embedding import InputEmbedding
from .padding import Padding, check_ids, padding
from .stack import encoded, encoder
from .token_model import TokenModel


@dataclass(frozen=True)
class LanguageConfig(StackConfig):
    """The sizes of a language model, causal or masked; the other fields are those of ``StackConfig``.

    Attributes:
        vocab: V, how many tokens there are.
        num_layers: how many layers.
    """

    vocab: int
    num_layers: int = 6

    def __post_init__(self) -> None:
        """Refuses what no model can be built from."""
        super().__post_init__()
        self.check_vocabulary("vocab")
        _arguments.size(type(self).__name__, "num_layers", self.num_layers)


class LanguageModel(TokenModel):
    """output(encoder(embedding(ids))), the encoder's positions seeing what ``sight`` shows.

    Attributes:
        sight: what every position may see where there is no padding, None for everything.
    """

    config: LanguageConfig
    sight: Mask | None = None

    def __init__(
        self,
        config: LanguageConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        backend: str | None = None,
    ) -> None:
        super().__init__(config)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.embedding = InputEmbedding(config.vocab, config, **factory)
        self.encoder = encoder(config, config.num_layers, backend=backend, **factory)
        self._make_output(config.vocab, **factory)

    def forward(self, ids: Tensor) -> Tensor:
        """Scores (logits) (B, T, V) of tokens, for each position of ``ids`` (B, T)."""
        return self.output(self.features(ids))

    def features(self, ids: Tensor) -> Tensor:
        """What ``output`` turns into scores: (B, T, E), 0 behind the last token."""
        x, found = self._embedded(ids)
        return encoded(self.encoder, x, found, self.sight)

    def _embedded(self, ids: Tensor) -> tuple[Tensor, Padding]:
        check_ids(type(self).__name__, "ids", ids, self.config.vocab, self.config.max_length)
        found = padding(ids, self.config.pad_id)
        return self.embedding(ids, found.positions), found
