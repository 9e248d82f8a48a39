"""The class swap: a module takes a fused class, whose one base is the module's own class, and can give it back.

The module itself stays: its parameters, buffers, hooks and children are the same objects under the same names. What a
fused class needs to know of one module (Options) lies in the module's ``__dict__`` under OPTIONS, so that deepcopy and
pickle carry it; a fused class holds no state and can be traced.
"""

from __future__ import annotations

import copyreg
import functools
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import nn

OPTIONS = "_tfm_kernels"  # the one name that fusing adds to a module


@dataclass(frozen=True)
class Options:
    """What ``patch`` was asked for, as one module needs to know it.

    Attributes:
        recipe: name of the recipe that the module was fused by.
        backend: passed on to the ops; None chooses automatically.
        packed: whether padded batches may run packed.
        previous: for a module whose class stays, the setting that patching replaced.
        found: what its recipe found of it beyond its kind, None where nothing.
    """

    recipe: str
    backend: str | None = None
    packed: bool = True
    previous: str | None = None
    found: Any = None

    def __reduce__(self) -> Any:
        return _load_options, (self.recipe, self.backend, self.packed, self.previous, self.found)


on_load: dict[str, Callable[[], None]] = {}  # recipe -> what a process that loads a pickled model has to do first
_lock = threading.RLock()  # of fused_class, which has something done to the class while it derives from it
_fused: dict[tuple[type, str], type] = {}
_originals: dict[type, type] = {}
_builders: dict[str, Callable[[type], type]] = {}  # recipe -> original class -> fused class
_fallbacks: weakref.WeakKeyDictionary[nn.Module, dict[str, int]] = weakref.WeakKeyDictionary()


def declare(recipe: str, builder: Callable[[type], type]) -> None:
    """Makes a recipe's fused classes known by name, which is how a pickle refers to them."""
    _builders[recipe] = builder
    for key in [key for key in _fused if key[1] == recipe]:
        del _fused[key]  # modules that hold the old class keep it, and can still be given back


def fused_class(original: type, recipe: str) -> type:
    """The class that ``recipe`` gives to modules of class ``original``: always the same object."""
    with _lock:
        return _fused_class(original, recipe)


def _fused_class(original: type, recipe: str) -> type:
    if (original, recipe) not in _fused:
        with _unannounced(original):
            fused = _builders[recipe](original)
        if getattr(sys.modules[fused.__module__], fused.__qualname__, None) is not fused:  # made on the spot
            fused.__name__, fused.__qualname__ = original.__name__, original.__qualname__  # policies go by names
            fused.__module__ = original.__module__
            fused.__doc__ = original.__doc__
            fused.__reduce_ex__ = _reduce_ex  # type: ignore[method-assign, assignment]
        _originals[fused] = original
        _fused[original, recipe] = fused
    return _fused[original, recipe]


@contextmanager
def _unannounced(original: Any) -> Iterator[None]:
    """Here a class may be derived without the user's ``__init_subclass__``, by which it would get into a registry.

    That of transformers does its work, on fused classes too.
    """
    hook = original.__init_subclass__
    if isinstance(hook, types.BuiltinMethodType) or hook.__module__.startswith("transformers."):  # object's own
        yield
        return
    own = original.__dict__.get("__init_subclass__")
    original.__init_subclass__ = classmethod(lambda cls, **told: None)
    try:
        yield
    finally:
        if own is None:
            del original.__init_subclass__
        else:
            original.__init_subclass__ = own


def first_parameter(cls: Any) -> str:
    """The name of the first argument of its forward, under which a call may give it."""
    return list(signature(cls.forward).parameters)[1]  # after self


def original_class(module: nn.Module) -> type:
    """The class of a module without what patching did to it."""
    return _originals.get(type(module), type(module))


def found_class(module: nn.Module) -> type:
    """The class that patching met, or would: ``original_class``, also where a class was derived from the fused one."""
    return next((_originals[base] for base in type(module).__mro__ if base in _originals), type(module))


def is_fused(module: nn.Module) -> bool:
    """Whether patching gave the module its class, or the one that its class was derived from (as FSDP2 does).

    A module that the user built from tfm_kernels.nn was not patched, though its class is a fused one for others.
    """
    return OPTIONS in module.__dict__ and any(c in _originals for c in (type(module), *type(module).__bases__))


def is_derived(module: nn.Module) -> bool:
    """Whether the module's class was derived from a fused one after patching, as fully_shard does."""
    return is_fused(module) and type(module) not in _originals


def options(module: nn.Module) -> Options:
    """What patching noted for this module; the defaults where it did not."""
    return module.__dict__.get(OPTIONS) or Options("")


def swap(module: nn.Module, told: Options) -> None:
    """Gives a module its fused class. The module's own class must be the exact one that the recipe knows."""
    module.__class__ = fused_class(type(module), told.recipe)
    note(module, told)


def again(module: nn.Module, fused: type, told: Options) -> None:
    """Gives a module the fused class that it had, whatever was declared meanwhile."""
    module.__class__ = fused
    note(module, told)


def unswap(module: nn.Module) -> None:
    """Gives a module its own class back and leaves it its options; one whose class was derived since stays."""
    module.__class__ = original_class(module)


def note(module: nn.Module, told: Options) -> None:
    """Gives a fused module its options, or new ones."""
    module.__dict__[OPTIONS] = told
    if _has_backend(module):
        module.__dict__["backend"] = told.backend


