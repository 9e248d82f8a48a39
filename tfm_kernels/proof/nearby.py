"""Gradients that fail are measured again at points nearby: a kink makes them jump, a defect is there at every point.

Where a hidden value lies within rounding of ReLU's kink, its derivative is 1 for the one program and 0 for the other,
and all gradients further down change by what goes through that unit. In a small model few units decide so: the error
of the original is then one draw from a distribution with a long tail, and the patched model's another. Measured on a
T5 of two layers and 64 features in float16: in a third of the models some gradient had 2 to 30 times the original's
error, as often one way as the other, and none had where GELU took ReLU's place. A large model is no better off: of a
TransformerEncoder of torch.nn's default activation, ReLU, 6 layers of 512 and 2048 features, 1,000 tokens, float32, a
unit or two fall to another side, and one of a million weighs 2e-3 where all else is right to 3e-7. So it is with whole
models, with their layers fed alone, and with steps of training.

All three models move to the same few points nearby, weights (1 + 2 u N(0, 1)), rounded, and a row that fails is
judged by the median of what the original's errors allow, and by the least error of the patched model. Were both draws
from one distribution, all of the patched ones would hardly lie above the middle of the original's; a defect's do.
Once all rows pass so at two points or more, no others are asked. Outputs are not measured again: they do not jump.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from ..testing.rounding import rounding
from .report import Row
from .runs import SEED
from .side_by_side import Models

POINTS = 6  # besides the model's own weights, at most
_FEWEST = 2  # and at least


def judged_again(
    rows: list[Row],
    models: Models,
    dtype: torch.dtype,
    compare: Callable[[], list[Row]],
    tell: Callable[[str], None],
) -> list[Row]:
    """The rows, those that fail by what was found nearby.

    Args:
        rows: as they were judged.
        models: moved together, and put back.
        dtype: what is judged.
        compare: gives such rows of the models as they are.
        tell: told of each point.
    """
    failed = [row for row in rows if not row.passed]
    if not failed or any(row.rule != "size" for row in failed):
        return rows
    found = [[row] for row in rows]
    for point in range(POINTS):
        tell(f"gradients again, nearby, {point + 1} of {POINTS}")
        with _moved(models, dtype, SEED + point):
            there = {(row.kind, row.module, row.tensor): row for row in compare()}
        for each in found:
            row = each[0]
            each += [there[key] for key in [(row.kind, row.module, row.tensor)] if key in there]
        judged = [_together(each) for each in found]
        if point + 1 >= _FEWEST and all(row.passed for row in judged):
            break
    return judged


def _together(points: list[Row]) -> Row:
    """A row that failed, by what was found at all points; one that passed as it is."""
    if points[0].passed or len(points) == 1:
        return points[0]
    stock, allowed = (statistics.median(getattr(row, name) for row in points) for name in ("stock", "allowed"))
    patched = min(row.patched for row in points)
    return replace(
        points[0], stock=stock, patched=patched, allowed=allowed, detail=f"the least at {len(points)} points"
    )


@contextmanager
def _moved(models: Models, dtype: torch.dtype, seed: int) -> Iterator[None]:
    """All three models at one point nearby, the same to the bit; then where they were."""
    parameters = [dict(model.named_parameters()) for model in (models.stock, models.exact, models.patched)]
    generator = torch.Generator().manual_seed(seed)
    kept = {name: weight.detach().clone() for name, weight in parameters[0].items()}
    try:
        for name, weight in kept.items():
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float32).to(weight.device)
            moved = (weight.double() * (1.0 + 2.0 * rounding(dtype).unit * noise)).to(weight.dtype)
            _set(parameters, name, moved)
        yield
    finally:
        for name, weight in kept.items():
            _set(parameters, name, weight)


def _set(parameters: list[dict[str, torch.nn.Parameter]], name: str, value: torch.Tensor) -> None:
    with torch.no_grad():
        for each in parameters:
            each[name].copy_(value)
