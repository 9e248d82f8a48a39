"""What a fused forward checks before it reads its children's weights past their own forwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _module

from .. import _library
from ..nn import Int8Linear, Int8MultiheadAttention
from ..nn._bypass import cannot_be_kept, ordinary
from .swap import original_class

UNKNOWN_FORWARD = "its forward is not the known one"
GLOBAL_HOOKS = "a hook is registered for all modules"


CONV1D = "transformers.pytorch_utils.Conv1D"  # a Linear whose weight lies (in, out)
# what fused code takes in the place of these classes, because it calls it where it would read the weights of those
_STANDS_FOR: dict[type, tuple[type | str, ...]] = {
    Int8Linear: (nn.Linear, CONV1D),
    Int8MultiheadAttention: (nn.MultiheadAttention,),
}
IDLE_HOOKS: list[Callable[[Any], bool]] = []  # each tells of a forward hook whether it now does nothing


def hooked(module: nn.Module) -> bool:
    """Whether anything but its class decides what calling the module does, or watches it."""
    return bool(
        (module._forward_hooks and not _idle(module._forward_hooks.values()))
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


def _idle(hooks: Iterable[Any]) -> bool:
    return all(any(idle(hook) for idle in IDLE_HOOKS) for hook in hooks)


def hooked_everywhere() -> bool:
    """Whether hooks are registered for all modules of the process."""
    return bool(
        _module._global_forward_hooks
        or _module._global_forward_pre_hooks
        or _module._global_backward_hooks
        or _module._global_backward_pre_hooks
    )


def is_plain(module: nn.Module) -> bool:
    """Whether nobody watches the module and its weights are ordinary tensors; its class is the caller's matter."""
    return not hooked(module) and not hooked_everywhere() and ordinary(*module._parameters.values())


def why_not_plain(owner: nn.Module, path: str, *classes: type | str) -> str | None:
    """None where the child at ``path`` (dotted) is plain, else part of a sentence for the report.

    Plain is what has exactly one of ``classes`` (fused or not; a name stands for a class that may not be importable),
    is not hooked, has ordinary tensors for weights, and, being a norm, is one of the last dimension alone.
    """
    module = child(owner, path)
    cls = original_class(module)
    if not (cls in classes or type(module) in classes or _stands_for(module, cls, classes)):
        names = (c.rpartition(".")[2] if isinstance(c, str) else c.__name__ for c in classes)
        return f"{path} is {type(module).__name__}, not {' or '.join(names)}"
    if spans_rows(module):
        return f"{path} normalises more than the last dimension"
    return _watched(path, module) if hooked(module) else _strange(path, module)


def _stands_for(module: Any, cls: type, classes: tuple[type | str, ...]) -> bool:
    taken = any(wanted in classes for wanted in _STANDS_FOR.get(type(module), ()))
    return taken or f"{cls.__module__}.{cls.__qualname__}" in classes


def why_not_left_alone(owner: nn.Module, path: str) -> str | None:
    """None where nobody watches the child at ``path`` and its weights are ordinary tensors, else part of a sentence."""
    module = child(owner, path)
    return _watched(path, module) if hooked(module) else _strange(path, module)


def why_not_unwatched(owner: nn.Module, reached: tuple[str, ...], place: str = "") -> str | None:
    """None where no descendant has hooks but those at ``reached`` (dotted paths) and below, else part of a sentence."""
    for name, inner in owner._modules.items():
        path = place + name
        if inner is None or path in reached:
            continue
        if hooked(inner):
            return _watched(path, inner)
        reason = why_not_unwatched(inner, reached, f"{path}.") if inner._modules else None
        if reason is not None:
            return reason
    return None


def spans_rows(module: nn.Module) -> bool:
    """Whether it is a norm of torch.nn over more than the last dimension, which is all that the fused code knows."""
    return isinstance(module, (nn.LayerNorm, nn.RMSNorm)) and len(module.normalized_shape) > 1


