"""Learning rates by step: Noam, cosine and constant, all with warm-up, as pure functions of the step.

A factor multiplies the learning rate of the configuration. ``step`` counts the updates done before, from 0, as
``torch.optim.lr_scheduler.LambdaLR`` counts: ``LambdaLR(optimizer, functools.partial(cosine, steps=1000))``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

SCHEDULES = ("noam", "cosine", "constant")


def noam(step: int, *, d_model: int, warmup: int) -> float:
    """d_model^-0.5 * min(s^-0.5, s * warmup^-1.5) with s = step + 1.

    The rate itself where the learning rate is 1: it grows linearly for ``warmup`` updates, then falls with the inverse
    square root of the step.

    Args:
        step: updates done before, >= 0.
        d_model: width of the model, >= 1.
        warmup: updates until the peak, >= 1.

    Returns:
        The factor, > 0.

    Source: Vaswani et al. 2017, arXiv:1706.03762, equation 3.

    Example:
        >>> noam(3999, d_model=512, warmup=4000) == 512**-0.5 * 4000**-0.5
        True
    """
    now = step + 1
    return d_model**-0.5 * min(now**-0.5, now * warmup**-1.5)


def cosine(step: int, *, steps: int, warmup: int = 0, floor: float = 0.1) -> float:
    """Grows linearly to 1 in ``warmup`` updates, then falls along half a cosine to ``floor`` at update ``steps``.

    Args:
        step: updates done before, >= 0.
        steps: updates in all; from there on the factor is ``floor``.
        warmup: updates of growth, 0 for none.
        floor: the last factor, 0 to 1.

    Example:
        >>> [cosine(step, steps=4, floor=0.0) for step in (0, 2, 4)]
        [1.0, 0.5, 0.0]
    """
    if step < warmup:
        return (step + 1) / warmup
    part = min(1.0, (step - warmup) / max(1, steps - warmup))
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * part))


def constant(step: int, *, warmup: int = 0) -> float:
    """Grows linearly to 1 in ``warmup`` updates and stays there.

    Example:
        >>> [constant(step, warmup=2) for step in range(3)]
        [0.5, 1.0, 1.0]
    """
    return min(1.0, (step + 1) / warmup) if warmup else 1.0


def schedule(name: str, *, steps: int, warmup: int, d_model: int) -> Callable[[int], float]:
    """The factor as a function of the step alone.

    Args:
        name: "noam", "cosine" or "constant".
        steps: updates of the whole run, for cosine.
        warmup: updates of growth; Noam needs at least 1.
        d_model: width of the model, for Noam.

    Raises:
        ValueError: the name is none of them, or Noam has no warm-up.
    """
    if name == "noam":
        if warmup < 1:
            raise ValueError(f"schedule: warmup must be >= 1 for noam, got {warmup}")
        return partial(noam, d_model=d_model, warmup=warmup)
    if name == "cosine":
        return partial(cosine, steps=steps, warmup=warmup)
    if name == "constant":
        return partial(constant, warmup=warmup)
    raise ValueError(f"schedule: name must be one of {', '.join(SCHEDULES)}, got {name!r}")
