"""One run of a model: its outputs, and the gradients of its parameters and inputs."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .. import _check
from ..testing.same_dropout import same_dropout

SEED = 20170612  # of the dropout masks and the random weights of the outputs; any would do


@dataclass(frozen=True)
class Call:
    """The arguments of one call of a module.

    Attributes:
        args: positional ones.
        kwargs: by name.
    """

    args: tuple
    kwargs: dict[str, Any]

    @staticmethod
    def of(inputs: Any) -> Call:
        """A tensor is the one argument, a tuple or list are all of them, a mapping holds them by name."""
        return Call(*_check.call_arguments("prove", inputs))

    def to(self, dtype: torch.dtype | None, *, all_gradients: bool = False) -> Call:
        """A copy that shares no memory, floating tensors in ``dtype`` (None keeps theirs).

        They require gradients where the originals do, or all but additive masks; what is no tensor is copied deeply.
        """

        def fresh(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return copy.deepcopy(value)
            if not value.is_floating_point():
                return value.detach().clone()
            wanted = value.requires_grad or all_gradients and not _is_mask(value)
            return _cast(value.detach().clone(), dtype or value.dtype).requires_grad_(wanted)

        args, kwargs = pytree.tree_map(fresh, (self.args, self.kwargs))
        return Call(args, kwargs)

    def tensors(self) -> dict[str, Tensor]:
        """Name -> floating tensor that requires a gradient."""
        named = named_tensors({**dict(enumerate(self.args)), **self.kwargs}, "input")
        return {name: value for name, value in named.items() if value.requires_grad}


@dataclass
class Run:
    """What one run gave.

    Attributes:
        outputs: name -> output, detached, as the forward gave it.
        gradients: name -> gradient of a parameter or input; parameters without one are left out.
        loss: the loss in float64, where the gradients are those of a loss.
        unknown: name -> type of what is neither a tensor nor a number, nor holds such.
        buffers: name -> buffer, as the forward left it.
        changed: names of the buffers that the forward changed.
    """

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor] = field(default_factory=dict)
    loss: Tensor | None = None
    unknown: dict[str, str] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)


@dataclass
class Returned:
    """What one call without a graph returned.

    Attributes:
        outputs: name -> output, in the memory in which the model returned it.
        copies: name -> copy, made then.
    """

    outputs: dict[str, Tensor]
    copies: dict[str, Tensor]

    def overwritten(self) -> set[str]:
        """Names of the outputs that no longer hold what they held."""
        return differing(self.outputs, self.copies)


def forward(model: nn.Module, call: Call, *, seed: int = SEED, compiled: Callable[..., Any] | None = None) -> Returned:
    """One call without a graph; ``compiled`` as in ``run``."""
    device = device_of(model, call)
    with torch.no_grad(), seeded(seed, device), _dropout(device, compiled), buffers_kept(model):
        result = (model if compiled is None else compiled)(*call.args, **call.kwargs)
        outputs = {name: value.detach() for name, value in named_tensors(result).items()}
        return Returned(outputs, {name: value.clone() for name, value in outputs.items()})


def draws(model: nn.Module, call: Call) -> bool:
    """Whether a call of the model draws random numbers, as dropout does."""
    device = device_of(model, call)
    with torch.no_grad(), seeded(SEED, device), buffers_kept(model):
        before = _random_state(device)
        own = call.to(None)
        model(*own.args, **own.kwargs)
        return not all(map(torch.equal, before, _random_state(device)))


def _random_state(device: torch.device) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _dropout(device: torch.device, compiled: Any) -> AbstractContextManager[None]:
    return same_dropout(device) if compiled is None else compiled.same_dropout()


def differing(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> set[str]:
    """Names of the tensors that are not the same, bit by bit, in both."""
    return {name for name in a.keys() | b.keys() if name not in a or name not in b or not same(a[name], b[name])}


def run(
    model: nn.Module,
    call: Call,
    dtype: torch.dtype,
    *,
    loss_fn: Callable[[Any], Tensor] | None = None,
    only: Collection[str] | None = None,
    without: Collection[str] = (),
    ignored: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = lambda outputs: {},
    seed: int = SEED,
    within: Callable[[], AbstractContextManager[None]] = nullcontext,
    compiled: Callable[..., Any] | None = None,
) -> Run:
    """Forward, and backward where a graph is recorded.

    Args:
        model: called as it is; its gradients are cleared before and after.
        call: the arguments, already in the right dtype.
        dtype: the dtype the random weights of the outputs are rounded to.
        loss_fn: gives the scalar that is differentiated; None takes a fixed random weighting of every output.
        only: the outputs that are weighted, by name; None takes all.
        without: outputs that do not count, as if they were not given.
        ignored: from the outputs, output -> bool over its leading axes, True at padding, which weighs nothing.
        seed: of the dropout masks.
        within: gives the context that the model and ``loss_fn`` are called in, and again the backward.
        compiled: the model's form under torch.compile, which is called in its place, within its own ``same_dropout``.
    """
    model.zero_grad(set_to_none=True)
    device = device_of(model, call)
    with seeded(seed, device), _dropout(device, compiled), buffers_kept(model) as before:
        with within():
            result = (model if compiled is None else compiled)(*call.args, **call.kwargs)
            loss = None if loss_fn is None else loss_fn(result)
        outputs = {name: value for name, value in named_tensors(result).items() if name not in without}
        done = Run({name: value.detach().clone() for name, value in outputs.items()})  # a buffer is soon put back
        done.unknown = others(result)
        done.buffers = {n: b.detach().clone() for n, b in model.named_buffers() if n in before}
        done.changed = {n for n, b in done.buffers.items() if not same(b, before[n])}
        floating = {name: value for name, value in outputs.items() if value.is_floating_point()}
        if loss_fn is not None:
            if not (isinstance(loss, Tensor) and loss.numel() == 1):
                raise ValueError(f"prove: loss_fn must return a tensor of one element, got {_described(loss)}")
            done.loss = loss.detach().double()
            ends = {"loss": loss}
            weights = {"loss": torch.ones_like(loss)}
        else:
            ends = {name: value for name, value in floating.items() if only is None or name in only}
            hidden = ignored(done.outputs)
            weights = {name: random_weights(name, value, dtype, hidden) for name, value in ends.items()}
            weighted = [(v.detach().double() * weights[n].double()).sum().to(device) for n, v in ends.items()]
            done.loss = torch.stack(weighted).sum() if weighted else None
        tensors = [name for name, value in ends.items() if value.requires_grad]
        if tensors:
            with within():  # a model that checkpoints runs again here
                torch.autograd.backward([ends[n] for n in tensors], [weights[n] for n in tensors])
    leaves = {**dict(model.named_parameters()), **call.tensors()}
    gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    done.gradients = {name: gradient.to_dense() for name, gradient in gradients.items()}  # an embedding's may be sparse
    for leaf in leaves.values():
        leaf.grad = None
    return done


def random_weights(name: str, output: Tensor, dtype: torch.dtype, ignored: Mapping[str, Tensor]) -> Tensor:
    """N(0, 1), rounded to ``dtype``, the same for every run; 0 at padding."""
    generator = torch.Generator().manual_seed(SEED + sum(name.encode()))
    weights = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(dtype).to(output.device)
    if name in ignored:
        mask = ignored[name]
        weights = weights.masked_fill(mask.view(*mask.shape, *[1] * (output.dim() - mask.dim())), 0.0)
    return weights.to(output.dtype)


def named_tensors(result: Any, name: str = "output") -> dict[str, Tensor]:
    """The tensors of a nested result, "output.logits", and its numbers as tensors; what is neither is left out.

    A complex tensor is given as its real and imaginary parts.
    """
    return {key: tensor for key, leaf in _leaves(result, name).items() if (tensor := _tensor(leaf)) is not None}


def named(runs: Iterable[Mapping[str, Tensor]], words: str) -> list[dict[str, Tensor]]:
    """The tensors of each run under names that say how they came about: "output, no_grad"."""
    return [{f"{name}, {words}": value for name, value in values.items()} for values in runs]


def others(result: Any, name: str = "output") -> dict[str, str]:
    """Name -> type of what ``named_tensors`` leaves out of a nested result."""
    return {key: type(leaf).__name__ for key, leaf in _leaves(result, name).items() if _tensor(leaf) is None}


def _leaves(result: Any, name: str) -> dict[str, Any]:
    """Name -> what mappings, sequences and dataclasses hold; None is left out."""
    if isinstance(result, Mapping):
        parts = list(result.items())
    elif isinstance(result, (tuple, list)):
        parts = list(zip(getattr(result, "_fields", range(len(result))), result, strict=True))
    elif dataclasses.is_dataclass(result) and not isinstance(result, type):
        parts = [(each.name, getattr(result, each.name)) for each in dataclasses.fields(result)]
    else:
        return {} if result is None else {name: result}
    return {key: leaf for part, inner in parts for key, leaf in _leaves(inner, f"{name}.{part}").items()}


def _tensor(leaf: Any) -> Tensor | None:
    if isinstance(leaf, Tensor):
        return torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf
    if isinstance(leaf, float):
        return torch.tensor(leaf, dtype=torch.float64)
    return torch.tensor(leaf) if isinstance(leaf, int) else None


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    """``value`` in ``dtype``, what is finite staying so: a mask of the least float64 must not become one of -inf."""
    cast = value.to(dtype)
    if torch.finfo(dtype).max >= torch.finfo(value.dtype).max:
        return cast
    limit = torch.finfo(dtype).max
    return torch.where(value.isfinite(), cast.clamp(-limit, limit), cast)


def _is_mask(value: Tensor) -> bool:
    """Whether a floating argument hides something rather than carrying a signal: 0 where it does not."""
    return not bool(value.any()) or bool((value < -1e4).any())


def device_of(model: nn.Module, call: Call) -> torch.device:
    """Where the model lives, or its inputs where it has no parameters."""
    first = next(model.parameters(), None)
    if first is not None:
        return first.device
    leaves = pytree.tree_leaves((call.args, call.kwargs))
    return next((leaf.device for leaf in leaves if isinstance(leaf, Tensor)), torch.device("cpu"))


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Gives copies of the buffers, name -> tensor; after the block the model has its own again, as they were."""
    held = [(m, name, b) for m in model.modules() for name, b in m._buffers.items() if b is not None]
    saved = [buffer.detach().clone() for _, _, buffer in held]
    try:
        yield {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    finally:
        with torch.no_grad():
            for (module, name, buffer), value in zip(held, saved, strict=True):
                if not same(buffer, value):
                    buffer.copy_(value)
                module._buffers[name] = buffer


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same; NaN equals NaN."""
    return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | (a.isnan() & b.isnan())).all())


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """A random state of its own for the block; the caller's comes back."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _described(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