def _has_backend(module: nn.Module) -> bool:
    """Whether the fused class, of tfm_kernels.nn, keeps the backend in a place of its own."""
    return hasattr(type(module), "backend") and not hasattr(found_class(module), "backend")


def restore(module: nn.Module) -> bool:
    """Gives a module its own class back; True where there was something to undo."""
    if OPTIONS not in module.__dict__:
        return False
    if is_fused(module) and _has_backend(module):
        module.__dict__.pop("backend", None)
    fused, bases = type(module), type(module).__bases__
    if fused in _originals:
        module.__class__ = _originals[fused]
    elif any(base in _originals for base in bases):  # as fully_shard derives FSDPName(FSDPModule, Fused), parametrize
        own = {name: value for name, value in vars(fused).items() if _is_own(name, value, bases)}
        module.__class__ = type(fused.__name__, tuple(_originals.get(base, base) for base in bases), own)
    for name, value in module.__dict__.items():  # what accelerate keeps, and leaves as ``forward`` when it goes
        method = _method_of(fused, value)
        if method is not None and value.__self__ is module:
            module.__dict__[name] = getattr(type(module), method).__get__(module)
        elif callable(value):
            _hand_back(value, fused, type(module))
    del module.__dict__[OPTIONS]
    _fallbacks.pop(module, None)
    return True


def _method_of(fused: type, value: Any) -> str | None:
    """The name of the method of a fused class that ``value`` is, bound or not; None for all else."""
    function = getattr(value, "__func__", value)
    own = isinstance(function, types.FunctionType) and getattr(fused, function.__name__, None) is function
    return function.__name__ if own else None


def _hand_back(wrapper: Any, fused: type, original: type) -> None:
    """Lets wrappers around a method of a fused class, one in another, call what a module's class has in its place.

    accelerate's ``prepare`` leaves such wrappers on an instance. The module may be fused again, and a copy of it, which
    shares them, may still be.
    """
    links, seen = [wrapper], set()
    while links:
        link = links.pop()
        if id(link) in seen:
            continue
        seen.add(id(link))
        if isinstance(link, (types.MethodType, functools.partial)):
            links.append(link.__func__ if isinstance(link, types.MethodType) else link.func)
        elif isinstance(link, types.FunctionType) or "__wrapped__" in getattr(link, "__dict__", ()):
            for holder, name, value in _held(link):
                method = _method_of(fused, value)
                if method is None:
                    links.append(value)
                elif getattr(original, method, None) is not value:
                    asking = _asks_its_class(getattr(original, method))
                    setattr(holder, name, asking.__get__(value.__self__) if hasattr(value, "__self__") else asking)


def _held(wrapper: Any) -> Iterator[tuple[Any, str, Any]]:
    """(holder, attribute, value) for all that a function or an object keeps of others."""
    for cell in getattr(wrapper, "__closure__", None) or ():
        with suppress(ValueError):  # of an empty one
            yield cell, "cell_contents", cell.cell_contents
    for name, value in list(vars(wrapper).items()):
        yield wrapper, name, value


def _asks_its_class(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(type(self), function.__name__)(self, *args, **kwargs)

    return method


def _is_own(name: str, value: Any, bases: tuple[type, ...]) -> bool:
    """Whether a derived class has an attribute of its own; making the class anew wraps a base's method once more."""
    wrapped = getattr(value, "__wrapped__", None)  # as transformers wraps the forward of each subclass of its layers
    inherited = wrapped is not None and any(getattr(base, name, None) is wrapped for base in bases)
    return not inherited and name not in ("__dict__", "__weakref__")


def fell_back(module: nn.Module, reason: str | None) -> bool:
    """Whether a fused module runs its original code, for a reason, which is noted.

    A compiled graph must hold no such state, so nothing is noted there.
    """
    if reason is not None and not torch.compiler.is_compiling():
        counts = _fallbacks.setdefault(module, {})
        counts[reason] = counts.get(reason, 0) + 1
    return reason is not None


@contextmanager
def unnoted(model: nn.Module) -> Iterator[None]:
    """Within the block no module of the model notes that it runs its original code: for calls that nobody asked for."""
    before = {module: fallbacks(module) for module in model.modules()}
    try:
        yield
    finally:
        for module, counts in before.items():
            _fallbacks.pop(module, None)
            if counts:
                _fallbacks[module] = counts


def fallbacks(module: nn.Module) -> dict[str, int]:
    """reason -> how often the module ran its original code for it."""
    return dict(_fallbacks.get(module, {}))


def _load_options(recipe: str, backend: str | None, packed: bool, previous: str | None, found: Any = None) -> Options:
    if recipe in on_load:
        on_load[recipe]()
    return Options(recipe, backend, packed, previous, found)


def _reduce_ex(self: nn.Module, protocol: Any) -> Any:
    fused: Any = next(cls for cls in type(self).__mro__ if cls in _originals)
    reduced = super(fused, self).__reduce_ex__(max(int(protocol), 2))
    if type(self) is not fused or reduced[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
        return reduced  # a class derived from ours, or one that has its own way of being pickled
    return _rebuild, (_originals[fused], options(self).recipe), *reduced[2:]


def _rebuild(original: Any, recipe: str) -> nn.Module:
    """An empty module of the fused class, for copy and pickle to fill."""
    for name in (recipe, recipe.partition("#")[0]):  # of several classes of one name this process may have one
        if name in _builders:
            original = fused_class(original, name)
            return original.__new__(original)
    warnings.warn(
        f"patch: the recipe {recipe!r} is not registered in this process, so {original.__name__} runs its own code",
        stacklevel=2,
    )
    return original.__new__(original)
