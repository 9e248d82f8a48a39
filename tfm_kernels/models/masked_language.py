"""MaskedLanguageModel: tokens that were hidden, from those around them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .language import LanguageConfig, LanguageModel
from .stack import packing


@dataclass(frozen=True)
class MaskedLanguageConfig(LanguageConfig):
    """The sizes of a ``MaskedLanguageModel``: vocab, num_layers and the fields of ``StackConfig``."""


class MaskedLanguageModel(LanguageModel):
    """Scores of the token at every position, given the tokens on both sides.

    Every position sees all tokens of its row. Padding, wherever it stands, changes nothing at any token. Matrices start
    by Xavier's rule, embeddings as N(0, 1 / E), the output bias as 0. ``encoder`` is a
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
        output                (B, T, V)
        ====================  ================

    Raises:
        TypeError, ValueError: ids are no (B, T) integers in the vocabulary, or longer than max_length.

    Source: Devlin et al. 2018, arXiv:1810.04805, section 3.1; the output is one linear layer.

    Example:
        >>> model = MaskedLanguageModel(tfk.models.MaskedLanguageConfig(100, 2, d_model=16, nhead=2))
        >>> model(torch.randint(1, 100, (2, 7))).shape
        torch.Size([2, 7, 100])
    """

    config: MaskedLanguageConfig

    def features_at(self, ids: Tensor, places: Tensor) -> Tensor:
        """``features`` at ``places`` (B, C), int64 positions, at less cost than all: (B, C, E)."""
        x, found = self._embedded(ids)
        packed = packing(self.encoder, found, self.sight)
        return found.cleared(self.encoder.forward_at(x, places, found.hidden_from(self.sight), packed), places)
