"""Recipes: how modules of one kind are recognised and what runs in their place."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from . import guard, swap


def _nothing(module: nn.Module) -> Iterable[nn.Module]:
    return ()


def _no_find(module: nn.Module) -> None:
    return None


@dataclass(frozen=True)
class Recipe:
    """How modules of one kind are fused.

    Attributes:
        name: unique, such as "bert.layer"; a pickle refers to the recipe by it.
        recognise: recognise(module) answers True for "mine", False for "not mine", or part of a sentence, "its forward
            is not the known one", where the module looks like mine and must yet be left as it is.
        fuse: fuse(original class) returns a subclass of it with the fused forward. The class keeps no state.
        what: what then happens, for the report: "dropout, sum and LayerNorm in one pass".
        covers: covers(module) gives the descendants that the fused forward runs itself; they are not patched on their
            own.
        packs: whether the recipe is for running padded batches packed, and so not for ``patch(packed=False)``.
        whole: whether it is for models of transformers whose attention knows no registry; no other is tried on them.
        projects: projects(module) gives the modules, of its descendants or itself, whose weight the fused forward
            multiplies by through linear.py or frozen.py; ``patch(freeze=True)`` keeps packed copies for them.
        finds: finds(module) gives what to keep in the options of a module that was recognised: what was found of it.
        unasked: outputs, named as prove names them ("output.1"), that the original gives in every call and the fused
            forward only where the call asks for them: attention weights.
    """

    def __repr__(self) -> str:
        return f"<Recipe {self.name}>"

    name: str
    recognise: Callable[[nn.Module], bool | str]
    fuse: Callable[[type], type]
    what: str
    covers: Callable[[nn.Module], Iterable[nn.Module]] = _nothing
    packs: bool = False
    whole: bool = False
    projects: Callable[[nn.Module], Iterable[nn.Module]] = _nothing
    unasked: tuple[str, ...] = ()
    finds: Callable[[nn.Module], Any] = _no_find


class Refused(ValueError):
    """A declaration that is not true of a module.

    Attributes:
        recipe: the name of the declaration's recipe.
    """

    def __init__(self, recipe: str, message: str) -> None:
        super().__init__(message)
        self.recipe = recipe


_recipes: list[Recipe] = []
_classes: dict[str, type] = {}  # name of a recipe -> the one class it is for
_true: set[str] = set()  # names of recipes whose declaration was found true of some module


def register_recipe(recipe: Recipe, *, first: bool = True) -> Recipe:
    """Makes ``patch`` try a recipe on every module; a recipe of the same name is replaced.

    Args:
        recipe: the recipe.
        first: before the recipes that are there, so that it wins over them; otherwise after them.

    Raises:
        TypeError: not a Recipe.
    """
    if not isinstance(recipe, Recipe):
        raise TypeError(f"register_recipe: recipe must be a Recipe, got {type(recipe).__name__}")
    _recipes[:] = [other for other in _recipes if other.name != recipe.name]
    _true.discard(recipe.name)
    _recipes.insert(0 if first else len(_recipes), recipe)
    swap.declare(recipe.name, recipe.fuse)
    return recipe


def name_of(cls: type) -> str:
    """The name of a class' recipe, by which pickles know it: that of the class, with a number for others of one name.

    A function makes a class of the same name in each call, and so does a cell of a notebook that is run again.
    """
    plain = f"{cls.__module__}.{cls.__qualname__}"
    for name in itertools.chain([plain], (f"{plain}#{number}" for number in itertools.count(2))):
        if _classes.setdefault(name, cls) is cls:
            return name
    raise AssertionError


def backend(module: nn.Module) -> str | None:
    """The backend that a fused module was patched with, to pass on to the ops: None chooses automatically."""
    return swap.options(module).backend


def unasked(module: nn.Module) -> tuple[str, ...]:
    """``Recipe.unasked`` of the recipe that a module was fused by."""
    name = swap.options(module).recipe
    return next((each.unasked for each in _recipes if each.name == name), ())


def was_true(recipe: str) -> bool:
    """Whether the declaration behind a recipe was found true of some module yet."""
    return recipe in _true


def registered() -> tuple[Recipe, ...]:
    """All recipes in the order in which ``patch`` tries them."""
    return tuple(_recipes)


def recipe(cls: type[nn.Module], *, what: str = "a registered recipe", covers: Iterable[str] = ()) -> Callable:
    """Registers a function as the fused forward of a user's module class: a decorator.

    The function takes the arguments of the class's own forward, ``self`` first. It may call the children as modules
    (then hooks, adapters and quantised layers in them keep working) and ``tfm_kernels.ops`` between them, with
    ``backend=tfm_kernels.patching.backend(self)``. Where it returns NotImplemented the original forward runs, and the
    report says so.

    Args:
        cls: the class, matched exactly; its subclasses are left as they are.
        what: what the report says of such modules.
        covers: names of children, dotted, whose weights the function reads without calling them. They must be of
            torch.nn; where one has hooks, a forward of its own or a derived class (an adapter, a quantised layer), the
            original forward runs.

    Returns:
        The decorator; it returns the function unchanged.

    Raises:
        TypeError: ``cls`` is not a subclass of nn.Module.

    Example:
        >>> @tfk.patching.recipe(MultiHeadAttention)
        ... def fused(self, q, k, v, mask=None):
        ...     heads = lambda t: t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        ...     keep = None if mask is None else tfk.Mask.keep(mask != 0)
        ...     q, k, v = heads(self.w_q(q)), heads(self.w_k(k)), heads(self.w_v(v))
        ...     out = tfk.ops.attention(q, k, v, keep, backend=tfk.patching.backend(self))
        ...     return self.w_o(out.transpose(1, 2).flatten(2))
    """
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise TypeError(f"recipe: cls must be a subclass of torch.nn.Module, got {cls!r}")
    paths = tuple(covers)

    def check(module: nn.Module) -> None:
        for path in paths:
            guard.require_child("recipe", "covers", module, path)

    def register(forward: Callable[..., Any]) -> Callable[..., Any]:
        register_recipe(from_forward(name_of(cls), cls, forward, what, paths, check))
        return forward

    return register


def from_forward(
    name: str,
    cls: type[nn.Module],
    run: Callable[..., Any],
    what: str,
    covers: tuple[str, ...] = (),
    check: Callable[[nn.Module], Any] | None = None,
    calls: tuple[str, ...] | None = None,
    reads: tuple[type, ...] = (),
) -> Recipe:
    """The recipe of one class: ``run`` in place of its forward, which still runs where ``run`` gives NotImplemented.

    ``check(module)`` raises ValueError where what was declared is not true of a module of the class, which recognise
    raises as Refused, and gives part of a sentence where it is to be left as it is, or what was found of it. ``calls``
    names the children that ``run`` calls: the forward runs where one of the others, which it may call, has hooks. None:
    not looked at. ``reads``: classes, beside torch.nn's own, that the children it covers may have.
    """
    reached = None if calls is None else (*calls, *covers)

    def why_not(module: nn.Module) -> str | None:
        reason = guard.why_not_stock(module, covers, *reads)
        return guard.why_not_unwatched(module, reached) if reason is None and reached is not None else reason

    def fuse(original: Any) -> type:
        class Fused(original):
            @functools.wraps(original.forward)
            def forward(self, *args: Any, **kwargs: Any) -> Any:
                reason = why_not(self)
                if reason is None:
                    result = run(self, *args, **kwargs)
                    if result is not NotImplemented:
                        return result
                    reason = "its recipe does not serve this call"
                swap.fell_back(self, reason)
                return super().forward(*args, **kwargs)

        return Fused

    def recognise(module: nn.Module) -> bool | str:
        if type(module) is not cls:
            return False
        try:
            answer = None if check is None else check(module)
        except ValueError as error:
            raise Refused(name, str(error)) from None
        if isinstance(answer, str):
            return answer
        _true.add(name)
        return why_not(module) or True

    def covered(module: nn.Module) -> list[nn.Module]:
        return [module.get_submodule(path) for path in covers]

    return Recipe(name, recognise, fuse, what, covered, finds=_no_find if check is None else check)
