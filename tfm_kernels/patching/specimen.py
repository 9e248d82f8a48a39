"""Copies of modules on which a declaration is tried, so that nothing of the module itself is called or changed."""

from __future__ import annotations

import inspect
import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from . import guard
from .copying import copied
from .declaration import is_dropout
from .swap import OPTIONS
from .undone import undone

_WIDE = (torch.float32, torch.float64)
PLAIN = (bool, int, float, str, type(None))
OF_TORCH = frozenset(nn.Module().__dict__)  # what every module holds: hooks, which count by themselves, and its mode
_NOISE = 65537  # numbers, a prime: rows of a parameter differ though they are drawn once
_patches = 0  # calls of patch() that have begun or ended


class LeftAlone(Exception):
    """Part of a sentence for the report: why a module is to be left as it is."""


def specimen(module: nn.Module, *, wide: bool = False) -> Any:
    """A copy in evaluation mode, without hooks, with other parameters; None where they cannot be drawn anew.

    That is on the meta device, or of a tensor class of their own. A bias of 0, a factor of 1 or an output layer that
    begins at 0 would make one forward look like another. A ``wide`` copy computes in float32 where the module does in
    16 bits.

    Raises:
        LeftAlone: it cannot be copied, or its copy holds parts of the module itself.
    """
    held = (*module.parameters(), *module.buffers())
    if any(type(each) not in (Tensor, nn.Parameter) or each.is_meta for each in held):
        return None
    kept = [value for inner in module.modules() for value in inner.__dict__.values() if isinstance(value, Tensor)]
    made: dict[int, Any] = {id(value): value.detach().clone() for value in kept}  # weights for pictures
    for inner in module.modules():  # what hooks hold may be a whole trainer
        made |= {id(hooks): OrderedDict() for hooks in _hooks(inner)}
    try:
        copy = copied(module, made)
    except Exception as error:  # a module may refuse to be copied
        raise LeftAlone(f"its copy could not be tried: {type(error).__name__}: {error}") from error
    if _parts(copy) & _parts(module):
        raise LeftAlone("a copy of it, to be tried, would share parts with it")
    noise = torch.rand(_NOISE, generator=torch.Generator("cpu").manual_seed(0), dtype=torch.float32, device="cpu") - 0.5
    with torch.no_grad():
        for parameter in copy.parameters():
            if parameter.is_floating_point():
                reach = 3.46 * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1.7  # a deviation of 1, of 0.5
                drawn = (noise * reach).to(parameter.device, parameter.dtype)
                drawn = drawn.repeat(-(-parameter.numel() // _NOISE))[: parameter.numel()].view(parameter.shape)
                parameter.copy_(drawn if parameter.dim() > 1 else parameter + drawn)
                noise = noise.roll(1 + parameter.numel() % 8191)  # parameters of one shape differ
    if wide and any(each.dtype in (torch.float16, torch.bfloat16) for each in held):
        copy.float()
    return copy.eval()


def _hooks(module: nn.Module) -> tuple[dict, ...]:
    """Everything that hooks of a forward and its backward are kept in."""
    return tuple(value for key, value in module.__dict__.items() if key in OF_TORCH and "_hooks" in key)


def once(require: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Any]:
    """``require``, which may raise, for the first of modules that are alike: a model has the same block many times.

    What it tries is undone. It remembers for one call of ``patch`` alone, in which nothing that a module holds changes
    or goes.
    """
    answers: dict[Any, Any] = {}
    asked_in = _patches

    def check(module: nn.Module) -> Any:
        nonlocal asked_in
        if asked_in != _patches:
            answers.clear()
            asked_in = _patches
        likeness = _likeness(module)
        if likeness not in answers:
            try:
                with undone(module):
                    answers[likeness] = require(module)
            except LeftAlone as reason:
                answers[likeness] = str(reason)
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
        own = ((key, value) for key, value in inner.__dict__.items() if key not in OF_TORCH)
        attributes = ((key, value) for key, value in own if not key.startswith(OPTIONS))  # what patching adds
        plain = ((key, value if isinstance(value, PLAIN) else id(value)) for key, value in attributes)
        held = ((key, each, True) for key, each in inner._parameters.items())
        kept = ((key, each, False) for key, each in inner._buffers.items())
        tensors = ((key, None if each is None else _describe(each, trained)) for key, each, trained in (*held, *kept))
        forward = inspect.getattr_static(type(inner), "forward", None)  # a TorchScript module's class has none
        found.append((name, type(inner), forward, guard.hooked(inner), *plain, *tensors))
    return tuple(found)


def _describe(tensor: Tensor, trained: bool) -> Any:
    if tensor.is_nested:
        return id(tensor)
    whole = trained or type(tensor) is not Tensor or tensor.is_meta
    return type(tensor), tensor.shape, tensor.dtype, tensor.device, None if whole else _content(tensor)


def _content(tensor: Tensor) -> Any:
    """Equal for buffers that hold the same, bit for bit."""
    try:
        return hash(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    except (RuntimeError, TypeError):  # of a kind that is no row of bytes
        return id(tensor)


def _parts(module: nn.Module) -> set[int]:
    """Ids of modules and parameters, and where buffers and parameters lie in memory."""
    tensors = [*module.parameters(), *module.buffers()]
    places = (each.untyped_storage().data_ptr() for each in tensors if each.layout == torch.strided)
    return {*map(id, module.modules()), *map(id, tensors), *filter(None, places)}


def attempt(
    copy: nn.Module, run: Callable[[], Any], *, autocast: torch.dtype | None = None
) -> tuple[Any, Exception | None]:
    """What a forward gives, or why it does not, leaving random numbers as they were; not compiled."""
    devices = {parameter.device for parameter in copy.parameters()}
    state, numpy = random.getstate(), sys.modules.get("numpy")
    other = None if numpy is None else numpy.random.get_state()
    try:
        with ExitStack() as stack:
            for kind in {device.type for device in devices}:
                stack.enter_context(torch.autocast(kind, autocast, enabled=autocast is not None))
            stack.enter_context(torch.no_grad())
            stack.enter_context(torch.random.fork_rng([device for device in devices if device.type == "cuda"]))
            if "torch._dynamo" in sys.modules:  # which takes seconds to import; without it nothing is compiled
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            return run(), None
    except Exception as error:  # a forward may want anything
        return None, error
    finally:
        random.setstate(state)
        if numpy is not None:
            numpy.random.set_state(other)


def tried(copy: nn.Module, run: Callable[[], Any]) -> Tensor | None:
    """What a forward gives; None where it gives no tensor, or refuses."""
    got, _ = attempt(copy, run)
    return got if isinstance(got, Tensor) and bool(got.isfinite().all()) else None


def result(
    op: str, cls: type[nn.Module], copy: nn.Module, run: Callable[..., Any], *given: Any
) -> tuple[Tensor | None, str | None]:
    """What a forward, ``run`` of ``given``, that gives one tensor gives; or None, and part of a sentence why not.

    Raises:
        ValueError: it gives something else, or writes into what it is given.
    """
    taken = fresh(given)
    got, refused = attempt(copy, lambda: run(*taken))
    require_unwritten(op, cls, given, taken)
    if refused is not None:
        return None, untried(refused)
    if not isinstance(got, Tensor):
        held = f" of {len(got)}" if isinstance(got, (tuple, list)) else ""
        raise ValueError(f"{op}: {cls.__name__}.forward must give a tensor, got a {type(got).__name__}{held}")
    return got, None


def fresh(given: Iterable[Any]) -> list[Any]:
    """Arguments of which a forward may write into the tensors."""
    return [each.clone() if isinstance(each, Tensor) else each for each in given]


def require_unwritten(op: str, cls: type[nn.Module], given: Iterable[Any], taken: Iterable[Any]) -> None:
    """Raises where a forward wrote into the tensors that it has ``taken``."""
    for before, after in zip(given, taken, strict=True):
        if isinstance(before, Tensor) and not torch.equal(before, after):
            raise ValueError(f"{op}: {cls.__name__}.forward must leave what it is given as it is, and writes into it")


def untried(refused: Exception) -> str:
    """Part of a sentence for the report: why a forward could not be tried."""
    first = str(refused).partition("\n")[0]
    return f"its forward could not be tried: {type(refused).__name__}: {first}"


def differ(got: Tensor | None, wanted: Tensor | None, tolerance: float | None = None, least: float = 1e-30) -> bool:
    """Whether two trials gave other numbers where ``got`` is finite; not where either gave none.

    By the ``tolerance``, that of sums of their dtype, times the largest number, or ``least``.
    """
    if got is None or wanted is None:
        return False
    if got.shape != wanted.shape:
        return True
    finite = got.isfinite()
    if not bool(finite.any()):
        return False
    found, named = got[finite].double(), wanted[finite].double()
    size = float(named.abs().max().clamp(min=least))  # NaN where one is
    tolerance = tolerance or (2e-5 if got.dtype in _WIDE else 5e-2)
    return not float((found - named).abs().max()) <= tolerance * size


def require_dropouts(
    op: str,
    cls: type[nn.Module],
    copy: nn.Module,
    drops: tuple[str | None, ...],
    inside: list[nn.Module],
    last: Any,
    forward: Callable[[], Any],
    written: Callable[[], Any],
    sizes: Callable[[], list[int]] | None = None,
) -> None:
    """Raises where ``forward`` in training does not drop what ``written`` does, by each of ``drops`` and no other.

    What is ``inside`` of the layers is theirs to apply. The declared ones drop nothing, and in turn everything. The
    layer that comes ``last`` is given a bias: else dropping all of its input and all of its output would both give 0.
    Then all of them drop at 0.5, as many elements as ``sizes`` says or else as ``written`` does, and in that case the
    same: one that acts twice, or on something else that is 0 where the right one is.
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
    names = " and ".join(map(repr, held)) or "no dropout"
    for chosen in (None, *held):
        _set(copy, held, {name: float(name == chosen) for name in held})
        if not differ(tried(copy, forward), tried(copy, written)):
            continue
        if chosen is None:
            what = f"elements by {names} alone, as declared, got some dropped elsewhere"
        else:
            what = f"by {chosen!r} what is declared, got others dropped"
        raise ValueError(f"{op}: {cls.__name__}.forward in training must drop {what}")
    _set(copy, held, dict.fromkeys(held, 0.5))
    got, drawn = _seeded(copy, forward)
    wanted, named = _seeded(copy, written)
    if got is None or wanted is None or drawn is None or named is None:
        return
    if sizes is not None:
        named, wanted = sizes(), None
    if sorted(drawn) != sorted(named) or differ(got, wanted):
        raise ValueError(
            f"{op}: {cls.__name__}.forward in training must drop by {names} what is declared, got others dropped, in "
            "another place or twice"
        )


def _set(copy: nn.Module, held: dict[str, Any], p: dict[str, float]) -> None:
    for name, each in held.items():
        if not isinstance(each, nn.Module):
            setattr(copy, name, p[name])
        elif not isinstance(each, nn.Identity):
            each.p = p[name]  # type: ignore[assignment]


class _Drawn(TorchDispatchMode):
    """Counts the elements of each tensor of random numbers that is made, where they are not drawn inside of attention.

    Attributes:
        sizes: how many each has; None where not all are known.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] | None = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # which would import torch._dynamo: seconds, and nothing here is compiled

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = operator(*args, **kwargs)
        named = operator._schema.arguments
        told = {each.name: each.default_value for each in named if each.has_default_value()}
        told |= {each.name: value for each, value in zip(named, args, strict=False)} | kwargs
        draws = torch.Tag.nondeterministic_seeded in operator.tags and told.get("dropout_p") != 0.0
        if operator is torch.ops.aten.dropout.default:  # as it is in inference mode
            draws = told["train"] and told["p"] > 0.0
        if draws and self.sizes is not None:
            drawn = result[0] if operator is torch.ops.aten.native_dropout.default else result  # F.dropout's on a GPU
            self.sizes = [*self.sizes, drawn.numel()] if isinstance(drawn, Tensor) else None
        return result


def _seeded(copy: nn.Module, run: Callable[[], Any]) -> tuple[Tensor | None, list[int] | None]:
    """What a run gives from one and the same seed, and the sizes of the random tensors that it draws, where known."""
    drawn = _Drawn()

    def seeded() -> Any:
        torch.default_generator.manual_seed(0)
        for device in {each.device for each in copy.parameters() if each.is_cuda}:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(0)
        with drawn:
            return run()

    return tried(copy, seeded), drawn.sizes
