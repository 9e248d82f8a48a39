"""A call like one before is not planned again: what its launcher did is recorded once, and then repeated without it.

A launcher checks a call, plans its launches and binds their arguments in Python, which takes longer than a small kernel
runs. All of it follows from what the call's key holds (dtypes, shapes, strides, where tensors begin within 16 bytes,
which of them are the same, numbers) and not from what the tensors hold. So the second call of a key is recorded: which
tensors it makes, which of PyTorch's operators it calls and which kernels it launches with what. Later ones make the
same tensors, call the same operators and launch the same kernels, in the same order.

A launcher that does what cannot be repeated, such as reading a tensor's values, is always called.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver

from . import _launch

LIMIT = 4096  # keys; then all are forgotten: a program that grows its sequences token by token must not fill memory
_INTERPRETED = triton.knobs.runtime.interpret  # as the kernels were when they were made
_EMPTY = frozenset(
    (
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_strided.default,
        torch.ops.aten.new_empty.default,
        torch.ops.aten.new_empty_strided.default,
        torch.ops.aten.empty_like.default,
    )
)
# What a mode of torch's changes is the process': a thread that enters another one meanwhile would leave it changed
_recording = threading.Lock()
SEEN, REFUSED = "seen", "refused"  # a key met once, and one whose call cannot be repeated
Values = list[Any]  # of one call: its arguments, then the tensors that were made on the way


class Part(NamedTuple):
    """A tensor as a view of the value at ``place``; ``begin`` counts elements from that value's first."""

    place: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    begin: int

    def of(self, values: Values) -> Tensor:
        """The view."""
        root = values[self.place]
        return root.as_strided(self.size, self.stride, root.storage_offset() + self.begin)


class Whole(NamedTuple):
    """The value at ``place`` itself."""

    place: int

    def of(self, values: Values) -> Any:
        """The value."""
        return values[self.place]


Source = Part | Whole


@dataclass
class Make:
    """Makes an empty tensor, the next value."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    takes: Sequence[tuple[int, Source]] = ()
    makes: int = 1  # values

    def step(self) -> Callable[[Values], None]:
        """What does it."""
        size, stride, dtype, device = self.size, self.stride, self.dtype, self.device
        make = torch.empty_strided
        return lambda values: values.append(make(size, stride, dtype=dtype, device=device))


@dataclass
class Operate:
    """Calls one of PyTorch's operators, whose new tensors are the next values."""

    operator: Any
    leaves: list[Any]  # of its arguments, None where it takes a source
    takes: list[tuple[int, Source]]  # leaf -> source
    tree: Any
    new: list[int]  # which of its results are values

    @property
    def makes(self) -> int:
        """Values."""
        return len(self.new)

    def step(self) -> Callable[[Values], None]:
        """What does it."""

        def operate(values: Values) -> None:
            leaves = self.leaves.copy()
            for at, source in self.takes:
                leaves[at] = source.of(values)
            args, kwargs = tree_unflatten(leaves, self.tree)
            results, _ = tree_flatten(self.operator(*args, **kwargs))
            values.extend(results[number] for number in self.new)

        return operate


@dataclass
class Start:
    """Starts a kernel."""

    runner: Callable[..., Any]
    arguments: list[Any]  # None where it takes a source
    takes: list[tuple[int, Source]]  # argument -> source
    makes: int = 0  # values

    def step(self) -> Callable[[Values], None]:
        """What does it."""
        runner, arguments = self.runner, self.arguments
        whole = [(at, source.place) for at, source in self.takes if isinstance(source, Whole)]
        parts = [(at, source) for at, source in self.takes if isinstance(source, Part)]

        def start(values: Values) -> None:
            given = arguments.copy()
            for at, place in whole:
                given[at] = values[place]
            for at, part in parts:
                given[at] = part.of(values)
            runner(*given)

        return start


