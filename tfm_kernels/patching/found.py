"""What a trial finds of a class beyond its numbers: the calls that stay its forward's, and what it does besides."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._autocast import autocast_dtype
from .specimen import OF_TORCH, PLAIN, LeftAlone, attempt, differ

_NARROW = (torch.float16, torch.bfloat16)
_MANY = 2047  # numbers of a gradient that are looked at


@dataclass
class Found:
    """What the fused code leaves to the forward of a module.

    Attributes:
        narrow: whether in 16 bits the forward gives another dtype than the fused code.
        autocast: the same under autocast.
        axes: the numbers of axes of the masks that were tried and right; None: none was tried.
    """

    narrow: bool = False
    autocast: bool = False
    axes: frozenset[int] | None = None

    def leaves(self, x: Tensor, mask: Tensor | None = None) -> bool:
        """Whether a call of these is the forward's."""
        if self.narrow and x.dtype in _NARROW:
            return True
        if self.autocast and autocast_dtype(x.device) is not None:
            return True
        return mask is not None and self.axes is not None and mask.dim() not in self.axes

    def look_at_dtypes(self, copy: nn.Module, runs: Callable[[bool], Iterable[Callable[[], Any]]]) -> None:
        """Sees whether the runs, of the forward and of what is declared, give other dtypes than one another.

        Under autocast, and in bfloat16, which the copy then stays: ``runs`` are asked for anew, and told so.
        """
        self.autocast = _differ_in_dtype(copy, runs(False), torch.bfloat16)
        _, refused = attempt(copy, copy.bfloat16)
        self.narrow = refused is None and _differ_in_dtype(copy, runs(True), None)


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


def require_pure(
    copy: nn.Module, run: Callable[[], Any], called: Iterable[nn.Module] = (), *, pictures: bool = False
) -> None:
    """Sees that a run, in training and in evaluation, keeps nothing in the module and draws by torch alone.

    What the children that are ``called`` keep is theirs, but for their parameters. With ``pictures`` attributes may be
    written, and buffers that grow.

    Raises:
        LeftAlone: it does.
    """
    apart = {inner for child in called for inner in child.modules()}
    moved, held = [], _Held(copy, apart, pictures)

    def watched() -> None:
        before = _generators()
        with torch.set_grad_enabled(copy.training):
            run()
        moved.append(_generators() != before)

    for training in (True, False):
        copy.train(training)
        attempt(copy, watched)
        if any(moved):
            raise LeftAlone("its forward draws numbers of another generator than torch's")
        written = held.written()
        if written is not None:
            raise LeftAlone(f"its forward writes {written}, which the fused one does not")


class _Held:
    """What a module holds: its parameters, and but for those of children that are ``apart`` attributes and buffers."""

    def __init__(self, module: nn.Module, apart: set[nn.Module], pictures: bool) -> None:
        self.module, self.apart, self.pictures = module, apart, pictures
        self.alive: list[Any] = []  # whatever has been seen, lest another get its id
        self.before = self._look()

    def written(self) -> str | None:
        """The name of something that is not as it was, or is no more."""
        after = self._look()
        if self.pictures:
            return next((name for name, now in after.items() if _rewritten(self.before.get(name), now)), None)
        return next((name for name in {**after, **self.before} if self.before.get(name) != after.get(name)), None)

    def _look(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, inner in self.module.named_modules():
            prefix = f"{name}." if name else ""
            held = dict(inner._parameters)
            if inner not in self.apart:
                held |= inner._buffers
                own = {} if self.pictures else inner.__dict__
                found |= {prefix + key: self._state(each) for key, each in own.items() if key not in OF_TORCH}
            found |= {prefix + key: self._state(each) for key, each in held.items() if each is not None}
        return found

    def _state(self, value: Any, depth: int = 3) -> Any:
        """Equal for what has not been written."""
        if isinstance(value, PLAIN):
            return value
        self.alive.append(value)
        parts: Any = None
        if isinstance(value, Tensor):
            parts = _bits(value)
        elif isinstance(value, dict):
            parts = list(value.items())
        elif isinstance(value, (list, tuple, set, deque)):
            parts = list(value)
        elif type(value).__module__ != "builtins" and not isinstance(value, (nn.Module, type)):
            parts = list(getattr(value, "__dict__", {}).items())
        if isinstance(parts, list):
            parts = [self._state(each, depth - 1) for each in parts] if depth else len(parts)
        return (id(value) if not isinstance(value, tuple) else tuple), parts


def _bits(tensor: Tensor) -> Any:
    """Where a tensor's numbers lie, how often they were written, and a sum of them, which .data does not hide."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return None
    if tensor.is_nested or tensor.is_meta or tensor.is_quantized:
        return None
    numbers = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    if numbers.numel() % 8 == numbers.storage_offset() % 8 == 0:
        numbers = numbers.view(torch.int64)  # of which a sum is ten times as fast
    total = int(numbers.sum(dtype=torch.int64))
    return tensor.shape, tensor.data_ptr(), None if tensor.is_inference() else tensor._version, total


def _rewritten(before: Any, now: Any) -> bool:
    """Whether a tensor has other numbers in its old shape: one that grows, or is new, is a table of some kind."""
    (_, old), (_, new) = before or (None, None), now or (None, None)
    return old is not None and new is not None and old[0] == new[0] and old[-1] != new[-1]


def _generators() -> Any:
    numpy = sys.modules.get("numpy")
    others = () if numpy is None else numpy.random.get_state()[1:3]
    return random.getstate(), [each if isinstance(each, int) else each.tobytes() for each in others]
