"""The backends' names, how one is chosen for a call, and how the choice is explained."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from . import _library, _measured

BACKENDS = ("reference", "aten", "cpu", "triton", "cuda")
# what explain() adds of kernels that automatic choice takes on such a GPU alone
_PROVEN = "proven on an H200 (9.0); on other GPUs name it explicitly"
_OF_GPUS = ("triton", "cuda")  # the backends that have such kernels

_proven: bool | None = None  # what proven_gpu() has found
_told: Callable[[Op, Any], None] | None = None  # set by telling_choices()
_forced: str | None = None  # set by use_backend(); a plain global, because a ContextVar breaks fullgraph compilation
_entered: list[list[str | None]] = []  # the backends of use_backend()'s blocks that are under way, in all threads
_lock = threading.Lock()


class BackendError(RuntimeError):
    """A backend that was asked for by name cannot run the call; the message says why."""


@dataclass(frozen=True)
class StandIn:
    """A call like another, on tensors of its own.

    Attributes:
        run: function(backend) -> the outputs that gradients come from.
        leaves: the tensors whose gradients the call is trained for; none without training.
    """

    run: Callable[[str], tuple[Tensor, ...]]
    leaves: list[Tensor]


@dataclass(frozen=True)
class Op:
    """How one public function meets its backends.

    Attributes:
        name: the public function's name.
        support: backend -> function(call) that answers None ("I can") or one sentence why not.
        prefer: function(call) -> backends in the order of automatic choice.
        describe: checks the public function's arguments and returns the ``call`` that all others read.
        bucket: function(call) -> its device type, and the words (``_measured.bucket``) of the calls that take as long.
        stand_in: function(call) -> how to run one like it, for its time.
        unproven: function(backend of GPUs, call) -> one sentence on what no GPU has proven of the call, or None.
    """

    name: str
    support: Mapping[str, Callable[[Any], str | None]]
    prefer: Callable[[Any], tuple[str, ...]]
    describe: Callable[..., Any]
    bucket: Callable[[Any], tuple[str, str]]
    stand_in: Callable[[Any], StandIn]
    unproven: Callable[[str, Any], str | None] = lambda backend, call: None

    def remark(self, backend: str, call: Any) -> str | None:
        """What explain() adds of a backend that can run the call."""
        return (self.unproven(backend, call) or _PROVEN) if backend in _OF_GPUS else None

    def proven(self, backend: str, call: Any) -> bool:
        """Whether the backend may be chosen unnamed: a kernel for GPUs, where this one is of a kind that proved it."""
        return backend not in _OF_GPUS or (proven_gpu() and self.unproven(backend, call) is None)


OPS: dict[str, Op] = {}


def support(
    op: str,
    kernels: Mapping[str, Callable[[Any], str | None]],
    *,
    aten: Callable[[Any], str | None] = lambda call: None,
    directions: Sequence[str] = ("fwd", "bwd"),
) -> dict[str, Callable[[Any], str | None]]:
    """What an op's backends answer to a call, for Op.support; reference can all.

    Args:
        op: the name that its operators begin with.
        kernels: backend -> function(call): what its kernels cannot of the calls whose tensors they reach.
        aten: the same of PyTorch's own functions.
        directions: those that the op has kernels of.
    """

    def of_kernels(backend: str, cannot: Callable[[Any], str | None]) -> Callable[[Any], str | None]:
        def why_not(call: Any) -> str | None:
            unreachable = _library.unreachable(call.device, backend)
            return unreachable or cannot(call) or _library.missing(op, backend, directions)

        return why_not

    compiled = {backend: of_kernels(backend, cannot) for backend, cannot in kernels.items()}
    return {"reference": lambda call: None, "aten": aten, **compiled}


def can(call: Any) -> str | None:
    """What kernels without limits of their own cannot: nothing."""
    return None


def no_float64(call: Any) -> str | None:
    """What kernels for GPUs cannot."""
    return "has no float64 kernels" if call.dtype == torch.float64 else None


def no_gradients(call: Any) -> str | None:
    """What kernels for inference cannot."""
    return "computes no gradients; call it under torch.no_grad() or with backend='aten'" if call.training else None


def register(op: Op) -> Op:
    """Makes an op known to explain() and to the tests' op x backend matrix."""
    OPS[op.name] = op
    return op


