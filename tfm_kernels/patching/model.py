"""``patch`` and ``unpatch``: recipes applied to every module of a model, and everything given back."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from .._backend import BACKENDS
from .._flops import tell_torch
from .._transformers import is_model
from . import frozen, huggingface, huggingface_heads, swap
from .registry import Refused, registered, was_true
from .report import Entry, PatchReport
from .specimen import one_patch

_HOLDERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)

_Before = tuple[nn.Module, swap.Options | None, type]  # what a module was: its options, where it was fused, and class


def patch(model: nn.Module, *, packed: bool = True, freeze: bool = False, backend: str | None = None) -> PatchReport:
    """Put the fused layers into an existing model, in place.

    Recognises torch.nn's attention, norms, feed-forward sequences, linear and Transformer layers, Hugging Face
    families, and classes registered with a recipe. The model, its modules and its parameters stay the same objects
    under the same names; checkpoints, optimizers and hooks on the outside go on as before. What the fused code cannot
    honour (hooks on inner modules, adapters, output_attentions ...) runs the original code, call by call.

    ``torch.jit.trace`` works under ``torch.no_grad()`` and with ``check_trace=False``, for the shapes it is shown: a
    trace cannot keep the Python by which the ops record gradients, and its check takes the same graph with other names
    for another one. ``torch.jit.script`` reads the source of forwards and takes no patched model. A patched nn.Linear
    is one for isinstance, but not for tools that ask for exactly that class: ``torch.ao.quantization.quantize_dynamic``
    leaves it as it is, so quantize first.

    What attention and layers are given must not be written into before the backward: ``x = x + layer(x)``, not ``x +=
    layer(x)``, which PyTorch allows where ``batch_first`` makes it copy x, and otherwise refuses as here.

    ``torch.utils.flop_counter`` hooks every module, so that fused ones run their original code under it, and counts
    our operators where it was imported before the package, or before ``patch``.

    Layers that are put into a patched model, and forwards that are replaced in their class, are noticed by patching
    again.

    Kernels are differentiable once, and say so where a gradient is differentiated again, as a gradient penalty does:
    ``patch(model, backend="reference")`` is for that.

    Args:
        model: any module; patching a patched model applies the new options to it.
        packed: run padded batches of recognised encoder stacks and models, decoders among them, packed, so that padding
            costs nothing. Their output is then 0 at padded positions, where the original has values of no meaning; so
            are their caches. Sequences behind one another in a row, which positions tell apart, run packed too. Never
            under torch.compile or graph capture, never below a head that is known to read all positions, one for
            question answering, which takes a softmax over them (it has a child ``qa_outputs``, or its class is called
            ``...ForQuestionAnswering``), and not in calls whose ``labels`` count padding: other than -100 there. A loss
            that the caller computes from logits must leave padding out itself, and behind padding in front a row's
            first token, which that padding foretells and Trainer's label smoothing counts.
        freeze: keep the weights of self-attention's projections, and of every Linear that no fused block runs, packed
            for the matrix library from call to call: for inference on a CPU, at the price of a second copy of them (in
            float32), made at the first call that is large enough to gain. A frozen module in training mode or asked for
            a gradient raises RuntimeError. Weights may be loaded, assigned, moved and written to in place: their copies
            are made anew; so does merging an adapter into them. A few of their elements must not be written to past
            PyTorch's count of writes, by ``.data`` or from NumPy: that need not be noticed. The copies are in no
            state_dict, deepcopy or pickle; ``unpatch`` drops them; under torch.compile and torch.autocast they are not
            used. On processors with AVX2 and no AVX-512, where the library is slower than what runs without them, none
            is made.
        backend: "reference" | "aten" | "cpu" | "triton" | "cuda" for every fused op, or None to choose automatically.

    Returns:
        A PatchReport: every module with "replaced" or "kept because ...". As a context manager it unpatches at its
        end. After training with FSDP, unpatch too goes on working: patch first, shard second.

    Raises:
        TypeError: ``model`` is not a module, or an option is of the wrong type.
        ValueError: ``freeze`` is asked for a model in training mode, no backend has this name, or a declaration is true
            of no module of its class yet; where it was true of one, others are left as they are.

    Example:
        >>> model = nn.TransformerEncoderLayer(8, 2, 32, batch_first=True)
        >>> with tfk.patch(model) as report:
        ...     y = model(torch.randn(2, 5, 8))
    """
    _check(model, packed, freeze, backend)
    tell_torch()
    covered: dict[int, str] = {}
    entries, modules = [], []
    undo: list[_Before] = []
    thawed = [module for module in model.modules() if frozen.thaw(module)]
    kept: list[nn.Module] = []
    undone = functools.partial(_undo, undo, kept, thawed)
    refusals: list[tuple[str, Refused]] = []
    try:
        switched = _switch_attention(model, backend, packed, undo)
        spans = huggingface_heads.below_reading_heads(model)
        with one_patch():
            for name, module in model.named_modules():
                inside = covered.get(id(module))
                if inside is not None:
                    replaced, note = True, f"runs inside {inside}"
                elif id(module) in switched and (switched[id(module)][0] or swap.options(module).previous):
                    replaced, note = switched[id(module)]
                    if replaced and packed:
                        note = "; ".join((note, *_pack_whole(module, spans.get(id(module)))))
                else:
                    padded = "packed=False was asked for" if not packed else spans.get(id(module))
                    _, unswitched = switched.get(id(module), (False, None))
                    replaced, note = _apply(module, name, padded, backend, covered, undo, refusals, unswitched)
                entries.append(Entry(name, type(module).__name__, replaced, note, inside))
                modules.append(module)
        _require_true(refusals)
        for module in _projections(model) if freeze else ():
            frozen.freeze(module)
            kept.append(module)
    except BaseException:  # a recipe of the user's failed: no half-patched model is left behind
        undone()
        raise
    return PatchReport(entries, modules, _notes(entries), undone)


def unpatch(model: nn.Module) -> int:
    """Give a patched model its own code back, bit for bit.

    Args:
        model: any module; where nothing was patched nothing happens.

    Returns:
        How many modules were restored.

    Raises:
        TypeError: ``model`` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"unpatch: model must be a torch.nn.Module, got {type(model).__name__}")
    restored = huggingface.switch_back([model])
    for module in model.modules():
        restored += swap.restore(module)
        frozen.thaw(module)
    return restored


