"""The patched model called again and again without a graph: what one call leaves behind must not reach another.

First with other inputs of the same shapes, then with the inputs, then, in evaluation mode, with them once more. A cache
that is keyed by too little gives the first call's values to the second, whose outputs are judged by the rule of all
outputs; state that a call leaves behind changes the bits of the third; memory that is used again is overwritten, which
shows in the outputs of the first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..patching import swap
from .padding import LeftOut, observed
from .report import Row
from .runs import Call, Returned, differing, forward

AGAIN = "a second call with the same inputs gives other bits"
OVERWRITTEN = "a later call changes it, after it was returned"


@dataclass
class Calls:
    """The calls of one model, in order.

    Attributes:
        with_others: with other inputs; None where it takes none.
        first: with the inputs.
        again: with them once more; None in training mode.
        left_out: what packed execution left out of the call with the inputs.
        overwritten: names of outputs that were seen to change after they were returned.
    """

    with_others: Returned | None
    first: Returned
    again: Returned | None
    left_out: LeftOut
    overwritten: set[str] = field(default_factory=set)

    def look(self) -> None:
        """Notes which outputs have been overwritten by now."""
        for returned in (self.with_others, self.first, self.again):
            self.overwritten |= returned.overwritten() if returned is not None else set()

    def other_bits(self) -> set[str]:
        """Names of the outputs in which the second call differs from the first."""
        return set() if self.again is None else differing(self.first.copies, self.again.copies)


def call_repeatedly(model: nn.Module, call: Call) -> Calls:
    """Calls a model in the mode it is in: twice or thrice, without a graph."""
    others = altered(call)
    try:
        with swap.unnoted(model):
            before = None if others is None else forward(model, others)
    except Exception:  # inputs that we made up may be ones that the model refuses
        before = None
    with observed(model) as left_out:
        first = forward(model, call.to(None))
    return Calls(before, first, None if model.training else forward(model, call.to(None)), left_out)


def altered(call: Call) -> Call | None:
    """Other inputs of the same shapes: matrices and larger tensors rolled along their first axis of more than one.

    Every value in them is one that the model was given there. None where nothing changes.
    """
    changed = False

    def roll(value: object) -> object:
        nonlocal changed
        if not isinstance(value, Tensor) or value.dim() < 2 or value.numel() < 2:
            return value
        rolled = value.roll(1, next(axis for axis, size in enumerate(value.shape) if size > 1))
        changed = changed or not torch.equal(rolled, value)
        return rolled

    with torch.no_grad():
        args, kwargs = pytree.tree_map(roll, tuple(call.to(None).__dict__.values()))
    return Call(args, kwargs) if changed else None


def compare(patched: Calls, stock: nn.Module, call: Call) -> list[Row]:
    """One row for each output: whether repeated calls agree. An original that does not is no measure for it.

    The original is called only where the patched model differs.
    """
    other, overwritten = patched.other_bits(), patched.overwritten
    if other or overwritten:
        own = call_repeatedly(stock, call)
        own.look()
        other, overwritten = other - own.other_bits(), overwritten - own.overwritten
    rows = []
    for name, value in patched.first.copies.items():
        wrong = [told for told, names in ((AGAIN, other), (OVERWRITTEN, overwritten)) if name in names]
        size = math.inf if wrong else 0.0
        told = "; ".join(wrong) or "the same bits, call after call"
        rows.append(Row("output", "", f"{name}, called again", value.numel(), 0.0, size, 0.0, "form", told))
    return rows
