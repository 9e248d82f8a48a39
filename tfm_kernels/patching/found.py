"""What a trial finds of a class beyond its numbers: the calls that stay its forward's, and what it does besides."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._autocast import autocast_dtype
from .specimen import attempt, differ

_NARROW = (torch.float16, torch.bfloat16)
_MANY = 2047  # numbers of a gradient that are looked at
_OF_TORCH = frozenset(nn.Module().__dict__)


@dataclass
class Found:
    """What the fused code leaves to the forward of a class, from all its modules that were tried.

    Attributes:
        wide: whether in 16 bits, or under autocast, the forward gives another dtype than the fused code.
        axes: the numbers of axes of the masks that were tried and right; None: none was tried.
    """

    wide: bool = False
    axes: frozenset[int] | None = None

    def leaves(self, x: Tensor, mask: Tensor | None = None) -> bool:
        """Whether a call of these is the forward's."""
        if self.wide and (x.dtype in _NARROW or autocast_dtype(x.device) is not None):
            return True
        return mask is not None and self.axes is not None and mask.dim() not in self.axes

    def look_at_dtypes(
        self, copy: nn.Module, forward: Callable[[], Any], written: Callable[[], Any], *, autocast: bool
    ) -> None:
        """Sees whether two runs of a copy give tensors of the same dtypes, ``autocast`` to bfloat16 or not."""
        dtype = torch.bfloat16 if autocast else None
        (got, refused), (wanted, wrong) = (attempt(copy, run, autocast=dtype) for run in (forward, written))
        if refused is None and wrong is None and _dtypes(got) != _dtypes(wanted):
            self.wide = True


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
    least = 1e-2 * max(
        float(gradient.abs().max()) for gradient in wanted if gradient.numel()
    )  # of a key's bias it is 0
    if any(differ(*pair, 1e-3, least) for pair in zip(got, wanted, strict=True)):
        raise ValueError(
            f"{op}: {cls.__name__}.forward must pass on the gradients of what is declared, got others, which detach() "
            "and no_grad() may have cut"
        )


@torch.enable_grad()
def _gradients(run: Callable[[], Any], leaves: list[Tensor]) -> tuple[Tensor, ...]:
    result = run()
    weights = torch.linspace(0.5, 1.5, result.numel(), device=result.device, dtype=result.dtype)
    found = torch.autograd.grad((result * weights.view_as(result)).sum(), leaves, materialize_grads=True)
    return tuple(each.flatten()[:: max(1, each.numel() // _MANY)] for each in found)


def why_not_pure(copy: nn.Module, run: Callable[[], Any]) -> str | None:
    """None where a run in training and one in evaluation keep nothing in the module; part of a sentence."""
    for training in (True, False):
        copy.train(training)
        before = _state(copy)
        attempt(copy, run)
        changed = [name for name, state in _state(copy).items() if before.get(name) != state]
        if changed:
            return f"its forward writes {changed[0]}, which the fused one does not"
    return None


def _state(module: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, inner in module.named_modules():
        prefix = f"{name}." if name else ""
        found |= {prefix + key: id(value) for key, value in inner.__dict__.items() if key not in _OF_TORCH}
        held = ((key, each) for key, each in inner._buffers.items() if each is not None)
        found |= {prefix + key: (id(each), None if each.is_inference() else each._version) for key, each in held}
    return found


def draws_outside_torch(copy: nn.Module, run: Callable[[], Any]) -> bool:
    """Whether a run draws random numbers of Python's or NumPy's, which no seed of torch decides."""
    moved = []

    def watched() -> None:
        before = _generators()
        run()
        moved.append(_generators() != before)

    attempt(copy, watched)
    return any(moved)


def _generators() -> Any:
    numpy = sys.modules.get("numpy")
    others = () if numpy is None else numpy.random.get_state()[1:3]
    return random.getstate(), [each if isinstance(each, int) else each.tobytes() for each in others]
