"""What a forward does beside its result: what it writes into its module, and which random numbers it draws."""

from __future__ import annotations

import array
import functools
import itertools
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from .copying import in_closure
from .specimen import OF_TORCH, PLAIN, LeftAlone, attempt

_DEEP, _MANY = 8, 20_000  # containers in one another, and things that one attribute holds, which are looked at
_BUCKETS = 1021  # sums that a tensor is known by: prime, so that no shift by rows keeps them all
_VALUES = (*PLAIN, complex, bytes, torch.device, torch.dtype)
# of whose objects (loggers, contexts, locks, configurations) nobody reads what they note for themselves
_NOTES = frozenset({"logging", "torch", "contextlib", "threading", "_thread", "omegaconf"})


def require_pure(
    copy: nn.Module,
    runs: Sequence[Callable[[], Any]],
    called: Iterable[nn.Module] = (),
    *,
    pictures: bool = False,
) -> None:
    """Checks that the runs, in training and in evaluation mode, write nothing and draw by torch's generators alone.

    What the children that are ``called`` write is theirs, but for their parameters. With ``pictures`` attributes may be
    written, not what callables and generators in them hold, and buffers that grow.

    Raises:
        LeftAlone: one of them writes into the module, or draws random numbers from another generator.
    """
    held = _Held(copy, {inner for child in called for inner in child.modules()}, pictures)
    moved: list[bool] = []

    def watched(run: Callable[[], Any]) -> None:
        before = _generators()
        with torch.set_grad_enabled(copy.training):
            run()
        moved.append(_generators() != before)

    for training in (True, False):
        copy.train(training)
        held.begin()  # what train() itself writes, a fused layer's writes too
        for run in runs:
            attempt(copy, functools.partial(watched, run))
            held.note_made()
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
        self.seen: set[int] = set()  # in the attribute that is being looked at
        self.once: set[str] = set()  # what is computed once from the rest, when it is first read
        self.exact: set[str] = set()  # what may not be written at all, pictures or not
        self.into_modules = True
        self.before: dict[str, Any] = {}

    def begin(self) -> None:
        """Takes what the module holds now for what it held before the runs."""
        self.before = self._look()

    def note_made(self) -> None:
        """Takes in what a run has computed once: from now on writing into it counts."""
        inside = [] if self.pictures else [inner for inner in self.module.modules() if inner not in self.apart]
        if any(_is_computed_once(inner, key) for inner in inside for key in inner.__dict__):
            now = self._look()
            self.before |= {name: now[name] for name in self.once - self.before.keys() if name in now}

    def written(self) -> str | None:
        """The name of something that is not as it was, or is no more."""
        after = self._look()
        names = (name for name in {**after, **self.before} if name in self.before or name not in self.once)
        return next((name for name in names if self._differs(name, self.before.get(name), after.get(name))), None)

    def _differs(self, name: str, before: Any, now: Any) -> bool:
        if not self.pictures:
            return before != now
        if name not in self.exact:
            return _rewritten(before, now)
        return None not in (before, now) and _which(before) == _which(now) and before != now  # else it is another

    def _look(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, inner in self.module.named_modules():
            prefix = f"{name}." if name else ""
            held = dict(inner._parameters)
            if inner not in self.apart:
                held |= inner._buffers
                own = {} if isinstance(inner, torch.jit.ScriptModule) else inner.__dict__
                own = {key: each for key, each in own.items() if key not in OF_TORCH}
                if self.pictures:
                    own = {key: each for key, each in own.items() if _calls(each) or _is_generator(each)}
                    self.exact |= {prefix + key for key in own}
                found |= {prefix + key: self._known_by(each, modules=not self.pictures) for key, each in own.items()}
                self.once |= {prefix + key for key in own if _is_computed_once(inner, key)}
                shared = {} if self.pictures else _of_classes(inner)
                found |= {key: self._known_by(each, modules=False) for key, each in shared.items() if key not in found}
            found |= {prefix + key: self._known_by(each) for key, each in held.items() if each is not None}
        return found

    def _known_by(self, value: Any, *, modules: bool = True) -> Any:
        self.seen, self.into_modules = set(), modules
        return self._state(value, _DEEP)

    def _state(self, value: Any, depth: int) -> Any:
        """Equal for what has not been written."""
        if isinstance(value, _VALUES):
            with suppress(Exception):  # somebody else's number or text may want anything
                return value if type(value) in _VALUES and value == value else repr(value)
        self.alive.append(value)
        known = tuple if type(value) is tuple else id(value)
        if isinstance(value, nn.Module) and not self.into_modules:
            return known
        if isinstance(value, dict) and self.pictures:  # of what a callable keeps by its key: a cache, like a picture
            return known
        if id(value) in self.seen or len(self.seen) > _MANY or depth == 0:
            return known
        self.seen.add(id(value))
        if isinstance(value, Tensor):
            return known, _bits(value)
        with suppress(Exception):  # and a container too
            if isinstance(value, (list, tuple, dict, set, deque)) and len(value) > _MANY:
                return known, len(value)
            parts = [part for part in _parts(value) if not (self.pictures and _is_table(part))]
            return known, [tuple(self._state(each, depth - 1) for each in part) for part in parts]
        return known


def _which(state: Any) -> Any:
    """Which object a state is of."""
    return state[0] if isinstance(state, tuple) else state


def _is_table(part: tuple[Any, ...]) -> bool:
    """Whether it is an attribute, by its name, that holds a tensor, or none yet: a mask that is made when needed."""
    return len(part) == 2 and isinstance(part[0], str) and (part[1] is None or isinstance(part[1], Tensor))


def _own(value: Any) -> dict[str, Any]:
    """An object's attributes, but for those that are computed once from the others, and a module's mode."""

    def skipped(key: str) -> bool:
        return _is_computed_once(value, key) or (key == "training" and isinstance(value, nn.Module))

    return {key: each for key, each in getattr(value, "__dict__", {}).items() if not skipped(key)}


def _of_classes(module: nn.Module) -> dict[str, Any]:
    """What the classes of a module hold, but for functions and torch's."""
    own = (base for base in type(module).__mro__ if base.__module__.partition(".")[0] not in ("torch", "builtins"))
    held = ((base, key, value) for base in own for key, value in vars(base).items() if not key.startswith("__"))
    return {f"{base.__name__}.{key}": value for base, key, value in held if not hasattr(type(value), "__get__")}


def _is_computed_once(value: Any, key: str) -> bool:
    return isinstance(getattr(type(value), key, None), functools.cached_property)


def _parts(value: Any) -> Iterator[tuple[Any, ...]]:
    """What a container or an object holds."""
    if isinstance(value, dict):
        yield from list(value.items())
    elif isinstance(value, (list, tuple, set, deque)):
        yield from [(each,) for each in value]
    elif "numpy" in sys.modules and isinstance(value, sys.modules["numpy"].ndarray):
        yield (hash(value.tobytes()),)
    elif isinstance(value, random.Random):
        yield (hash(value.getstate()),)
    elif isinstance(value, (itertools.count, array.array)):
        yield (repr(value),)
    elif isinstance(value, functools.partial):
        yield value.func, value.args, value.keywords
    elif isinstance(value, types.FunctionType):
        yield value.__defaults__, value.__kwdefaults__
        yield from ((key, each) for key, each in value.__dict__.items() if not key.startswith("__"))  # torch's notes
        yield tuple(in_closure(value))
        named = (value.__globals__.get(name) for name in _names(value.__code__))
        yield tuple(each for each in named if not isinstance(each, (types.ModuleType, type, types.FunctionType)))
    elif isinstance(value, (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)):
        yield (value.__self__,)
    elif "numpy" in sys.modules:
        yield _numpy_generator(value)
    package = type(value).__module__.partition(".")[0]
    if package == "builtins" or isinstance(value, type) or (package in _NOTES and not isinstance(value, nn.Module)):
        return
    yield from _own(value).items()
    for base in type(value).__mro__:
        slots = base.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            private = slot.startswith("__") and not slot.endswith("__")
            yield (slot, getattr(value, f"_{base.__name__.lstrip('_')}{slot}" if private else slot, None))


def _names(code: types.CodeType) -> list[str]:
    """What a function finds in its file, and the functions and comprehensions that are written in it."""
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return [*code.co_names, *(name for each in inner for name in _names(each))]


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


def _numpy_generator(value: Any) -> tuple[Any, ...]:
    """The state of a generator of NumPy's, () of anything else."""
    drawn = sys.modules["numpy"].random
    if isinstance(value, drawn.RandomState):
        return (repr(value.get_state(legacy=False)),)
    return (repr(value.bit_generator.state),) if isinstance(value, drawn.Generator) else ()


def _calls(value: Any) -> bool:
    """Whether it is a callable, or some in a row."""
    return callable(value) or (isinstance(value, (list, tuple)) and any(map(callable, value)))


def _is_generator(value: Any) -> bool:
    return isinstance(value, random.Random) or ("numpy" in sys.modules and bool(_numpy_generator(value)))


def _generators() -> Any:
    numpy = sys.modules.get("numpy")
    others = () if numpy is None else numpy.random.get_state()[1:3]
    return random.getstate(), [each if isinstance(each, int) else each.tobytes() for each in others]
