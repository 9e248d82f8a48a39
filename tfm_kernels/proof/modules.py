"""Every replaced module on its own: fed what the original feeds it, compared with what PyTorch makes of that.

A whole model tells that something is wrong; a module fed alone tells where. Hooks on the patched model would switch
fusion off, so the inputs are recorded in a float64 run of the original.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from . import nearby, precision
from .report import Row
from .rule import Judge
from .runs import Call, Run, run
from .side_by_side import Models, PatchedFails, Trio, first_line, not_autocast, run_alone


def replaced(original: nn.Module, patched: nn.Module) -> list[str]:
    """Names of the modules that patching changed.

    That is: their class, their forward, or the attention implementation they look up in their configuration (of nested
    modules that share one configuration, the innermost).
    """
    others = dict(patched.named_modules())
    changed, looked_up = [], []
    for name, module in original.named_modules():
        other = others.get(name)
        if (
            other is None
            or type(other) is not type(module)
            or "forward" in other.__dict__.keys() - module.__dict__.keys()
        ):
            changed.append(name)
        elif _attention_of(module) != _attention_of(other):
            looked_up.append(name)
    inner = [
        name for name in looked_up if not any(o != name and o.startswith(f"{name}." if name else "") for o in looked_up)
    ]
    return [name for name, _ in original.named_modules() if name in changed or name in inner]


def _attention_of(module: nn.Module) -> Any:
    """None for modules without parameters: rotary positions hold the configuration, too, and attend to nothing."""
    if next(module.parameters(), None) is None:
        return None
    return getattr(getattr(module, "config", None), "_attn_implementation", None)


def record(
    model: nn.Module, call: Call, names: list[str], dtype: torch.dtype, loss_fn: Callable | None = None
) -> tuple[Run, dict[str, Call], list[str]]:
    """Runs the float64 model once, as it is, and keeps the arguments of the first call of each module, in ``dtype``.

    All floating ones are made to require gradients.

    Returns:
        What the run gave, without gradients; name -> arguments; a note for each module whose arguments could not be
        kept.
    """
    calls: dict[str, Call] = {}
    notes: list[str] = []
    handles = []
    for name in names:

        def keep(module: nn.Module, args: tuple, kwargs: dict, name: str = name) -> None:
            if name not in calls:
                try:
                    calls[name] = Call(args, kwargs).to(None)
                except Exception as error:  # an argument that cannot be copied: any class may refuse in its own way
                    notes.append(f"{name} was not fed alone: its arguments cannot be copied ({first_line(error)})")
                    calls[name] = Call((), {"uncopied": True})

        handles.append(model.get_submodule(name).register_forward_pre_hook(keep, with_kwargs=True))
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it would pass the children of a layer by
    try:
        with torch.no_grad(), not_autocast(model, call):
            exactly = functools.partial(precision.exactly, dtype)
            raw = run(model, call.to(torch.float64), dtype, loss_fn=loss_fn, within=exactly)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for handle in handles:
            handle.remove()
    notes += [
        f"{name} was not fed alone: this call of the model does not reach it" for name in names if name not in calls
    ]
    kept = {name: call for name, call in calls.items() if "uncopied" not in call.kwargs}
    return raw, {name: call.to(dtype, all_gradients=True) for name, call in kept.items()}, notes


def compare_alone(
    models: Models,
    calls: dict[str, Call],
    judge: Judge,
    notes: list[str],
    progress: Callable[[str], None],
    wrong: bool = False,
) -> Iterator[Row]:
    """Outputs and gradients of each module fed alone.

    Args:
        models: the whole ones.
        calls: name -> arguments.
        judge: the rule.
        notes: grows by the modules that the original itself cannot run alone.
        progress: told of each module.
        wrong: whether it is known that something is; then, and from the first module on that is wrong, no gradient is
            measured again nearby.
    """
    for number, (name, call) in enumerate(calls.items()):
        progress(f"module {number + 1} of {len(calls)}, {name}")
        alone = _Alone(name, models.at(name), call, judge, _is_stack(name, calls))
        try:
            trio = alone.run()
        except PatchedFails as error:
            wrong = True
            yield Row(
                "module", name, "call", 0, 0.0, float("inf"), 0.0, "form", f"fails where the original runs ({error})"
            )
            continue
        except Exception as error:  # what a module asks of its surroundings, only it knows
            notes.append(f"{name} was not fed alone: the original cannot run so ({first_line(error)})")
            continue
        rows, gradients = alone.outputs(trio), alone.gradients(trio)
        if not wrong and all(row.passed for row in rows):
            gradients = nearby.judged_again(gradients, alone.models, judge.dtype, alone.gradients_again, progress)
        wrong = wrong or not all(row.passed for row in rows + gradients)
        yield from rows + gradients


@dataclass(frozen=True)
class _Alone:
    """One module, three times, what it is fed, and the rule.

    Attributes:
        stack: whether it hands errors on among its own layers, as a whole model does.
    """

    name: str
    models: Models
    call: Call
    judge: Judge
    stack: bool

    def run(self) -> Trio:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return run_alone(self.models, self.call, self.judge.dtype)

    def outputs(self, trio: Trio) -> list[Row]:
        """And the buffers that changed."""
        leaning = None if self.stack else 0.05
        rows = self.judge.compare("module", *trio.outputs(), module=self.name, leaning=leaning, by_row=True)
        buffers = [{f"buffer {key}": value for key, value in found.items()} for found in trio.buffers()]
        return rows + self.judge.compare("module", *buffers, module=self.name)

    def gradients(self, trio: Trio) -> list[Row]:
        found = [{f"gradient of {key}": value for key, value in found.items()} for found in trio.gradients()]
        leaning = None if self.stack else 0.15
        return self.judge.compare(
            "module", *found, module=self.name, leaning=leaning, rows_summed=trio.rows, no_more=True
        )

    def gradients_again(self) -> list[Row]:
        return self.gradients(self.run())


def _is_stack(name: str, names: Iterable[str]) -> bool:
    """Whether a module repeats replaced modules, "layer.0.output", "layer.1.output", and hands errors on among them."""
    inner = [
        re.sub(r"\b\d+\b", "*", other)
        for other in names
        if other != name and other.startswith(f"{name}." if name else "")
    ]
    return len(inner) > len(set(inner))
