"""TransformerClassifier: one label for a text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import _check
from ..nn import _arguments
from .config import StackConfig
from .embedding import InputEmbedding
from .padding import check_ids, padding
from .stack import encoded, encoder

_NAME = "TransformerClassifier"
POOLINGS = ("mean", "first")


@dataclass(frozen=True)
class ClassifierConfig(StackConfig):
    """The sizes of a ``TransformerClassifier``; the other fields are those of ``StackConfig``.

    Attributes:
        vocab: V, how many tokens there are.
        num_classes: how many labels there are.
        num_layers: how many layers.
        pooling: what of the text the label is read from: the "mean" over its tokens, or its "first" token.
    """

    vocab: int
    num_classes: int
    num_layers: int = 6
    pooling: str = "mean"

    def __post_init__(self) -> None:
        """Refuses what no model can be built from."""
        super().__post_init__()
        self.check_vocabulary("vocab")
        _arguments.size("ClassifierConfig", "num_classes", self.num_classes)
        _arguments.size("ClassifierConfig", "num_layers", self.num_layers)
        _check.choice("ClassifierConfig", "pooling", self.pooling, POOLINGS)
        if self.share_embeddings:
            raise ValueError("ClassifierConfig: share_embeddings must be False, a classifier's output has no tokens")


class TransformerClassifier(nn.Module):
    """Scores of every label for a text.

    Every position sees all tokens of its row; the mean over the tokens, or the first one, goes through dropout and one
    linear layer. Padding, wherever it stands, changes nothing; a row of nothing but padding counts as features of 0.
    Matrices start by Xavier's rule, embeddings as N(0, 1 / E), the output bias as 0. ``encoder`` is a
    ``tfm_kernels.nn.TransformerEncoder``, whose state_dict is torch's.

    Args:
        config: the sizes.
        device: of the parameters.
        dtype: of the parameters.
        backend: "reference" | "aten" | "cpu" | "triton" | "cuda", or None to choose automatically.

    Shape, with B texts of T tokens:

        ====================  ================
        step                  shape
        ====================  ================
        token numbers         (B, T)
        embedding, positions  (B, T, E)
        one head's q, k, v    (B, H, T, E / H)
        attention in a layer  (B, T, E)
        feed-forward inside   (B, T, F)
        stack                 (B, T, E)
        pooled                (B, E)
        output                (B, num_classes)
        ====================  ================

    Raises:
        TypeError, ValueError: ids are no (B, T) integers in the vocabulary, or longer than max_length.

    Example:
        >>> model = TransformerClassifier(tfk.models.ClassifierConfig(100, 2, num_layers=2, d_model=16, nhead=2))
        >>> model(torch.randint(1, 100, (3, 7))).shape
        torch.Size([3, 2])
    """

    def __init__(
        self,
        config: ClassifierConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.config = config
        self.embedding = InputEmbedding(config.vocab, config, **factory)
        self.encoder = encoder(config, config.num_layers, backend=backend, **factory)
        self.dropout = nn.Dropout(config.dropout)
        self.output = nn.Linear(config.d_model, config.num_classes, **factory)
        nn.init.xavier_uniform_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def forward(self, ids: Tensor) -> Tensor:
        """Scores (logits) (B, num_classes) of the labels of ``ids`` (B, T)."""
        return self.output(self.dropout(self.features(ids)))

    def features(self, ids: Tensor) -> Tensor:
        """What ``output`` turns into scores: (B, E)."""
        check_ids(_NAME, "ids", ids, self.config.vocab, self.config.max_length)
        found = padding(ids, self.config.pad_id)
        x = encoded(self.encoder, self.embedding(ids, found.positions), found)
        if found.keep is None:
            return x.mean(1) if self.config.pooling == "mean" else x[:, 0]
        shown = x.masked_fill(~found.keep.unsqueeze(-1), 0.0)
        if self.config.pooling == "mean":
            total = shown.sum(1, dtype=torch.promote_types(x.dtype, torch.float32))  # float16 ends at 65504
            return (total / found.keep.sum(1, keepdim=True).clamp(min=1)).to(x.dtype)
        first = found.keep.int().argmax(1)
        return shown.gather(1, first[:, None, None].expand(-1, 1, x.shape[-1])).squeeze(1)
