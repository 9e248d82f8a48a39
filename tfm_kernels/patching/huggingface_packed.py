"""Models of transformers whose forward runs its layers itself: packed as a whole, tokens, positions and all.

The model's own forward then runs on one row, the tokens of all rows behind one another, with their positions written
out and a Packed where it would make a mask; what it gives is spread out again. A decoder's cache lies padded.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..mask import Mask
from ..nn import Int8Linear
from ..nn.packed import Packed
from . import guard, huggingface, swap
from .huggingface_norm import is_norm
from .huggingface_parts import GATED
from .known import Known
from .packed import NotPacked
from .registry import Recipe, register_recipe, registered
from .source import says

WHAT = "padded batches run packed; padded positions give 0"
COUNTS = "its dropout would count other rows"
_BY_TOKEN = ("input_ids", "token_type_ids", "position_ids")  # (B, T), or (1, T) for all rows
_COLLECTS = ("output_attentions", "output_hidden_states")
_CACHES = ("cache", "past_key_values")  # the names that versions of transformers have for it
_KEPT = ("use_cache", *_CACHES)  # what the packed call is told as it is
_UNREAD = (
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k",  # of sequences in rows, which positions tell too
    "num_items_in_batch", "shift_labels",  # for the loss of a head
)  # fmt: skip
_KNOWN = {*_BY_TOKEN, *_COLLECTS, *_KEPT, *_UNREAD, "inputs_embeds", "attention_mask", "return_dict"}
_ROW_BY_ROW = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.Dropout, nn.Identity, Int8Linear)
_ELEMENTWISE = (
    nn.CELU, nn.ELU, nn.GELU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.LeakyReLU, nn.LogSigmoid,
    nn.Mish, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Softshrink, nn.Softsign, nn.Tanh,
    nn.Tanhshrink, nn.Threshold,
)  # fmt: skip
_POOLER = "0a36a28744d4"  # what the first token of each row goes through; fingerprint of transformers 5.24
_LORA = ("peft.tuners.lora.layer", "5cd0508e909e")  # the code of its Linear, of peft 0.21
_BY_LENGTH = {"dynamic", "longrope"}  # rotary positions that a longer batch has others of


def register_model(
    name: str,
    known: Known,
    masks: Callable[[Any, Packed], Any],
    *,
    attention: str,
    norm: str | None = None,
    dropout: str | None = None,
    causal: bool = False,
) -> None:
    """A recipe for a model of ``layers`` and ``rotary_emb``, beside the switch of its attention.

    Args:
        name: of the recipe.
        known: its code, and that of the parts that it calls beside its layers and their norm.
        masks: masks(model, packed) is what the model's forward takes as its ``attention_mask`` and gives its layers.
        attention: the child of a layer that attends; beside it a layer has an ``mlp`` and what takes row by row.
        norm: the child that its forward ends with, or None.
        dropout: a dropout before its layers, dotted, whose elements would be others, or None.
        causal: whether it is a decoder: padding may then stand in front, sequences may lie behind one another in a row,
            which its positions tell, its caches are filled, and dropouts of its layers count rows as they are.
    """

    def recognise(module: nn.Module) -> bool | str:
        held = module._modules.get("layers")
        if not (isinstance(held, nn.ModuleList) and len(held) > 0):
            return False
        answer = known.recognise(module)
        if causal and answer is True and not _has_recipes(held[0], attention):  # code that many families share
            return False
        return answer

    def why_not(model: Any) -> str | None:
        reason = known.why_not(model) or guard.why_not_unwatched(model, ())
        if reason is None and norm is not None and not is_row_by_row(guard.child(model, norm)):
            reason = f"{norm} is {type(guard.child(model, norm)).__name__}"
        if reason is None and model._modules.get("pooler") is not None and not says(model.pooler, "forward", _POOLER):
            reason = f"pooler is {type(model.pooler).__name__}"
        reason = reason or _why_not_embeddings(model)
        types = model.rotary_emb.rope_type
        if _BY_LENGTH & set(types.values() if isinstance(types, dict) else (types,)):
            reason = reason or "its rotary positions depend on the length of the batch"
        drawn = dropout is not None and _drops(guard.child(model, dropout))
        return reason or ("its embeddings' dropout would count other rows" if drawn else None)

    def why_not_layer(layer: Any) -> str | None:
        if causal and any(map(_drops, layer._modules.values())):
            return COUNTS
        return _why_not_layer(layer, attention)

    def fuse(original: Any) -> type:
        names = list(inspect.signature(original.forward).parameters)[1:]

        class Fused(original):
            @functools.wraps(original.forward)
            def forward(self, *args: Any, **kwargs: Any) -> Any:
                told = by_name(names, args, kwargs)
                reason = functools.partial(_why_not_packed, why_not, told)
                packed = packing(self, told, self.layers, why_not_layer, reason, causal)
                if packed is None:
                    return super().forward(*args, **kwargs)
                try:
                    outputs = super().forward(**_packed(told, names, packed), attention_mask=masks(self, packed))
                except NotPacked as reason:
                    swap.fell_back(self, str(reason))
                    return super().forward(*args, **kwargs)
                outputs.last_hidden_state = packed.unpack(outputs.last_hidden_state)
                if outputs.get("pooler_output") is not None:  # of the first row's first token
                    outputs.pooler_output = self.pooler(outputs.last_hidden_state)
                return outputs

        return Fused

    register_recipe(Recipe(name, recognise, fuse, WHAT, packs=True), first=False)
    swap.on_load[name] = huggingface.register


def by_name(names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What a call is told; nothing where an argument is given twice or there are too many, which its code refuses."""
    told = {**dict(zip(names, args, strict=False)), **kwargs}
    return {} if len(told) < len(args) + len(kwargs) else told