def settings(model: nn.Module) -> list[dict[str, Any]]:
    """What ``patch`` was asked for, by name; once for each part of a model that got its own, and [] for none."""
    freeze = any(map(frozen.is_frozen, model.modules()))
    told = [swap.options(module) for module in model.modules() if swap.OPTIONS in module.__dict__]
    return [
        {"packed": packed, "freeze": freeze, "backend": backend}
        for packed, backend in dict.fromkeys((options.packed, options.backend) for options in told)
    ]


def _check(model: object, packed: object, freeze: object, backend: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"patch: model must be a torch.nn.Module, got {type(model).__name__}")
    for name, value in (("packed", packed), ("freeze", freeze)):
        if not isinstance(value, bool):
            raise TypeError(f"patch: {name} must be True or False, got {value!r}")
    if freeze and model.training:
        raise ValueError(
            "patch: freeze=True needs a model in evaluation mode, got one in training mode: call model.eval()"
        )
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"patch: backend must be one of {', '.join(BACKENDS)} or None, got {backend!r}")


def _switch_attention(
    model: nn.Module, backend: str | None, packed: bool, undo: list[_Before]
) -> dict[int, tuple[bool, str]]:
    """Sends the attention of all transformers models to us: id of a model -> (replaced, note)."""
    told = {}
    for outer in huggingface.models(model):
        reason = huggingface.why_not(outer)
        inners = filter(is_model, outer.modules())
        before = [(inner, inner.__dict__.get(swap.OPTIONS), type(inner)) for inner in inners]
        taken = set() if reason is not None else set(map(id, huggingface.switch(outer, backend, packed)))
        for inner, options, cls in before:
            if id(inner) in taken:
                told[id(inner)] = True, "attention through transformers' AttentionInterface"
                undo.append((inner, options, cls))
            else:
                why = reason or huggingface.why_not(inner) or "it did not take the attention implementation"
                told[id(inner)] = False, f"because {why}"
    return told


def _pack_whole(module: nn.Module, padded: str | None) -> list[str]:
    """Lets a model whose attention was switched run packed where a recipe knows how; what then happens, or nothing.

    Where ``padded`` says why not, it runs padded.
    """
    for recipe in registered():
        if recipe.packs and not swap.is_fused(module) and recipe.recognise(module) is True:
            if padded is not None:
                return [f"runs padded: {padded}"]
            swap.swap(module, replace(swap.options(module), recipe=recipe.name))
            return [recipe.what]
    return []