@dataclass
class Record:
    """What a call did, in its order, and where its results are."""

    count: int  # arguments
    steps: list[Make | Operate | Start] = field(default_factory=list)
    results: list[Source] = field(default_factory=list)

    def in_place(self) -> None:
        """Makes results as they are returned, where nothing but kernels, which see no strides, have met them."""
        makes: dict[int, Make] = {}
        place = self.count
        met: defaultdict[int, int] = defaultdict(int)
        for step in self.steps:
            if isinstance(step, Make):
                makes[place] = step
            place += step.makes
            for _, source in step.takes:
                met[source.place] += not (isinstance(step, Start) and isinstance(source, Whole))
        for source in self.results:
            met[source.place] += 1
        for number, source in enumerate(self.results):
            make = makes.get(source.place)
            if make is None or met[source.place] > 1 or not isinstance(source, Part) or source.begin:
                continue
            if _extent(source.size, source.stride) == _extent(make.size, make.stride):
                make.size, make.stride, self.results[number] = source.size, source.stride, Whole(source.place)

    def program(self) -> list[Callable[[Values], None]]:
        """The steps; a value is let go where the last of them has met it."""
        last: dict[int, int] = {}
        place = self.count
        for number, step in enumerate(self.steps):
            for made in range(place, place + step.makes):
                last[made] = number
            place += step.makes
            for _, source in step.takes:
                if source.place >= self.count:
                    last[source.place] = number
        for source in self.results:
            last.pop(source.place, None)
        gone = defaultdict(list)
        for place, number in last.items():
            gone[number].append(place)
        program = []
        for number, step in enumerate(self.steps):
            program.append(step.step())
            if number in gone and number + 1 < len(self.steps):
                program.append(_let_go(gone[number]))
        return program


