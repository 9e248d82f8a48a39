"""Models of transformers whose forward runs its layers itself: packed as a whole, tokens, positions and all.

The model's own forward then runs on one row, the tokens of all rows behind one another, with their positions written
out and a Packed where it would make a mask; what it gives is spread out again.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..mask import Mask
from ..nn import Int8Linear
from ..nn.packed import Packed
from . import guard, huggingface, swap
from .huggingface_norm import LLAMA_NORM
from .known import Known
from .registry import Recipe, register_recipe
from .source import says

WHAT = "padded batches run packed; padded positions give 0"
_BY_TOKEN = ("input_ids", "token_type_ids", "position_ids")  # (B, T), or (1, T) for all rows
_COLLECTS = ("output_attentions", "output_hidden_states")
_KNOWN = {*_BY_TOKEN, *_COLLECTS, "inputs_embeds", "attention_mask", "return_dict"}
_ROW_BY_ROW = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.Dropout, nn.Identity, Int8Linear)
_ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")
_BY_LENGTH = {"dynamic", "longrope"}  # rotary positions that a longer batch has others of


def register_model(
    name: str,
    known: Known,
    masks: Callable[[Any, Packed], Any],
    *,
    attention: str,
    norm: str | None = None,
    dropout: str | None = None,
) -> None:
    """A recipe for a model of ``layers`` and ``rotary_emb``, beside the switch of its attention.

    Args:
        name: of the recipe.
        known: its code, and that of the parts that it calls beside its layers and their norm.
        masks: masks(model, packed) is what the model's forward takes as its ``attention_mask`` and gives its layers.
        attention: the child of a layer that attends; beside it a layer has an ``mlp`` and what takes row by row.
        norm: the child that its forward ends with, or None.
        dropout: a dropout before its layers, dotted, whose elements would be others, or None.
    """

    def recognise(module: nn.Module) -> bool | str:
        held = module._modules.get("layers")
        return isinstance(held, nn.ModuleList) and len(held) > 0 and known.recognise(module)

    def why_not(model: Any) -> str | None:
        reason = known.why_not(model) or guard.why_not_unwatched(model, ())
        if reason is None and norm is not None and not _is_row_by_row(guard.child(model, norm)):
            reason = f"{norm} is {type(guard.child(model, norm)).__name__}"
        types = model.rotary_emb.rope_type
        if _BY_LENGTH & set(types.values() if isinstance(types, dict) else (types,)):
            reason = reason or "its rotary positions depend on the length of the batch"
        drawn = dropout is not None and _drops(guard.child(model, dropout))
        return reason or ("its embeddings' dropout would count other rows" if drawn else None)

    def why_not_layer(layer: Any) -> str | None:
        return _why_not_layer(layer, attention)

    def fuse(original: Any) -> type:
        names = list(inspect.signature(original.forward).parameters)[1:]

        class Fused(original):
            @functools.wraps(original.forward)
            def forward(self, *args: Any, **kwargs: Any) -> Any:
                told = {**dict(zip(names, args, strict=False)), **kwargs}
                packed = _packing(self, told, why_not_layer, lambda model: _why_not_call(model, told) or why_not(model))
                if packed is None:
                    return super().forward(*args, **kwargs)
                outputs = super().forward(**_packed(told, packed), attention_mask=masks(self, packed))
                outputs.last_hidden_state = packed.unpack(outputs.last_hidden_state)
                if outputs.get("pooler_output") is not None:  # of the first row's first token
                    outputs.pooler_output = self.pooler(outputs.last_hidden_state)
                return outputs

        return Fused

    register_recipe(Recipe(name, recognise, fuse, WHAT, packs=True), first=False)
    swap.on_load[name] = huggingface.register


def _packing(
    model: Any, told: dict[str, Any], why_not_layer: Callable[[Any], str | None], why_not: Callable[[Any], str | None]
) -> Packed | None:
    """How a call of a model runs packed, or None where it does not."""
    mask, tokens = told.get("attention_mask"), told.get("input_ids")
    tokens = told.get("inputs_embeds") if tokens is None else tokens
    if not (isinstance(mask, Tensor) and mask.dim() == 2 and isinstance(tokens, Tensor) and swap.is_fused(model)):
        return None
    if guard.tracing(tokens, mask) or mask.shape != tokens.shape[:2] or bool(mask.all()):
        return None
    keep = Mask.keep((mask != 0)[:, None, None, :])
    return huggingface.packing(model, keep, tokens, model.layers, why_not_layer, why_not, behind=True)


def _why_not_call(model: Any, told: dict[str, Any]) -> str | None:
    if any(given is not None and name not in _KNOWN for name, given in told.items()):
        return "it was called with more than tokens and their padding"
    if told.get("return_dict") is False or not getattr(model.config, "return_dict", True):
        return "its outputs were asked for as a tuple"
    if any(told.get(name) or getattr(model.config, name, False) for name in _COLLECTS):
        return "output_hidden_states or output_attentions was asked for"
    return None


def _why_not_layer(layer: Any, attention: str) -> str | None:
    """None where all that a layer is made of takes its rows one by one, attention aside, and drops nothing of theirs.

    Dropouts of the layer itself, whose rows its fused code tells, are its own matter.
    """
    if not huggingface.attends(guard.child(layer, attention)):
        return "its model's attention implementation was set to another one"
    for path, part in layer._modules.items():
        inside = part._modules if path in (attention, "mlp") else {}
        if inside and not swap.is_fused(part):
            return f"{path} is {type(part).__name__}, which is not fused"
        for name, inner in inside.items() if inside else ((path, part),):
            if inner is not None and not _is_row_by_row(inner):
                return f"{path}.{name} is {type(inner).__name__}" if inside else f"{path} is {type(inner).__name__}"
            if inside and inner is not None and _drops(inner):
                return "its dropout would count other rows"
    return None


def _is_row_by_row(module: nn.Module) -> bool:
    if guard.spans_rows(module):
        return False
    own = swap.found_class(module)
    if own in _ROW_BY_ROW or own.__module__ in _ACTIVATIONS or swap.is_fused(module):
        return True
    return all(says(module, method, code) for method, code in LLAMA_NORM.items())


def _drops(module: nn.Module) -> bool:
    return isinstance(module, nn.Dropout) and module.p > 0.0 and module.training


def _packed(told: dict[str, Any], packed: Packed) -> dict[str, Any]:
    """The arguments of a call, all rows in one, and each token's position."""
    shape = (packed.batch, packed.length)
    given = {name: told[name] for name in (*_BY_TOKEN, "inputs_embeds") if told.get(name) is not None}
    own = {name: _one_row(x, shape, packed.index) for name, x in given.items()}
    return {"position_ids": (packed.index % packed.length).unsqueeze(0), **own}


def _one_row(x: Tensor, shape: tuple[int, int], index: Tensor) -> Tensor:
    return x.expand(*shape, *x.shape[2:]).flatten(0, 1).index_select(0, index).unsqueeze(0)
