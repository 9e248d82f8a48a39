"""Whether a class computes the attention that its declaration says, tried on a few rows.

What cannot be tried is believed: other layers than nn.Linear, ones with a forward of their own, weights that no copy
can be made of. A forward that refuses all rows keeps its module as it is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from . import guard
from .declaration import calling, number, probability
from .declared_attention import AXES, MASKS, DeclaredAttention
from .effects import require_pure
from .found import Found, form, require_gradients
from .specimen import attempt, differ, fresh, require_dropouts, require_unwritten, specimen, untried

_OP = "declare_attention"
_ROWS = 2
_LENGTH = 5
_LONG = (70, 64, 33, 16, 8)  # beyond a window of 64, or as long as a forward takes


def require_attention(cls: type[nn.Module], module: nn.Module, declared: DeclaredAttention) -> str | Found | None:
    """Raises where the forward of ``cls`` is not what is declared: without a mask, with one, and in training.

    What it found beyond that; part of a sentence where the forward refuses to be tried; None where it is believed.
    """
    copy = specimen(module, wide=True)
    if copy is None:
        return None
    layers = [guard.child(copy, name) for name in declared.projections]
    others = (declared.norm, *declared.head_norms, declared.out)
    *norms, out = (None if name is None else guard.child(copy, name) for name in others)
    called = [layer for layer in (*layers, *norms, out) if layer is not None]
    if not all(isinstance(layer, nn.Linear) and layer.weight.is_floating_point() for layer in layers):
        return None
    if any("forward" in layer.__dict__ for layer in called):
        return None
    if declared.kv_heads is None and len(layers) == 3 and layers[0].out_features != layers[1].out_features:
        raise ValueError(
            f"{_OP}: kv_heads must say how many heads the keys have where {declared.projections[0]} gives "
            f"{layers[0].out_features} features and {declared.projections[1]} {layers[1].out_features}, got None"
        )
    of = functools.partial(_Trial, cls, copy, layers, declared)
    trial = of(_LENGTH)
    require_pure(copy, [lambda: trial.run_once(declared)], called, pictures=True)  # which are lost, as is said
    alone = trial.require(declared, [None], _ALONE) is not None
    found = Found()
    right = None if declared.arguments[3] is None else trial.require_masks(declared, alone, found)
    if not alone and right is None:
        _, refused = attempt(copy, lambda: trial.forward(None))
        return None if refused is None else untried(refused)
    given = None if alone else right
    for length in _LONG:
        long = of(length)
        masks = [None if alone else long.like(declared, given)]
        if long.require(declared, masks, _FURTHER.format(length)) is not None:
            break
    if right is not None and declared.mask_axis is None:  # one of two axes may also be (B, Tk), where both fit
        square = of(_ROWS)
        square.require(declared, square.masks(declared)[-1], _OF_TWO)
    for mask in [None] * alone + [right] * (right is not None):
        firsts = (lambda run=run: _parts(run())[0] for run in trial.runs(declared, mask))
        require_gradients(_OP, cls, copy, trial.inputs, firsts)
    _require_drops(cls, trial, declared, given, [inner for layer in called for inner in layer.modules()], out)
    found.look_at_dtypes(copy, lambda narrow: of(_LENGTH).runs(declared, given))
    return found


def _require_drops(
    cls: type[nn.Module], trial: _Trial, declared: DeclaredAttention, mask: Any, inside: list[nn.Module], out: Any
) -> None:
    """Raises unless the forward, in training, drops exactly as declared, in the weights that it returns too."""

    def require(declared: DeclaredAttention) -> None:
        drops = (declared.dropout, declared.out_dropout)
        forward, written = lambda: _joined(trial.forward(mask)), lambda: _joined(trial.written(declared, mask))
        sizes = functools.partial(trial.dropped, declared)
        require_dropouts(_OP, cls, trial.copy, drops, inside, out, forward, written, sizes)

    try:
        require(declared)
    except ValueError as error:
        if declared.weights is not True:
            raise
        try:
            require(dataclasses.replace(declared, weights="before_dropout"))
        except ValueError:
            raise error from None
        raise ValueError(
            f"{_OP}: {cls.__name__}.forward must give the weights with dropout's effect where weights=True, got those "
            "without: weights='before_dropout' says so"
        ) from None


def _joined(result: Any) -> Tensor:
    return torch.cat([part.flatten() for part in _parts(result) if part is not None])


_ALONE, _MASKED, _OF_TWO, _FURTHER = "without a mask", "with a mask", "with a mask of two axes", "of {} tokens"


class _Trial:
    """Calls of one module's forward on the same few rows, and what declarations say of them."""

    def __init__(
        self, cls: type[nn.Module], copy: Any, layers: list[nn.Linear], declared: DeclaredAttention, length: int
    ) -> None:
        self.cls, self.copy, self.length = cls, copy, length
        self.heads = number(copy, declared.heads)
        *names, self.last = declared.arguments
        generator, weight = torch.Generator("cpu").manual_seed(0), layers[0].weight
        self.named: dict[str, Any] = {}
        for name, layer in zip(names, (layers + layers[-1:] * 2)[:3], strict=True):
            rows = torch.randn(_ROWS, length, layer.in_features, generator=generator, device="cpu")
            self.named[name] = (2 * rows).to(weight.device, weight.dtype)
        self.inputs = [self.named[name] for name in names]
        self.call: tuple[Any, Any] = ((), ())  # what the forward was last given, and the copies that it had of it

    def forward(self, mask: Tensor | None) -> Any:
        """What the forward gives."""
        given = self.named if self.last is None else {**self.named, self.last: mask}
        self.call = given.values(), fresh(given.values())
        return calling(self.cls, *given)(self.copy, *self.call[1])

    def run_once(self, declared: DeclaredAttention) -> None:
        """Runs the forward with and without a mask, where it does."""
        masks = [] if self.last is None else [each[0] for each in self.masks(declared)]
        for mask in (None, *masks):
            with contextlib.suppress(Exception):  # a forward may want anything
                self.forward(mask)

    def written(self, declared: DeclaredAttention, mask: Any) -> tuple[Any, ...]:
        """What it is to give."""
        return declared.run(self.copy, self.inputs, mask, "reference")

    def runs(self, declared: DeclaredAttention, mask: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """The forward, and what is declared, under a mask like this one, which may be another trial's."""
        if mask is not None:
            mask = self.like(declared, mask)
        return functools.partial(self.forward, mask), functools.partial(self.written, declared, mask)

    def dropped(self, declared: DeclaredAttention) -> list[int]:
        """How many elements each declared dropout acts on."""
        queries, keys = (t.shape[1] for t in self.inputs[:2])
        result, _ = attempt(self.copy, lambda: self.written(declared, None)[0].numel())
        sizes = (_ROWS * self.heads * queries * keys, result)
        names = (declared.dropout, declared.out_dropout)
        return [size for size, name in zip(sizes, names, strict=True) if probability(self.copy, name) > 0.0]

    def require(self, declared: DeclaredAttention, masks: list[Any], when: str) -> list[Any] | None:
        """Raises where the forward gives other numbers under one of ``masks``; those that it takes, None: none."""
        taken = []
        for mask, got in self._taken(masks):
            taken.append(mask)
            require_unwritten(_OP, self.cls, *self.call)
            self._require_form(declared.weights, got)
            reason = self._why_not(declared, mask, got)
            if reason is not None:
                raise ValueError(
                    f"{_OP}: {self.cls.__name__}.forward must give {declared.formula()}, got {reason} {when}: "
                    f"{self._hint(declared, when)}"
                )
        return taken or None

    def require_masks(self, declared: DeclaredAttention, alone: bool, found: Found) -> Any:
        """Raises where the forward does not read masks as declared, in every dtype; one that it takes.

        Forms of masks that it reads in another way are left to it, provided that some form is right. None where it
        runs neither with a mask nor, as ``alone`` says, without.
        """
        right: dict[tuple[int, bool], Tensor] = {}
        wrong, failed = set(), None
        wanted = self.masks(declared)
        for place, masks in enumerate((*wanted, *self._of_other_shapes(declared))):
            try:
                taken = self.require(declared, masks, _MASKED)
            except ValueError as error:
                wrong.add(form(masks[0]))
                failed = failed or (error.with_traceback(None) if place < len(wanted) else None)
            else:
                right |= {} if taken is None else {form(taken[0]): right.get(form(taken[0]), taken[0])}
        right = {each: mask for each, mask in right.items() if each not in wrong}
        axes = [masks[0].dim() for masks in wanted]
        first = next((right[of] for axis in axes for of in sorted(right) if of[0] == axis), None)
        if first is None:
            if failed is not None:
                raise failed
            self._raise_untaken(declared, alone)
            return None
        found.masks = frozenset(right)
        return first

    def _raise_untaken(self, declared: DeclaredAttention, alone: bool) -> None:
        hint = self._guess_of_mask(declared)
        of = f"a mask of mask={declared.mask!r} and mask_axis={declared.mask_axis!r}"
        if hint is not None:
            raise ValueError(f"{_OP}: {self.cls.__name__}.forward must take {of}, got an error: it takes {hint}")
        if alone:
            inputs = tuple(dict.fromkeys(declared.arguments[:3]))
            inputs = declared.arguments[:3] if len(inputs) > 1 else inputs
            raise ValueError(
                f"{_OP}: {self.cls.__name__}.forward must take {of} as its {self.last!r}, got an error for each that "
                f"was tried: with arguments={(*inputs, None)} its own code runs where a call gives one"
            )

    def _taken(self, masks: list[Any]) -> Iterator[tuple[Any, Any]]:
        """The masks that the forward takes, each with what it gives."""
        for mask in masks:
            got, refused = attempt(self.copy, lambda mask=mask: self.forward(mask))  # type: ignore[misc]
            first = None if refused is not None else _parts(got)[0]
            if isinstance(first, Tensor) and bool(first.isfinite().all()):
                yield mask, got

    def _require_form(self, weights: bool | str, got: Any) -> None:
        parts = _parts(got)
        if isinstance(got, Tensor) != bool(weights) and (not weights or (type(got) is tuple and len(parts) == 2)):
            if isinstance(parts[-1], Tensor):
                return
        wanted = "a tuple (result, weights)" if weights else "the result alone"
        held = "the result alone" if isinstance(got, Tensor) else f"a {type(got).__name__} of {len(parts)}"
        raise ValueError(f"{_OP}: {self.cls.__name__}.forward must give {wanted} where weights={weights}, got {held}")

    def _why_not(self, declared: DeclaredAttention, mask: Any, got: Any) -> str | None:
        """None where the forward gave what is declared, else part of a sentence."""
        parts = _parts(got)
        wanted, wrong = attempt(self.copy, lambda: self.written(declared, mask))
        if wrong is not None:
            return f"shapes that give none ({wrong})"
        if parts[0].dtype != wanted[0].dtype:
            return f"another dtype, {parts[0].dtype},"
        return "other numbers" if any(differ(*pair) for pair in zip(parts, wanted, strict=False)) else None

    def masks(self, declared: DeclaredAttention) -> list[list[Any]]:
        """Masks as the declaration describes them, for each number of axes in all dtypes; queries see their own key."""
        device, size = self.inputs[0].device, (self.heads if declared.mask_axis == "heads" else _ROWS)
        place = torch.arange(self.length, device=device)
        every = torch.arange(size, device=device)[:, None, None]
        keep = ((2 * place[:, None] + place + every) % 3 != 0) | (place[:, None] == place)
        if declared.mask_axis == "keys":
            found = [place != 3 - torch.arange(_ROWS, device=device)[:, None]]
        elif declared.mask_axis is None:
            found = [keep[:, None], keep[0] if self.length > _ROWS else place[:, None] >= place]
        else:
            found = [keep]
        return [self._in_dtypes(each, declared.mask) for each in found]

    def _of_other_shapes(self, declared: DeclaredAttention) -> list[list[Any]]:
        """Masks of one row that all queries share, and with numbers of axes that the declaration does not describe."""
        of_four, of_two = self.masks(dataclasses.replace(declared, mask_axis=None))
        (of_keys,) = self.masks(dataclasses.replace(declared, mask_axis="keys"))
        padding = [mask[:, None, None] for mask in of_keys]
        (of_heads,) = self.masks(dataclasses.replace(declared, mask_axis="heads"))
        exact = [mask[None].expand(_ROWS, -1, -1, -1) for mask in of_heads]
        if declared.mask_axis is None:
            return [padding, [mask[None] for mask in of_two], exact]
        if declared.mask_axis == "keys":
            return [of_four, padding, exact]
        rows = [mask[:, None] for mask in of_keys] if declared.mask_axis == "batch" else []
        return [each for each in (rows, of_four, padding, of_two, exact) if each]

    def like(self, declared: DeclaredAttention, mask: Any) -> Any:
        """A mask of this trial's length and dtype, of the shape and kind of another's."""

        def of(each: Tensor) -> tuple[Any, ...]:
            of_heads = each.dim() == 4 and each.shape[1] > 1
            return each.dim(), of_heads, each.shape[-2] == 1, each.dtype if not each.is_floating_point() else None

        every = (each for masks in (*self.masks(declared), *self._of_other_shapes(declared)) for each in masks)
        return next(each for each in every if of(each) == of(mask))

    def _in_dtypes(self, keep: Tensor, meaning: str) -> list[Any]:
        dtype = self.inputs[0].dtype
        added = torch.linspace(-2, 2, keep.numel(), device=keep.device).view(keep.shape).to(dtype)
        added = added.masked_fill(~keep, -1e4)
        if meaning in ("add", "sdpa"):
            return [added, keep]
        shown = ~keep if meaning == "hide" else keep
        return [shown, shown.long(), shown.to(dtype)]

    def _hint(self, declared: DeclaredAttention, when: str) -> str:
        """The declaration's argument that is wrong, where it is one of those that can be guessed."""
        if when.endswith("tokens"):
            return "a window, a cap and positions show in more than a few tokens, and declarations have none"
        if when == _ALONE:
            other = dataclasses.replace(declared, causal=not number(self.copy, declared.causal))
            if any(self._why_not(other, None, got) is None for _, got in self._taken([None])):
                return f"those of causal={other.causal}"
        elif when == _OF_TWO:
            return "mask_axis='keys' says that it is (B, Tk)"
        else:
            guess = self._guess_of_mask(declared)
            if guess is not None:
                return f"those of {guess}"
        return "heads, kv_heads, causal, scale and the order of arguments and projections say which"

    def _guess_of_mask(self, declared: DeclaredAttention) -> str | None:
        for axis in dict.fromkeys((declared.mask_axis, None, *AXES)):
            for mask in MASKS:
                other = dataclasses.replace(declared, mask_axis=axis, mask=mask)
                if other == declared or not any(map(functools.partial(self._agree, other), self.masks(other))):
                    continue
                changes = {"mask_axis": axis} if axis != declared.mask_axis else {}
                changes |= {"mask": mask} if mask != declared.mask else {}
                return ", ".join(f"{name}={value!r}" for name, value in changes.items())
        return None

    def _agree(self, declared: DeclaredAttention, masks: list[Any]) -> bool:
        """Whether the forward takes some of the masks, and gives what is declared under all that it takes."""
        reasons = [self._why_not(declared, mask, got) for mask, got in self._taken(masks)]
        return bool(reasons) and not any(reasons)


def _parts(result: Any) -> tuple[Any, ...]:
    return tuple(result) or (None,) if isinstance(result, (tuple, list)) else (result,)