def _has_recipes(layer: Any, attention: str) -> bool:
    """Whether a layer, its attention and what it calls ``mlp`` are of kinds that are fused."""
    parts = (layer, *(part for name, part in layer._modules.items() if name in (attention, "mlp")))
    own = [recipe for recipe in registered() if not recipe.packs]
    return all(_takes_rows(part) or any(recipe.recognise(part) is True for recipe in own) for part in parts)


def _takes_rows(mlp: nn.Module) -> bool:
    """Whether it is a gated feed-forward block of code that is known, whatever its layers are."""
    return says(mlp, "forward", *GATED)


def packing(
    model: Any,
    told: dict[str, Any],
    layers: Iterable[nn.Module],
    why_not_layer: Callable[[Any], str | None],
    why_not: Callable[[Any], str | None],
    causal: bool = False,
) -> Packed | None:
    """How a call of a model runs packed, by what it is told, or None where it does not."""
    mask, tokens = told.get("attention_mask"), told.get("input_ids")
    tokens = told.get("inputs_embeds") if tokens is None else tokens
    if not (isinstance(tokens, Tensor) and swap.is_fused(model)):
        return None
    if mask is None and causal:
        return _in_rows(model, told, tokens, why_not_layer, why_not)
    if not (isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape == tokens.shape[:2]):
        return None
    if guard.tracing(tokens, mask) or bool(mask.all()):
        return None
    keep = mask != 0
    if causal and not bool(keep[:, 0].all()):
        why_not_layer = functools.partial(_why_not_moved, why_not_layer)
    shown = Mask.keep(keep[:, None, None, :])
    return huggingface.packing(model, shown, tokens, layers, why_not_layer, why_not, behind=True, in_front=causal)


def _in_rows(
    model: Any,
    told: dict[str, Any],
    tokens: Tensor,
    why_not_layer: Callable[[Any], str | None],
    why_not: Callable[[Any], str | None],
) -> Packed | None:
    """The packing of sequences that lie behind one another in rows, as transformers sees it by their positions.

    It looks for them where it is given no mask and fills no cache: one begins wherever a position is not the next.
    """
    positions = told.get("position_ids")
    if not (isinstance(positions, Tensor) and positions.dim() == 2) or guard.tracing(tokens, positions):
        return None
    if _fills_a_cache(model, told) or not getattr(model.config, "is_causal", True):
        return None
    starts = positions.diff(dim=1) != 1
    if not bool(starts.any()):
        return None
    starts = nn.functional.pad(starts, (1, 0), value=True).expand(tokens.shape[:2])
    why_not_layer = functools.partial(_why_not_moved, why_not_layer)
    return huggingface.packing(model, Packed.in_rows(starts), tokens, model.layers, why_not_layer, why_not)


def _fills_a_cache(model: Any, told: dict[str, Any]) -> bool:
    """Whether a call of a decoder ends with a cache, whose making transformers leaves out where it checkpoints."""
    if any(told.get(name) is not None for name in _CACHES):
        return True
    asked = told.get("use_cache")
    asked = getattr(model.config, "use_cache", None) if asked is None else asked
    checkpointed = getattr(model, "gradient_checkpointing", False) and model.training and torch.is_grad_enabled()
    return bool(asked) and not checkpointed


