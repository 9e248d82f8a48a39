"""What a trial finds of a class beyond its numbers: the calls that stay its forward's, and the gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._autocast import autocast_dtype
from .specimen import attempt, differ

_NARROW = (torch.float16, torch.bfloat16)
_MANY = 2047  # numbers of a gradient that are looked at


@dataclass
class Found:
    """What the fused code leaves to the forward of a module.

    Attributes:
        narrow: whether in 16 bits the forward gives another dtype than the fused code.
        autocast: the same under autocast.
        masks: the forms (``form``) of the masks that were tried and right; None: none was tried.
    """

    narrow: bool = False
    autocast: bool = False
    masks: frozenset[tuple[int, bool]] | None = None

    def leaves(self, x: Tensor, mask: Tensor | None = None) -> bool:
        """Whether a call of these is the forward's."""
        if self.narrow and x.dtype in _NARROW:
            return True
        if self.autocast and autocast_dtype(x.device) is not None:
            return True
        return mask is not None and self.masks is not None and form(mask) not in self.masks

    def look_at_dtypes(self, copy: nn.Module, runs: Callable[[bool], Iterable[Callable[[], Any]]]) -> None:
        """Notes where the forward and what is declared give results of different dtypes.

        Under autocast, by ``runs(False)``, and then in bfloat16, by ``runs(True)``: ``copy`` stays converted.
        """
        self.autocast = _differ_in_dtype(copy, runs(False), torch.bfloat16)
        _, refused = attempt(copy, copy.bfloat16)
        self.narrow = refused is None and _differ_in_dtype(copy, runs(True), None)


def form(mask: Tensor) -> tuple[int, bool]:
    """How many axes a mask has, and whether it has one for each head."""
    return mask.dim(), bool(mask.dim() == 4 and mask.shape[1] > 1)  # a number that is not known yet has no hash


def _differ_in_dtype(copy: nn.Module, runs: Iterable[Callable[[], Any]], autocast: torch.dtype | None) -> bool:
    (got, refused), (wanted, wrong) = (attempt(copy, run, autocast=autocast) for run in runs)
    return refused is None and wrong is None and _dtypes(got) != _dtypes(wanted)


def _dtypes(result: Any) -> list[torch.dtype]:
    return [part.dtype for part in (result if isinstance(result, (tuple, list)) else (result,)) if part is not None]


def require_gradients(
    op: str, cls: type[nn.Module], copy: nn.Module, inputs: Iterable[Tensor], runs: Iterable[Callable[[], Any]]
) -> None:
    """Raises where the runs, of the forward and of what is declared, give ``inputs`` or parameters other gradients.

    Not where one of them has none.
    """
    leaves = [*{id(t): t.requires_grad_() for t in inputs}.values(), *copy.parameters()]
    leaves = [leaf for leaf in leaves if leaf.requires_grad]
    got, wanted = (attempt(copy, lambda run=run: _gradients(run, leaves))[0] for run in runs)  # type: ignore[misc]
    if got is None or wanted is None:
        return
    if len(got) == len(wanted):
        largest = max((float(gradient.abs().max()) for gradient in wanted if gradient.numel()), default=0.0)
        least = max(1e-2 * largest, 1e-30)  # those of the keys' bias are 0, but for rounding
        if not any(differ(*pair, 1e-3, least) for pair in zip(got, wanted, strict=True)):
            return
    raise ValueError(
        f"{op}: {cls.__name__}.forward must pass on the gradients of what is declared, got others, which detach() and "
        "no_grad() may have cut"
    )


@torch.enable_grad()
def _gradients(run: Callable[[], Any], leaves: list[Tensor]) -> tuple[Tensor, ...]:
    """Some numbers of each leaf's; of none where the result has no graph."""
    result = run()
    if not result.requires_grad:
        return ()
    weights = torch.linspace(0.5, 1.5, result.numel(), device=result.device, dtype=result.dtype)
    found = torch.autograd.grad((result * weights.view_as(result)).sum(), leaves, materialize_grads=True)
    return tuple(each.flatten()[:: max(1, each.numel() // _MANY)].clone() for each in found)
