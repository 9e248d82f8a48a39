"""CausalLanguageModel: the next token from those before it, with decoder layers that look at nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from ..mask import Mask
from .language import LanguageConfig, LanguageModel


@dataclass(frozen=True)
class CausalLanguageConfig(LanguageConfig):
    """The sizes of a ``CausalLanguageModel``: vocab, num_layers and the fields of ``StackConfig``."""


class CausalLanguageModel(LanguageModel):
    """Scores of every next token, given the tokens up to it.

    A position sees itself and what stands before it. Padding, wherever it stands, changes nothing at any token.
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
        output                (B, T, V)
        ====================  ================

    Raises:
        TypeError, ValueError: ids are no (B, T) integers in the vocabulary, or longer than max_length.

    Source: Radford et al. 2018, "Improving language understanding by generative pre-training", section 3.1.

    Example:
        >>> model = CausalLanguageModel(tfk.models.CausalLanguageConfig(100, 2, d_model=16, nhead=2))
        >>> model(torch.randint(1, 100, (2, 7))).shape
        torch.Size([2, 7, 100])
    """

    config: CausalLanguageConfig
    sight = Mask.causal()