def select(op: Op, call: Any, backend: str | None) -> str:
    """The backend that will run ``call``: the named one or BackendError, else the first preferred one that can."""
    name = backend if backend is not None else _forced
    if name is not None:
        reason = why_not(op, call, name)
        if reason is not None:
            raise BackendError(f"{op.name}: backend {name!r} cannot run this call: {reason}")
        return name
    if _told is not None:
        _told(op, call)
    measured = _measured_choice(op, call)
    if measured is not None:
        return measured
    order = op.prefer(call)
    if _library.exporting() and torch.onnx.is_in_onnx_export():  # which knows PyTorch's own operators alone
        order = tuple(dict.fromkeys(("aten", "reference", *order)))
    for name in order:
        if op.support[name](call) is None and op.proven(name, call):
            return name
    raise BackendError(f"{op.name}: no backend can run this call:\n{_reasons(op, call)}")


def _measured_choice(op: Op, call: Any) -> str | None:
    """What tune() found fastest for calls like this one, where it can run it."""
    if torch.compiler.is_compiling():  # a compiled graph must not depend on the lengths
        return None
    name = _measured.choice(*bucket(op, call)) if _measured.known() else None
    return name if name is not None and name in op.support and op.support[name](call) is None else None


def bucket(op: Op, call: Any) -> tuple[str, str]:
    """Where the table of measured choices has this call: its device type, and op and bucket."""
    device, words = op.bucket(call)
    return device, f"{op.name} {words}"


@contextmanager
def telling_choices(tell: Callable[[Op, Any], None]) -> Iterator[None]:
    """Within it ``tell`` is called with each op and call that automatic choice decides on, alike ones once."""
    global _told
    before, _told = _told, tell
    Choices.forget()
    try:
        yield
    finally:
        _told = before
        Choices.forget()


def why_not(op: Op, call: Any, backend: str) -> str | None:
    """None where ``backend`` can run ``call``, else one sentence why not."""
    if backend not in BACKENDS:
        raise ValueError(f"{op.name}: backend must be one of {', '.join(BACKENDS)} or None, got {backend!r}")
    if backend not in op.support:
        return f"{op.name} has no {backend} kernels yet"
    return op.support[backend](call)


def forced() -> str | None:
    """The backend that use_backend() asks for."""
    return _forced


def cpu_first(device: str, faster: bool = True) -> tuple[str, ...]:
    """The order of automatic choice of an op without gradients: cpu's kernels where they are ``faster``.

    Exported programs take PyTorch's own functions, which run where this package is not.
    """
    if faster and device == "cpu" and not _library.exporting():
        return ("cpu", "aten", "reference")
    return ("aten", "reference")


def proven_gpu() -> bool:
    """Whether all GPUs are of the kind that has proven the kernels, an H200: of compute capability 9."""
    global _proven
    if _proven is None:
        found = {torch.cuda.get_device_capability(gpu)[0] for gpu in range(torch.cuda.device_count())}
        _proven = torch.cuda.is_available() and found == {9}
    return _proven


# What torch.compiler.assume_constant_result does, which would import torch's compiler.
proven_gpu._dynamo_marked_constant = True  # type: ignore[attr-defined]


def on_gpu(*fastest: str, compiled: bool = False) -> tuple[str, ...]:
    """The order of automatic choice but on a CPU: ``fastest``, PyTorch's own functions, then what else there is.

    Kernels are taken on GPUs that have proven them. ``fastest`` has to weigh the host: beside an H200 a call by Triton
    took 140 to 350 us of its time, by csrc/cuda 20 to 160, by PyTorch 20 to 110, and no small call costs less. (Since
    then calls by Triton are repeated, triton/_replay.py, which no GPU has timed.) A compiler fuses PyTorch's own
    functions, which come first in its graphs unless the kernels are to be taken ``compiled``; exported programs hold
    nothing else.
    """
    if not proven_gpu() or _library.exporting():
        return ("aten", "reference")
    first = fastest if compiled or not torch.compiler.is_compiling() else ()
    return tuple(dict.fromkeys((*first, "aten", "triton", "reference")))


def offers(op: str) -> bool:
    """Whether ``op`` has kernels of the backend that use_backend() asks for: for callers that can do without it."""
    return _forced is None or _forced in OPS[op].support


def chosen(op: str, *args: Any, **kwargs: Any) -> str:
    """The backend that a call of ``op`` without ``backend=`` would run on; the call's arguments are checked."""
    entry = OPS[op]
    return select(entry, entry.describe(*args, **kwargs), None)