def _why_not_moved(why_not: Callable[[Any], str | None], layer: Any) -> str | None:
    """Of a layer whose attention counts its rows from another one than it did, which its dropout would show."""
    attentions = (inner for inner in layer._modules.values() if huggingface.attends(inner))
    drops = any(inner.training and getattr(inner, "attention_dropout", 0.0) > 0.0 for inner in attentions)
    return COUNTS if drops else why_not(layer)


def _is_new(cache: Any) -> bool:
    """Whether a cache is one that grows, and holds nothing yet."""
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    known = all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in getattr(cache, "layers", ()))
    return type(cache) is DynamicCache and known and not cache.offloading and cache.get_seq_length() == 0


def _why_not_packed(why_not: Callable[[Any], str | None], told: dict[str, Any], model: Any) -> str | None:
    return why_not_call(model, told) or why_not(model)


def why_not_call(model: Any, told: dict[str, Any]) -> str | None:
    """None where a call asks for nothing but a model's last hidden state, as an output, else why it runs padded."""
    if any(given is not None and name not in _KNOWN for name, given in told.items()):
        return "it was called with more than tokens and their padding"
    if any(told.get(name) is not None and not _is_new(told[name]) for name in _CACHES):
        return "it was called with a cache"
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
        if inside and not swap.is_fused(part) and not _takes_rows(part):
            return f"{path} is {type(part).__name__}, which is not fused"
        for name, inner in inside.items() if inside else ((path, part),):
            if inner is not None and not is_row_by_row(inner):
                return f"{path}.{name} is {type(inner).__name__}" if inside else f"{path} is {type(inner).__name__}"
            if inside and inner is not None and any(map(_drops, inner.modules())):
                return COUNTS
    return None


def is_row_by_row(module: nn.Module) -> bool:
    """Whether it is known to take (..., E) one row of E numbers by itself."""
    if guard.spans_rows(module):
        return False
    own = swap.found_class(module)
    if own in (*_ROW_BY_ROW, *_ELEMENTWISE) or own.__module__ == "transformers.activations" or swap.is_fused(module):
        return True
    return _is_adapted(module) if own.__module__ == _LORA[0] else is_norm(module)


def _is_adapted(module: Any) -> bool:
    """Whether it is a linear layer with adapters of peft's plainest kind beside it, each made of what takes rows."""
    if not says(module, "forward", _LORA[1]) or module.lora_variant:
        return False
    tables = (module.lora_A, module.lora_B, module.lora_dropout)
    return all(map(is_row_by_row, (module.base_layer, *(part for table in tables for part in table.values()))))


def _why_not_embeddings(model: Any) -> str | None:
    held = model._modules.get("embeddings")
    parts = held._modules if held is not None else {"embed_tokens": model.embed_tokens}
    for name, part in parts.items():
        if held is not None and part is not None and not is_row_by_row(part):
            return f"embeddings.{name} is {type(part).__name__}"
        if part is not None and _counts_tokens(part):
            return f"{name} counts how often each of its rows is asked for, or keeps the norm of those that are"
    return None


def _counts_tokens(table: nn.Module) -> bool:
    """Whether an embedding's gradients, or its weight, depend on how often and which rows of it are asked for."""
    return bool(getattr(table, "scale_grad_by_freq", False)) or getattr(table, "max_norm", None) is not None


def _drops(module: nn.Module) -> bool:
    return isinstance(module, nn.Dropout) and module.p > 0.0 and module.training


def _packed(told: dict[str, Any], names: list[str], packed: Packed) -> dict[str, Any]:
    """The arguments of a call that its model names, all rows in one, and each token's position."""
    shape = (packed.batch, packed.length)
    given = {name: told[name] for name in (*_BY_TOKEN, "inputs_embeds") if name in names and told.get(name) is not None}
    own = {name: _one_row(x, shape, packed.index) for name, x in given.items()}
    kept = {name: told[name] for name in _KEPT if name in told}  # also by a name that it had before
    return {"position_ids": (packed.index % packed.length).unsqueeze(0), **own, **kept}


def _one_row(x: Tensor, shape: tuple[int, int], index: Tensor) -> Tensor:
    return x.expand(*shape, *x.shape[2:]).flatten(0, 1).index_select(0, index).unsqueeze(0)
