"""Only green cases are timed: the numeric contract on a case of the same branches, then agreement at full size."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..testing import ContractError, assert_contract
from .subject import Group

# Another function, not another rounding: sums in another order move a few of ffn's relu inputs across 0, and each takes
# a whole gradient with it (0.003 of the norm was seen in float32).
_AGREE = {"float32": 0.02, "bfloat16": 0.05, "float16": 0.05}


def refusal(group: Group, backend: str, device: str = "cpu") -> str | None:
    """None where the backend keeps the numeric contract on the group's proof case, else the judge's sentence."""
    subject = group.subject
    return _contract(subject.arguments, subject.proof(group.case), group.dtype, backend, group.kind == "train", device)


@functools.cache
def _contract(arguments: Any, case: Any, dtype: str, backend: str, backward: bool, device: str) -> str | None:
    if backend in ("reference", "aten"):
        return None  # measured by the contract, not judged; agreement at full size is asked of them too
    try:
        assert_contract(case.op, on(device, arguments(case, dtype)), backend, backward=backward)
    except ContractError as error:
        return str(error)
    return None


def disagreement(group: Group, ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> str | None:
    """None where ours is PyTorch's function in float32, judged by the Frobenius norm of the difference."""
    if not group.subject.comparable(group.case):
        return None
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        difference = ((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30)).item()
        if not difference <= _AGREE[group.dtype]:
            return f"result {index} differs from PyTorch's in float32 by {difference:.3g} of its norm"
    return None


def on(device: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name, their tensors (and whatever else has a device) on ``device``."""
    return {name: value.to(device) if hasattr(value, "to") else value for name, value in arguments.items()}


def flat(result: Any) -> tuple[Tensor, ...]:
    """A function's result as a tuple of tensors."""
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)
