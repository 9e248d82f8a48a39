"""What packed execution leaves out: 0 at padded positions, in the patched model and in the original that it is held to.

An encoder stack that runs packed gives 0 at padded positions, where the original computes values of no meaning
(``patch(packed=True)``). So the original, in float64 and in the dtype, is run with the same zeros in the same places,
and everything that the model then makes of them is compared, position by position. Whether the model may be given zeros
there is asked apart, of the float64 original alone, run as it is and with the zeros: nothing it gives may differ but
the padded positions of an output that has positions. A mean over all positions does, a masked one does not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from ..patching import packed, registry, swap
from .report import Row
from .runs import Run

EQUAL = 2.0**-40  # two float64 runs that differ by less, relatively, differ by rounding


@dataclass
class LeftOut:
    """Which stacks of a patched model ran packed, and what they left out.

    Attributes:
        calls: name of the stack -> for each of its calls in order, bool (B, T) or (T, B) as its output lies, True at
            padding; None for a call that ran padded.
    """

    calls: dict[str, list[Tensor | None]] = field(default_factory=dict)

    @contextmanager
    def applied(self, original: nn.Module, reached: set[str] | None = None) -> Iterator[None]:
        """Within the block the stacks of the original give 0 where those of the patched model did.

        ``reached`` grows by the stacks to whose padding a gradient comes back, where it is then dropped.
        """
        with ExitStack() as hooks:
            for name, masks in self.calls.items():
                hooks.enter_context(_zeroing(original.get_submodule(name), name, masks, reached))
            yield

    def masks(self) -> list[Tensor]:
        """Every padding that was left out."""
        return [mask for masks in self.calls.values() for mask in masks if mask is not None]


@contextmanager
def observed(patched: nn.Module) -> Iterator[LeftOut]:
    """Gives what the calls within the block leave out. No call but of the stacks themselves is watched."""
    recipes = {recipe.name for recipe in registry.registered() if recipe.packs}
    stacks = {m: n for n, m in patched.named_modules() if swap.is_fused(m) and swap.options(m).recipe in recipes}
    found = LeftOut({name: [] for name in stacks.values()})

    def watch(stack: nn.Module, how: packed.Packed) -> None:
        if stack in stacks:
            found.calls[stacks[stack]][-1] = how.padding()

    handles = [m.register_forward_pre_hook(lambda m, args: found.calls[stacks[m]].append(None)) for m in stacks]
    packed.WATCHERS.append(watch)
    try:
        yield found
    finally:
        packed.WATCHERS.remove(watch)
        for handle in handles:
            handle.remove()
        for name, masks in list(found.calls.items()):
            if not any(mask is not None and bool(mask.any()) for mask in masks):
                del found.calls[name]


@contextmanager
def _zeroing(stack: nn.Module, name: str, masks: list[Tensor | None], reached: set[str] | None) -> Iterator[None]:
    calls = count()

    def zero(module: nn.Module, args: tuple, output: Any) -> Any:
        mask = masks[next(calls) % len(masks)]  # a checkpointed stack is called again in the backward
        if mask is None:
            return output
        if isinstance(output, Tensor):
            return _zeroed(output, mask, name, reached)
        output.last_hidden_state = _zeroed(output.last_hidden_state, mask, name, reached)
        return output

    handle = stack.register_forward_hook(zero)
    try:
        yield
    finally:
        handle.remove()


def _zeroed(output: Tensor, mask: Tensor, name: str, reached: set[str] | None) -> Tensor:
    zeroed = output.masked_fill(mask.unsqueeze(-1), 0.0)
    if reached is not None and zeroed.requires_grad:

        def look(gradient: Tensor) -> None:
            if bool((gradient[mask].abs() > EQUAL * gradient.abs().max()).any()):
                reached.add(name)

        zeroed.register_hook(look)
    return zeroed


def nowhere(outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``at_padding`` where nothing was left out."""
    return {}


def at_padding(raw: Mapping[str, Tensor], zeroed: Mapping[str, Tensor], left_out: LeftOut) -> dict[str, Tensor]:
    """Name -> bool over the leading axes, True at padding: the outputs that zeros change there and nowhere else.

    Args:
        raw: the outputs of the float64 original as it is.
        zeroed: the same with the zeros.
        left_out: where the zeros are.
    """
    masks = [way for mask in left_out.masks() for way in (mask, mask.T, mask.flatten(), mask.T.flatten())]
    found: dict[str, Tensor] = {}
    for name, changed in (_changed(raw, zeroed) if masks else {}).items():
        for mask in masks:
            if changed.shape[: mask.dim()] == mask.shape and not bool(changed[~mask].any()):
                found[name] = mask
                break
    return found


def notes(ignored: Mapping[str, Tensor]) -> list[str]:
    """A sentence for each output of which ``at_padding`` told the padding."""
    told = "positions are padding: packed execution gives 0 there, and both originals were given 0 there to compare"
    return [f"{name}: {int(mask.sum())} of {mask.numel()} {told}" for name, mask in ignored.items()]


def reads(raw: Run, zeroed: Run, left_out: LeftOut, reached: set[str], *, with_loss: bool) -> list[Row]:
    """A failure for each thing that depends on what the original computes where packed execution gives 0.

    Args:
        raw: the float64 original as it is.
        zeroed: the same with the zeros.
        left_out: where the zeros are.
        reached: the stacks to whose padding a gradient came back.
        with_loss: whether the two have a loss of the user's.
    """
    if not left_out.calls:
        return []
    wrong = [("output", name) for name in _elsewhere(raw.outputs, zeroed.outputs, left_out)]
    if with_loss and raw.loss is not None and zeroed.loss is not None:
        wrong += [("output", name) for name in _changed({"loss": raw.loss}, {"loss": zeroed.loss})]
    wrong += [("buffer", f"buffer {name}") for name in _elsewhere(raw.buffers, zeroed.buffers, left_out)]
    stacks, remedy = " and ".join(name or "the model" for name in left_out.calls), "patch(packed=False) computes them"
    told = f"depends on what {stacks} gives at padded positions, where packed execution gives 0: {remedy}"
    if not wrong and reached:
        wrong = [("gradient", "gradient")]
        told = f"goes to padded positions of {stacks}, where packed execution drops it: {remedy}"
    return [Row(kind, "", name, 0, 0.0, math.inf, 0.0, "form", told) for kind, name in wrong]


def _elsewhere(raw: Mapping[str, Tensor], zeroed: Mapping[str, Tensor], left_out: LeftOut) -> list[str]:
    """Names of what zeros change in other places than those of padding."""
    return sorted(_changed(raw, zeroed).keys() - at_padding(raw, zeroed, left_out).keys())


def _changed(raw: Mapping[str, Tensor], zeroed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Name -> bool, True where the two differ, for what differs at all."""
    both = {name: (value, zeroed[name]) for name, value in raw.items() if name in zeroed}
    differ = {name: _differ(*pair) for name, pair in both.items()}
    return {name: where for name, where in differ.items() if bool(where.any())}


def _differ(a: Tensor, b: Tensor) -> Tensor:
    if a.shape != b.shape:
        return torch.ones_like(a, dtype=torch.bool)
    if not a.is_floating_point():
        return a != b
    size = torch.nan_to_num(a, 0.0, 0.0, 0.0).abs().max() if a.numel() else 0.0
    return ~((a == b) | ((a - b).abs() <= EQUAL * size) | (a.isnan() & b.isnan()))