def _extent(size: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last of a tensor, 0 of none."""
    return 0 if 0 in size else 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))


def _let_go(places: Sequence[int]) -> Callable[[Values], None]:
    def let_go(values: Values) -> None:
        for place in places:
            values[place] = None

    return let_go


class Recorder(TorchDispatchMode):
    """Inside, what a launcher does is recorded.

    Whatever tensor it meets is an argument, a tensor made on the way, or a view of one of these. None is kept alive.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # which would import torch._dynamo: seconds, in the middle of a model's second step

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # inside, nothing is compiled

    def __init__(self, arguments: Sequence[Any]) -> None:
        super().__init__()
        self.refused = False
        self._record = Record(len(arguments))
        self._known: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # id -> the tensor, and the place of its value
        self._values: list[tuple[Any, ...]] = []  # size, stride, dtype, storage offset and address of each
        for argument in arguments:
            self._add(argument)

    def __enter__(self) -> Recorder:
        self._before = _launch.tell(self._start)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _launch.tell(self._before)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        if self.refused:
            return results
        if func in _EMPTY:
            self._record.steps.append(Make(tuple(results.shape), results.stride(), results.dtype, results.device))
            self._add(results)
        elif not self._is_view(func, args, results):
            self._operate(func, args, kwargs, results)
        return results

    def record(self, results: Sequence[Tensor]) -> Record | None:
        """What was done for a call with these results; None where it cannot be repeated."""
        self._record.results = [self._source(result) for result in results]
        if any(source.place < self._record.count for source in self._record.results):
            return None  # a result of an operator is a tensor of its own
        return None if self.refused else self._record

    def _add(self, value: Any) -> None:
        if isinstance(value, Tensor):
            known = self._known.get(id(value))
            if known is None or known[0]() is not value:
                self._known[id(value)] = weakref.ref(value), len(self._values)
            self._values.append(
                (tuple(value.shape), value.stride(), value.dtype, value.storage_offset(), value.data_ptr())
            )
        else:
            self._values.append(())

    def _place(self, t: Tensor) -> int | None:
        known = self._known.get(id(t))
        return known[1] if known is not None and known[0]() is t else None

    def _is_view(self, func: Any, args: tuple, result: Any) -> bool:
        """Whether an operator's result is a view of a known value; then it is known, too."""
        if func._schema.is_mutable or not (isinstance(result, Tensor) and args and isinstance(args[0], Tensor)):
            return False
        root = self._place(args[0])
        if root is None or result.untyped_storage()._cdata != args[0].untyped_storage()._cdata:
            return False
        if self._place(result) is None:
            self._known[id(result)] = weakref.ref(result), root
        return True

    def _source(self, t: Tensor, by_address: bool = False) -> Source:
        place = self._place(t)
        if place is None:
            self.refused = True
            return Whole(0)
        size, stride, dtype, begin, address = self._values[place]
        if by_address and t.data_ptr() == address:
            return Whole(place)
        self.refused = self.refused or t.dtype != dtype
        if tuple(t.shape) == size and t.stride() == stride and t.storage_offset() == begin:
            return Whole(place)
        return Part(place, tuple(t.shape), t.stride(), t.storage_offset() - begin)

    def _operate(self, func: Any, args: tuple, kwargs: dict, results: Any) -> None:
        leaves, tree = tree_flatten((args, kwargs))
        takes = [(at, self._source(leaf)) for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        found, _ = tree_flatten(results)
        if not takes and not any(isinstance(result, Tensor) for result in found):
            return  # such as promote_types
        for at, _ in takes:
            leaves[at] = None
        new = []
        for number, result in enumerate(found):
            if not isinstance(result, Tensor):  # something of what a tensor holds
                self.refused = True
            elif self._place(result) is None:
                new.append(number)
                self._add(result)
        self._record.steps.append(Operate(func, leaves, takes, tree, new))

    def _start(self, kernel: Any, grid: tuple[int, ...], compiled: Any, given: dict[str, Any]) -> None:
        """What _launch.launch() tells."""
        if self.refused or not isinstance(compiled, CompiledKernel) or kernel.pre_run_hooks:
            self.refused = True
            return
        arguments = [given[p.name] if p.name in given else p.default for p in kernel.params]
        takes = [(at, self._source(a, by_address=True)) for at, a in enumerate(arguments) if isinstance(a, Tensor)]
        for at, _ in takes:
            arguments[at] = None
        self._record.steps.append(Start(compiled[(*grid, 1, 1)[:3]], arguments, takes))


class Replay:
    """What was recorded for one key, to be done again.

    Attributes:
        driver: Triton's driver of the GPUs, which the kernels were loaded by.
    """

    def __init__(self, record: Record, device: torch.device) -> None:
        self.driver = driver.active
        self._index = device.index if device.type == "cuda" else None
        record.in_place()
        self._program = record.program()
        self._results = [source.of for source in record.results]

    def __call__(self, arguments: Sequence[Any]) -> Any:
        """The call's results."""
        values = list(arguments)
        with self._on():
            for step in self._program:
                step(values)
            results = tuple(of(values) for of in self._results)
        return results if len(results) > 1 else results[0]

    def _on(self) -> AbstractContextManager:
        """Makes the call's device the current one, which it nearly always is: asking is faster than setting it."""
        if self._index is None or self._index == self.driver.get_current_device():
            return nullcontext()
        return torch.cuda.device(self._index)


class Launcher:
    """A launcher, and what it did before.

    Args:
        launch: the function of an operator; its tensors are made by PyTorch, its kernels started by _launch.launch().
        key_of: function(*arguments) -> a key that holds all that ``launch`` may depend on but for PyTorch's setting of
            float32 products; None where ``launch`` is to be called.
    """

    def __init__(self, launch: Callable[..., Any], key_of: Callable[..., bytes | None]) -> None:
        self._launch, self._key_of = launch, key_of

    def __call__(self, *arguments: Any) -> Any:
        """What ``launch`` does and returns."""
        words = None if _INTERPRETED else self._key_of(*arguments)
        if words is None:
            return self._launch(*arguments)
        key = self, words, _launch.float32_products()
        found = _found.get(key)
        if isinstance(found, Replay) and found.driver is driver.active:
            return found(arguments)
        if found is None or found == REFUSED:
            results = self._launch(*arguments)
            return _keep(key, found or SEEN, results)
        if not _recording.acquire(blocking=False):
            return self._launch(*arguments)
        try:
            with Recorder(arguments) as recorder:
                results = self._launch(*arguments)
        finally:
            _recording.release()
        several = results if isinstance(results, tuple) else (results,)
        record = recorder.record(several)
        return _keep(key, REFUSED if record is None else Replay(record, several[0].device), results)


def _keep(key: Key, found: Replay | str, results: Any) -> Any:
    if len(_found) >= LIMIT:
        _found.clear()
    _found[key] = found
    return results


Key = tuple[Launcher, bytes, str]
_found: dict[Key, Replay | str] = {}
