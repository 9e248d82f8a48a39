"""Copies of modules on which a declaration is tried, so that nothing of the module itself is called or changed."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from . import guard
from .copying import copied
from .declaration import is_dropout
from .swap import OPTIONS

_WIDE = (torch.float32, torch.float64)
_PLAIN = (bool, int, float, str, type(None))
_OF_TORCH = frozenset(nn.Module().__dict__)  # what every module holds: hooks, which count by themselves, and its mode
_patches = 0  # calls of patch() that have begun or ended


def specimen(module: nn.Module, *, wide: bool = False) -> Any:
    """A copy that evaluates, without hooks and with other parameters, which nothing hides behind; None: it has none.

    A bias of 0, a factor of 1 or an output layer that begins at 0 would make one forward look like another. A ``wide``
    one computes in float32 where the module does in 16 bits.
    """
    held = (*module.parameters(), *module.buffers())
    if any(type(each) not in (Tensor, nn.Parameter) or each.is_meta for each in held):
        return None
    kept = [value for inner in module.modules() for value in inner.__dict__.values() if isinstance(value, Tensor)]
    try:
        copy = copied(module, {id(value): value.detach().clone() for value in kept})  # weights for pictures
    except Exception:  # a module may refuse to be copied
        return None
    generator = torch.Generator("cpu").manual_seed(0)
    for inner in copy.modules():
        for hooks in (inner._forward_hooks, inner._forward_pre_hooks, inner._backward_hooks, inner._backward_pre_hooks):
            hooks.clear()
    with torch.no_grad():
        for parameter in copy.parameters():
            if parameter.is_floating_point():
                noise = torch.rand(parameter.shape, generator=generator, dtype=torch.float32, device="cpu")
                reach = 3.46 * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1.7  # a deviation of 1, of 0.5
                noise = noise.sub_(0.5).mul_(reach).to(parameter.device, parameter.dtype)
                parameter.copy_(noise if parameter.dim() > 1 else parameter + noise)
    if wide and any(each.dtype in (torch.float16, torch.bfloat16) for each in held):
        copy.float()
    return copy.eval()


def once(require: Callable[[nn.Module], str | None]) -> Callable[[nn.Module], str | None]:
    """``require``, which may raise, for the first of modules that are alike: a model has the same block many times.

    It remembers for one call of ``patch`` alone, in which nothing that a module holds changes or goes.
    """
    answers: dict[Any, str | None] = {}
    asked_in = _patches

    def check(module: nn.Module) -> str | None:
        nonlocal asked_in
        if asked_in != _patches:
            answers.clear()
            asked_in = _patches
        likeness = _likeness(module)
        if likeness not in answers:
            answers[likeness] = require(module)
        return answers[likeness]

    return check


@contextmanager
def one_patch() -> Iterator[None]:
    """The time in which ``once`` remembers: from here to the end of the block."""
    global _patches
    _patches += 1
    try:
        yield
    finally:
        _patches += 1


def _likeness(module: nn.Module) -> Any:
    """What a forward may go by, but for the values of parameters: equal for modules that are alike."""
    found: list[Any] = []
    for name, inner in module.named_modules():
        own = ((key, value) for key, value in inner.__dict__.items() if key not in _OF_TORCH)
        attributes = ((key, value) for key, value in own if not key.startswith(OPTIONS))  # what patching adds
        plain = ((key, value if isinstance(value, _PLAIN) else id(value)) for key, value in attributes)
        held = ((key, each, True) for key, each in inner._parameters.items())
        kept = ((key, each, False) for key, each in inner._buffers.items())
        tensors = ((key, None if each is None else _describe(each, trained)) for key, each, trained in (*held, *kept))
        found.append((name, type(inner), type(inner).forward, guard.hooked(inner), *plain, *tensors))
    return tuple(found)


def _describe(tensor: Tensor, trained: bool) -> Any:
    whole = trained or type(tensor) is not Tensor or tensor.is_meta or tensor.is_complex() or tensor.is_quantized
    return type(tensor), tensor.shape, tensor.dtype, tensor.device, 0.0 if whole else float(tensor.sum())


def attempt(copy: nn.Module, run: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """What a forward gives, or why it does not, leaving random numbers as they were; not compiled."""
    devices = {parameter.device for parameter in copy.parameters()}
    state = random.getstate()
    try:
        with ExitStack() as stack:
            for kind in {device.type for device in devices}:
                stack.enter_context(torch.autocast(kind, enabled=False))
            stack.enter_context(torch.no_grad())
            stack.enter_context(torch.random.fork_rng([device for device in devices if device.type == "cuda"]))
            if "torch._dynamo" in sys.modules:  # which takes seconds to import; without it nothing is compiled
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            return run(), None
    except Exception as error:  # a forward may want anything
        return None, error
    finally:
        random.setstate(state)


def tried(copy: nn.Module, run: Callable[[], Any]) -> Tensor | None:
    """What a forward gives; None where it gives no tensor, or refuses."""
    got, _ = attempt(copy, run)
    return got if isinstance(got, Tensor) and bool(got.isfinite().all()) else None


def result(op: str, cls: type[nn.Module], copy: nn.Module, run: Callable[[], Any]) -> tuple[Tensor | None, str | None]:
    """What a forward that gives one tensor gives; or None, and part of a sentence for what it refuses.

    Raises:
        ValueError: it gives something else.
    """
    got, refused = attempt(copy, run)
    if refused is not None:
        return None, untried(refused)
    if not isinstance(got, Tensor):
        held = f" of {len(got)}" if isinstance(got, (tuple, list)) else ""
        raise ValueError(f"{op}: {cls.__name__}.forward must give a tensor, got a {type(got).__name__}{held}")
    return got, None


def untried(refused: Exception) -> str:
    """Part of a sentence for the report: why a forward could not be tried."""
    first = str(refused).partition("\n")[0]
    return f"its forward could not be tried: {type(refused).__name__}: {first}"


def differ(got: Tensor | None, wanted: Tensor | None) -> bool:
    """Whether two trials gave other numbers where ``got`` is finite; not where either gave none."""
    if got is None or wanted is None:
        return False
    if got.shape != wanted.shape:
        return True
    finite = got.isfinite()
    if not bool(finite.any()):
        return False
    found, named = got[finite].double(), wanted[finite].double()
    size = float(named.abs().max().clamp(min=1e-30))  # NaN where one is
    return not float((found - named).abs().max()) <= (1e-4 if got.dtype in _WIDE else 5e-2) * size


def require_dropouts(
    op: str,
    cls: type[nn.Module],
    copy: nn.Module,
    drops: tuple[str | None, ...],
    inside: list[nn.Module],
    last: Any,
    forward: Callable[[], Any],
    written: Callable[[], Any],
) -> None:
    """Raises where ``forward`` in training does not drop what ``written`` does, by each of ``drops`` and no other.

    What is ``inside`` of the layers is theirs to apply. The declared ones drop nothing, and in turn everything. The
    layer that comes ``last`` is given a bias, without which nothing that goes in and nothing that comes out look alike.
    """
    held = {name: guard.attribute(copy, name) for name in drops if name is not None}
    held = {name: each for name, each in held.items() if each is not None}
    if not all(
        is_dropout(each) and (isinstance(each, nn.Module) or name in copy.__dict__) for name, each in held.items()
    ):
        return  # a property, or a number that a config holds: not the module's to change
    if isinstance(last, nn.Linear) and last.bias is None:
        last.bias = nn.Parameter(torch.ones_like(last.weight[:, 0]))
        if differ(tried(copy, forward), tried(copy, written)):  # whose forward is not called
            last.bias = None
    for inner in copy.modules():
        inner.training = inner not in inside
    for chosen in (None, *held):
        for name, each in held.items():
            if not isinstance(each, nn.Module):
                setattr(copy, name, float(name == chosen))
            elif not isinstance(each, nn.Identity):
                each.p = float(name == chosen)  # type: ignore[assignment]
        if not differ(tried(copy, forward), tried(copy, written)):
            continue
        if chosen is None:
            names = " and ".join(map(repr, held)) or "no dropout"
            what = f"elements by {names} alone, as declared, got some dropped elsewhere"
        else:
            what = f"by {chosen!r} what is declared, got others dropped"
        raise ValueError(f"{op}: {cls.__name__}.forward in training must drop {what}")