def _apply(
    module: nn.Module,
    name: str,
    padded: str | None,
    backend: str | None,
    covered: dict[int, str],
    undo: list[_Before],
    refusals: list[tuple[str, Refused]],
    unswitched: str | None,
) -> tuple[bool, str]:
    """Tries every recipe on one module, those that pack unless ``padded`` says why not: (replaced, note).

    On a model that ``unswitched`` says why its attention was not switched of, those for such models.
    """
    before = module.__dict__.get(swap.OPTIONS) if swap.is_fused(module) else None
    if before is not None:
        undo.append((module, before, type(module)))
        if swap.is_derived(module):
            swap.note(module, replace(before, backend=backend, packed=padded is None))
            return True, f"by {before.recipe}, before its class was derived from"
        swap.restore(module)
    if isinstance(module, torch.jit.ScriptModule):
        return False, "because TorchScript has compiled it"
    reason: bool | str = False
    for recipe in registered() if unswitched is None else (r for r in registered() if r.whole):
        try:
            answer = recipe.recognise(module)
        except Refused as refusal:
            refusals.append((name, refusal.with_traceback(None)))  # whose frames hold the module, and this list
            answer = f"what was declared is not true of it: {refusal}"
        if answer is True and "forward" in module.__dict__:
            answer = "it has a forward of its own"
        if answer is True and recipe.packs and padded is not None:
            answer = padded
        if answer is not True:
            reason = reason or answer
            continue
        for inner in recipe.covers(module):
            covered.setdefault(id(inner), name or "the model")
        if before is None:
            undo.append((module, None, type(module)))
        swap.swap(module, swap.Options(recipe.name, backend, padded is None, found=recipe.finds(module)))
        return True, f"{recipe.what}; not more, because {reason}" if reason else recipe.what
    if reason:
        return False, f"because {reason}"
    return _left(module) if unswitched is None else (False, unswitched)


def _require_true(refusals: list[tuple[str, Refused]]) -> None:
    """Raises the first refusal of a declaration that was never true: a class may have modules of several kinds."""
    for name, refusal in refusals:
        if not was_true(refusal.recipe):
            raise ValueError(f"{refusal}, in {name!r}" if name else str(refusal)) from None


def _projections(model: nn.Module) -> list[nn.Module]:
    """The modules whose weights the fused modules of a patched model may keep packed."""
    recipes = {recipe.name: recipe for recipe in registered()}
    fused = ((recipes.get(swap.options(m).recipe), m) for m in model.modules() if swap.is_fused(m))
    return [inner for recipe, module in fused if recipe is not None for inner in recipe.projects(module)]


def is_own(module: nn.Module) -> bool:
    """Whether its class is of tfm_kernels.nn."""
    return type(module).__module__.startswith(f"{__package__.partition('.')[0]}.nn.")


def _left(module: nn.Module) -> tuple[bool, str]:
    if type(module) in _HOLDERS or not module._modules and not module._parameters and not module._buffers:
        return False, "because it holds nothing to fuse"
    if huggingface.attends(module) and huggingface.asks_registry(module):
        return True, "attention through transformers' AttentionInterface"
    if is_own(module):
        return False, "because it is of tfm_kernels.nn already"
    return False, f"because no recipe knows {type(module).__name__}"


def _notes(entries: list[Entry]) -> list[str]:
    packs = {recipe.what for recipe in registered() if recipe.packs}
    if any(entry.replaced and any(what in entry.note for what in packs) for entry in entries):
        return ["where a batch has padding, the outputs of packed stacks are 0 at padded positions"]
    return []


def _undo(undo: list[_Before], kept: list[nn.Module], thawed: list[nn.Module]) -> None:
    for module in kept:
        frozen.thaw(module)
    for module in thawed:
        frozen.freeze(module)
    huggingface.switch_back(module for module, before, _ in undo if before is None and is_model(module))
    for module, before, cls in undo:
        if before is not None:
            if is_model(module) and before.previous is not None:
                module.__class__ = cls
                module.__dict__[swap.OPTIONS] = before
                module.set_attn_implementation(huggingface.implementation(before.backend))  # type: ignore[operator]
            elif swap.is_derived(module):
                swap.note(module, before)
            else:
                swap.restore(module)
                swap.again(module, cls, before)
        else:
            swap.restore(module)