def why_not_kept(x: Tensor) -> str | None:
    """None where autograd may keep ``x`` for a backward pass, else part of a sentence for the report.

    Code that computes with x step by step need not keep it, and then takes what inference mode made.
    """
    return "its input was made under torch.inference_mode, and gradients are on" if cannot_be_kept(x) else None


def direct(module: Any, name: str) -> Any:
    """A child by its name, None where there is none: the children of a TorchScript module have no get()."""
    children = module._modules
    return children[name] if name in children else None


def child(owner: nn.Module, path: str) -> Any:
    """The descendant at a dotted path; faster than get_submodule, and traceable.

    A wrapper that was put on the way may hand on what it does not have itself, as peft's do.
    """
    if "." not in path:
        inner = owner._modules.get(path)
        return getattr(owner, path) if inner is None else inner
    module: Any = owner
    for name in path.split("."):
        inner = direct(module, name)
        module = getattr(module, name) if inner is None else inner
    return module


def require_child(op: str, argument: str, owner: nn.Module, path: str) -> None:
    """Refuses a declared name, dotted where it lies deeper, of a child that is not there."""
    module: Any = owner
    for i, name in enumerate(names := path.split(".")):
        inner = direct(module, name)
        if inner is None:
            _refuse(op, f"{argument} must name a child", owner, path, ".".join(names[:i]), module._modules)
        module = inner


def require_attribute(op: str, argument: str, owner: nn.Module, path: str) -> None:
    """Refuses a declared name, dotted where it lies deeper, of an attribute that is not there."""
    held: Any = owner
    for i, name in enumerate(names := path.split(".")):
        if not hasattr(held, name):
            _refuse(op, f"{argument} must name an attribute", owner, path, ".".join(names[:i]), _attributes(held))
        held = getattr(held, name)


def attribute(owner: Any, path: str) -> Any:
    """The attribute at a dotted path, of a module or of what it holds, such as its config."""
    for name in path.split("."):
        owner = getattr(owner, name)
    return owner


def _attributes(owner: Any) -> list[str]:
    own = [name for name in getattr(owner, "__dict__", ()) if not name.startswith("_") and name != "training"]
    if isinstance(owner, nn.Module):
        own += [*owner._parameters, *owner._buffers, *owner._modules]
    return own


def _refuse(op: str, wanted: str, owner: nn.Module, path: str, place: str, held: Iterable[str]) -> None:
    there = ", ".join(held) or "nothing"
    raise ValueError(f"{op}: {wanted} of {type(owner).__name__}, got {path!r}; {place or 'it'} has {there}")


def _watched(path: str, module: nn.Module) -> str:
    return f"{path} has {'a forward of its own' if 'forward' in module.__dict__ else 'hooks'}"


def _strange(path: str, module: nn.Module) -> str | None:
    if ordinary(*module._parameters.values()):
        return None
    return f"{path} has weights that are no ordinary tensors"


def why_not_stock(owner: nn.Module, paths: Iterable[str], *others: type) -> str | None:
    """None where the children at ``paths`` are torch.nn's own, or of ``others``, and unwatched, else why not."""
    if hooked_everywhere():
        return GLOBAL_HOOKS
    for path in paths:
        module = child(owner, path)
        if type(module) not in others and not original_class(module).__module__.startswith("torch.nn.modules."):
            return f"{path} is {type(module).__name__}, not a module of torch.nn"
        reason = why_not_left_alone(owner, path)
        if reason is not None:
            return reason
    return None


def tracing(*tensors: torch.Tensor) -> bool:
    """Whether data must not be looked at: compile, export, jit or CUDA capture make a graph, torch.func transforms.

    Or there is none, as on the meta device.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or _library.transformed():
        return True
    if any(type(t) is not torch.Tensor and type(t) is not nn.Parameter for t in tensors):
        return True  # fake tensors, proxies, other subclasses
    if any(t.is_meta for t in tensors):
        return True
    return any(t.is_cuda for t in tensors) and torch.cuda.is_current_stream_capturing()
