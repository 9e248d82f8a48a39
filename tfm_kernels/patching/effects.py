"""What a forward does beside its result: what it writes into its module, and which random numbers it draws."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from .specimen import OF_TORCH, PLAIN, LeftAlone, attempt

_DEEP, _MANY = 8, 2000  # containers in one another, and things that one attribute holds, which are looked at
_BUCKETS = 1021  # sums that a tensor is known by: prime, so that no shift by rows keeps them all
_VALUES = (*PLAIN, complex, bytes, torch.device, torch.dtype)


def require_pure(
    copy: nn.Module,
    run: Callable[[], Any],
    others: Sequence[Callable[[], Any]],
    called: Iterable[nn.Module] = (),
    *,
    pictures: bool = False,
) -> None:
    """Sees that runs, in training and in evaluation, keep nothing in the module and draw by torch alone.

    Parameters are to be as they were before the first ``run``. All else may be made by it, as a table or a logger's
    level is, and is then to stay through the first of the ``others`` that does not fail, which has other numbers, and
    fewer. What the children that are ``called`` keep is theirs, but for their parameters. With ``pictures`` attributes
    may be written, and buffers that grow.

    Raises:
        LeftAlone: it does.
    """
    apart = {inner for child in called for inner in child.modules()}
    parameters = {name for name, _ in copy.named_parameters(remove_duplicate=False)}
    moved: list[bool] = []
    held = _Held(copy, apart, pictures)
    begun = held.look()

    def watched(run: Callable[[], Any]) -> None:
        before = _generators()
        with torch.set_grad_enabled(copy.training):
            run()
        moved.append(_generators() != before)

    for training in (True, False):
        copy.train(training)
        attempt(copy, lambda: watched(run))
        before = {**begun, **{name: state for name, state in held.look().items() if name not in parameters}}
        for other in others:
            if attempt(copy, lambda other=other: watched(other))[1] is None:  # type: ignore[misc]
                break
        if any(moved):
            raise LeftAlone("its forward draws numbers of another generator than torch's")
        written = held.written_since(before)
        if written is not None:
            raise LeftAlone(f"its forward writes {written}, which the fused one does not")


def others_than(x: Tensor) -> list[Tensor]:
    """Rows that are not those of a run, and fewer, for what it keeps of them to differ; and as many."""
    louder = 1.5 * x
    return [louder[..., 1:, :], louder] if x.dim() > 1 and x.shape[-2] > 1 else [louder]


class _Held:
    """What a module holds: its parameters, and but for those of children that are ``apart`` attributes and buffers."""

    def __init__(self, module: nn.Module, apart: set[nn.Module], pictures: bool) -> None:
        self.module, self.apart, self.pictures = module, apart, pictures
        self.alive: list[Any] = []  # whatever has been seen, lest another get its id
        self.left = 0  # of what one attribute holds, still to be looked at

    def written_since(self, before: dict[str, Any]) -> str | None:
        """The name of something that is not as it was, or is no more."""
        after = self.look()
        if self.pictures:
            return next((name for name, now in after.items() if _rewritten(before.get(name), now)), None)
        return next((name for name in {**after, **before} if before.get(name) != after.get(name)), None)

    def look(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, inner in self.module.named_modules():
            prefix = f"{name}." if name else ""
            held = dict(inner._parameters)
            if inner not in self.apart:
                held |= inner._buffers
                own = {} if self.pictures else inner.__dict__
                found |= {prefix + key: self._known_by(each) for key, each in own.items() if key not in OF_TORCH}
            found |= {prefix + key: self._known_by(each) for key, each in held.items() if each is not None}
        return found

    def _known_by(self, value: Any) -> Any:
        self.left = _MANY
        return self._state(value, _DEEP)

    def _state(self, value: Any, depth: int) -> Any:
        """Equal for what has not been written."""
        if isinstance(value, _VALUES):
            return value if value == value else "nan"  # noqa: PLR0124
        self.alive.append(value)
        self.left -= 1
        parts: Any = None
        if isinstance(value, Tensor):
            parts = _bits(value)
        elif self.left > 0 and depth > 0:
            with suppress(Exception):  # a container of somebody else's may want anything
                parts = [tuple(self._state(each, depth - 1) for each in part) for part in _parts(value)]
        return (id(value) if not isinstance(value, tuple) else tuple), parts


def _parts(value: Any) -> Iterator[tuple[Any, ...]]:
    """What a container or an object holds."""
    if isinstance(value, dict):
        yield from list(value.items())
    elif isinstance(value, (list, tuple, set, deque)):
        yield from [(each,) for each in value]
    elif "numpy" in sys.modules and isinstance(value, sys.modules["numpy"].ndarray):
        yield (value.tobytes(),)
    elif type(value).__module__ != "builtins" and not isinstance(value, type):
        yield from list(getattr(value, "__dict__", {}).items())
        for base in type(value).__mro__:
            slots = base.__dict__.get("__slots__", ())
            for slot in (slots,) if isinstance(slots, str) else slots:
                yield (slot, getattr(value, slot, None))


def _bits(tensor: Tensor) -> Any:
    """Where a tensor's numbers lie, how often they were written, and sums of them, which .data does not hide."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return None
    if tensor.is_nested or tensor.is_meta or tensor.is_quantized:
        return None
    numbers = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    if numbers.numel() % 8 == numbers.storage_offset() % 8 == 0:
        numbers = numbers.view(torch.int64)  # of which a sum is ten times as fast
    whole = numbers.numel() // _BUCKETS * _BUCKETS
    sums = numbers[:whole].view(-1, _BUCKETS).sum(0, dtype=torch.int64).tolist(), numbers[whole:].tolist()
    return tensor.shape, tensor.data_ptr(), None if tensor.is_inference() else tensor._version, sums


def _rewritten(before: Any, now: Any) -> bool:
    """Whether a tensor has other numbers in its old shape: one that grows, or is new, is a table of some kind."""
    (_, old), (_, new) = before or (None, None), now or (None, None)
    return old is not None and new is not None and old[0] == new[0] and old[-1] != new[-1]


def _generators() -> Any:
    numpy = sys.modules.get("numpy")
    others = () if numpy is None else numpy.random.get_state()[1:3]
    return random.getstate(), [each if isinstance(each, int) else each.tobytes() for each in others]
