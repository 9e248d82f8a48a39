"""How one token is drawn from scores."""

from __future__ import annotations

import torch
from torch import Tensor


def shaped(scores: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None) -> Tensor:
    """The probabilities that sampling draws from, in this order: temperature, top-k, top-p.

    Args:
        scores: (R, V), logits.
        temperature: the scores are divided by it.
        top_k: only the k most probable tokens stay; None or k >= V keeps all.
        top_p: of what is left, only the fewest most probable tokens stay that together reach probability p.

    Returns:
        (R, V) float32 (float64 for float64), each row of sum 1. Among equals the lower token number stays.
    """
    wide = torch.float64 if scores.dtype == torch.float64 else torch.float32
    limits = torch.finfo(wide)  # a temperature beyond them would be 0 or an infinity there, and all of p NaN
    scores = scores.to(wide) - scores.amax(-1, keepdim=True)  # or a small temperature would make infinities
    p = (scores / min(max(temperature, limits.tiny), limits.max)).softmax(-1)
    if top_k is None and top_p is None:
        return p
    ranked, order = p.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        ranked[:, top_k:] = 0.0
    if top_p is not None:
        ranked = ranked / ranked.sum(-1, keepdim=True)
        before = ranked.cumsum(-1) - ranked  # the most probable token has 0 before it and always stays
        ranked = ranked.masked_fill(before >= top_p, 0.0)
    ranked = ranked / ranked.sum(-1, keepdim=True)
    return torch.zeros_like(p).scatter(-1, order, ranked)
