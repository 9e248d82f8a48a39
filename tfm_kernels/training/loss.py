"""The loss of all four tasks: cross-entropy with label smoothing, as a sum, so that any split of a batch adds up."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

IGNORED = -100  # a target that no loss and no accuracy counts: padding, and what a masked LM need not predict


def cross_entropy(logits: Tensor, targets: Tensor, *, smoothing: float = 0.0) -> Tensor:
    """sum over counted targets of -sum_v q_v log softmax(logits)_v, q = (1 - smoothing) onehot + smoothing / V.

    Args:
        logits: (..., V), any floating type; the softmax is in float32, or float64 for float64.
        targets: (...), int64 in [0, V), or IGNORED.
        smoothing: share of the probability that is spread over all V classes, 0 to 1.

    Returns:
        The sum, a scalar; 0 where every target is IGNORED. Divide by ``counted(targets)`` for the mean.

    Source: Szegedy et al. 2016, arXiv:1512.00567, section 7.

    Example:
        >>> cross_entropy(torch.zeros(1, 3, 4), torch.tensor([[0, 3, -100]])) / torch.tensor(4.0).log()
        tensor(2.)
    """
    flat = logits.reshape(-1, logits.shape[-1])
    flat = flat if flat.dtype.itemsize >= 4 else flat.float()
    return F.cross_entropy(flat, targets.reshape(-1), ignore_index=IGNORED, label_smoothing=smoothing, reduction="sum")


def counted(targets: Tensor) -> Tensor:
    """How many targets are counted, a scalar int64."""
    return (targets != IGNORED).sum()


def correct(logits: Tensor, targets: Tensor) -> Tensor:
    """How many counted targets have the largest logit, a scalar int64. Shapes as in ``cross_entropy``."""
    return ((logits.argmax(-1) == targets) & (targets != IGNORED)).sum()