def described(caller: str, op: Op, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """The checked call of an op with a user's arguments.

    Raises:
        TypeError: they do not fit the op's parameters (the message names caller and op), or one is of a wrong kind.
        ValueError: one of them is wrong.
    """
    try:
        signature(op.describe).bind(*args, **kwargs)
    except TypeError as error:
        names = ", ".join(signature(op.describe).parameters)
        raise TypeError(f"{caller}: the arguments of {op.name} must be {names}, got a call with {error}") from None
    return op.describe(*args, **kwargs)


class Choices:
    """What was chosen for calls that an op has checked before: the same call again costs a look-up instead of checks.

    A key (``_library.signature``) must hold all that the op's checks, SUPPORT and prefer() read of a call (shapes,
    dtypes, devices, options, the backend that was named), so that a call which would be refused never finds one. A key
    of None is never found: for calls whose values matter, and for what has no signature.
    """

    LIMIT = 4096  # then it starts anew; a program that grows its sequences token by token must not grow this for ever
    _all: list[Choices] = []
    _forgotten = 0  # how often forget() was called

    def __init__(self) -> None:
        self._made: dict[bytes, Any] = {}
        self._missed = threading.local()
        Choices._all.append(self)

    def get(self, key: bytes | None) -> Any:
        """What was kept for a call of this key, or None where it has to be checked."""
        if key is None:
            return None
        choice = self._made.get(key)
        if choice is None:
            self._missed.forgotten = Choices._forgotten
        return choice

    def keep(self, key: bytes | None, choice: Any) -> Any:
        """Remembers a choice, which must not hold a tensor, made since this thread's last get(); returns it."""
        if key is not None:
            with _lock:
                if len(self._made) >= self.LIMIT:
                    self._made.clear()
                # made before another thread's forget(), it may be what holds no more
                if getattr(self._missed, "forgotten", Choices._forgotten) == Choices._forgotten:
                    self._made[key] = choice
        return choice

    @staticmethod
    def forget() -> None:
        """Forgets the choices of all ops: to be called by whatever changes how select() answers."""
        with _lock:
            Choices._forgotten += 1
            for choices in Choices._all:
                choices._made.clear()


@contextmanager
def use_backend(name: str | None) -> Iterator[None]:
    """Runs every op inside the ``with`` block on one backend, as if each call had named it.

    The setting is process-wide: of blocks that overlap in several threads, the one entered last counts until it is
    left. A call remembers its backend, so a backward outside the block stays on it.

    Args:
        name: "reference" | "aten" | "cpu" | "triton" | "cuda", or None for automatic choice.

    Raises:
        ValueError: no backend has this name.

    Example:
        >>> with use_backend("reference"):
        ...     y = tfk.ops.layer_norm(torch.randn(2, 8))
    """
    global _forced
    if name is not None and name not in BACKENDS:
        raise ValueError(f"use_backend: name must be one of {', '.join(BACKENDS)} or None, got {name!r}")
    entry = [name]
    with _lock:
        _entered.append(entry)
        _forced = name
    Choices.forget()
    try:
        yield
    finally:
        with _lock:
            _entered[:] = (other for other in _entered if other is not entry)
            _forced = _entered[-1][0] if _entered else None
        Choices.forget()


def explain(op: str, *args: Any, **kwargs: Any) -> str:
    """Says for one call what each backend answers, and which one automatic choice would take.

    Args:
        op: name of a function of ``tfm_kernels.ops`` that takes ``backend=``, such as "attention".
        *args: the arguments of the call, as they would be passed to the function.
        **kwargs: its keyword arguments.

    Returns:
        One line a backend and one for the choice. Nothing is computed.

    Raises:
        ValueError: no such function has this name, or an argument is wrong (the same sentence as the call's own).
        TypeError: arguments are missing or unknown, or one is of a wrong kind.
        BackendError: use_backend() asks for a backend that cannot run the call.

    Example:
        >>> print(explain("rms_norm", torch.randn(2, 8)))
        rms_norm
          reference can
          aten      can
          cpu       can
          triton    cannot: needs a CUDA tensor, got cpu
          cuda      cannot: needs a CUDA tensor, got cpu
          -> cpu (automatic choice)
    """
    if op not in OPS:
        raise ValueError(
            f"explain: op must be one of {', '.join(sorted(OPS))}, the functions that take backend=, got {op!r}"
        )
    entry = OPS[op]
    kwargs.pop("backend", None)
    call = described("explain", entry, args, kwargs)
    chosen = select(entry, call, None)
    why = "use_backend() asks for it" if _forced is not None else "automatic choice"
    if _forced is None and _measured_choice(entry, call) is not None:
        why += ", measured by tune()"
    return f"{op}\n{_reasons(entry, call)}\n  -> {chosen} ({why})"


def _reasons(op: Op, call: Any) -> str:
    return "\n".join(f"  {name:10}{_answer(op, call, name)}" for name in BACKENDS)


def _answer(op: Op, call: Any, backend: str) -> str:
    reason = why_not(op, call, backend)
    if reason is not None:
        return f"cannot: {reason}"
    remark = op.remark(backend, call)
    return "can" if remark is None else f"can: {remark}"
