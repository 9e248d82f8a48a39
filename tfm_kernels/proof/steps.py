"""Training steps: the same few of them by the float64 original, the original and the patched model.

SGD with momentum 0.9, weights kept in float64 and rounded to the model's dtype for each forward, as mixed precision
does. Not AdamW: it divides each gradient by its own size, and where the true gradient is 0 (a bias on attention's keys)
that turns rounding noise into full steps, in PyTorch as in anything else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .runs import SEED, Call, run
from .side_by_side import Originals

MOMENTUM = 0.9
STEP = 1e-3  # length of the first step, as a part of the length of all weights


@dataclass
class Path:
    """Where training led.

    Attributes:
        losses: "loss after step 1" -> the loss that the next forward gives.
        moves: parameter -> how far it went, float64.
    """

    losses: dict[str, Tensor] = field(default_factory=dict)
    moves: dict[str, Tensor] = field(default_factory=dict)


def train_all(
    originals: Originals,
    call: Call,
    count: int,
    rate: float,
    loss_fn: Callable[[Any], Tensor] | None,
    ignored: Mapping[str, Tensor],
    progress: Callable[[str], None],
) -> list[Path]:
    """The same steps by the float64 original, the original and the patched model."""
    paths = []
    for what, model, width, within in (
        ("float64", originals.models.exact, torch.float64, originals.exactly),
        ("original", originals.models.stock, None, originals.in_its_own_dtype),
        ("patched", originals.models.patched, None, nullcontext),
    ):
        tell = lambda stage, what=what: progress(f"{what}, {stage}")  # noqa: E731
        path = train(model, call.to(width), originals.dtype, count, rate, loss_fn, ignored, tell, within)
        paths.append(path)
    return paths


def learning_rate(model: nn.Module, gradients: Mapping[str, Tensor]) -> float:
    """The rate at which the first step is STEP times as long as the weights."""
    weights = {name: weight for name, weight in model.named_parameters() if name in gradients}
    norm = lambda tensors: math.sqrt(sum(float(t.detach().double().norm()) ** 2 for t in tensors))  # noqa: E731
    length = norm(gradients[name] for name in weights)
    return STEP * norm(weights.values()) / length if length else 0.0


def train(
    model: nn.Module,
    call: Call,
    dtype: torch.dtype,
    steps: int,
    rate: float,
    loss_fn: Callable[[Any], Tensor] | None,
    ignored: Mapping[str, Tensor],
    progress: Callable[[str], None],
    within: Callable[[], AbstractContextManager[None]],
) -> Path:
    """Takes ``steps`` steps; then the model's weights are put back."""
    path = Path()
    parameters = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    start = {name: weight.detach().double().clone() for name, weight in parameters.items()}  # float64 is no copy
    weights = {name: value.clone() for name, value in start.items()}
    speed = {name: torch.zeros_like(value) for name, value in start.items()}
    for step in range(steps + 1):
        progress(f"step {min(step + 1, steps)} of {steps}")
        done = run(
            model, call, dtype, loss_fn=loss_fn, ignored=lambda outputs: ignored, seed=SEED + step, within=within
        )
        if step > 0 and done.loss is not None:
            path.losses[f"loss after step {step}"] = done.loss.reshape(1)
        if step == steps:
            break
        with torch.no_grad():
            for name, weight in parameters.items():
                if name in done.gradients:
                    speed[name].mul_(MOMENTUM).add_(done.gradients[name].double())
                    weights[name].sub_(rate * speed[name])
                    weight.copy_(weights[name])
    with torch.no_grad():
        for name, weight in parameters.items():
            weight.copy_(start[name])
    path.moves = {name: weights[name] - start[name] for name in parameters if bool(speed[name].any())}
    return path
