"""What a masked language model has to predict: BERT's 15 % of the tokens, by the rule 80 / 10 / 10."""

from __future__ import annotations

import torch
from torch import Tensor

from .loss import IGNORED


def mask_tokens(
    ids: Tensor, *, vocab_size: int, mask_id: int, first_ordinary: int, random: torch.Generator, share: float = 0.15
) -> tuple[Tensor, Tensor]:
    """Hides tokens and says which they were.

    Each ordinary token is chosen with probability ``share``; of the chosen, 80 % become ``mask_id``, 10 % an ordinary
    token drawn evenly, and 10 % stay. Special tokens (numbers below ``first_ordinary``) are never chosen or drawn.

    Args:
        ids: (...), int64.
        vocab_size: how many tokens there are.
        mask_id: the token that stands for a hidden one.
        first_ordinary: how many special tokens there are; they have the lowest numbers.
        random: decides everything; on the CPU, as ``ids``.
        share: of the ordinary tokens that are chosen, 0 to 1.

    Returns:
        (inputs, targets), int64 as ``ids``; a target is the token itself where it was chosen, else IGNORED.

    Source: Devlin et al. 2019, arXiv:1810.04805, section 3.1 and appendix A.1.
    """
    chosen = (torch.rand(ids.shape, generator=random) < share) & (ids >= first_ordinary)
    how = torch.rand(ids.shape, generator=random)
    drawn = torch.randint(first_ordinary, max(vocab_size, first_ordinary + 1), ids.shape, generator=random)
    inputs = torch.where(chosen & (how < 0.8), mask_id, ids)
    inputs = torch.where(chosen & (how >= 0.9), drawn, inputs)
    return inputs, torch.where(chosen, ids, IGNORED)
