"""Hugging Face transformers: attention through the library's own registry, and the switch of a model to it.

The attention function serves every family; what it does not know it leaves to transformers' own. Its masks are those of
huggingface_mask.py.
transformers is imported only where a model of it, or a pickle of one, asks for it.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .._autocast import as_autocast
from .._backend import BACKENDS
from .._transformers import is_model
from ..mask import Mask
from ..nn.packed import Packed
from . import guard, packed, swap
from .block import attend, attend_with_weights
from .huggingface_mask import Prepared, mask

NAME = "tfm_kernels"
RECIPE = "huggingface.attention"
REPLACES = ("sdpa", "eager")  # implementations that patching takes the place of; others were chosen on purpose
# Keywords that do not change what attention computes once the mask is there.
_HARMLESS = frozenset(
    "position_ids use_cache output_attentions output_hidden_states encoder_hidden_states deterministic sliding_window "
    "output_router_logits past_key_values cache_position return_dict is_causal num_items_in_batch token_type_ids "
    "shift_labels cu_seq_lens_q cu_seq_lens_k max_length_q max_length_k".split()
)
_ATTENDS = "_tfm_kernels_attends"  # in the __dict__ of the modules whose attention was switched
_previous: dict[int, tuple[weakref.ref, str]] = {}  # id of a config -> what patching replaced in it
_registered: list[str] = []


def implementation(backend: str | None) -> str:
    """The name under which transformers knows our attention, one for each backend."""
    return NAME if backend is None else f"{NAME}_{backend}"


def register() -> None:
    """Makes transformers know our attention and mask functions. Without the mask padding would be ignored silently."""
    if _registered:
        return
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    for backend in (None, *BACKENDS):
        AttentionInterface.register(implementation(backend), _attention_on(backend))
        AttentionMaskInterface.register(implementation(backend), mask)
        _registered.append(implementation(backend))


def _attention_on(backend: str | None) -> Callable[..., Any]:
    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        dropout: float = 0.0,
        scaling: float | None = None,
        position_bias: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if not attends(module) or swap.fell_back(module, unknown_keywords(kwargs)):
            return _stock(module, query, key, value, attention_mask, dropout, scaling, position_bias, kwargs)
        query, key, value = as_autocast(query, key, value)  # rotary positions leave float32 beside bfloat16
        attention_mask = causal_if_unmasked(module, attention_mask, query.shape[-2], kwargs)
        if position_bias is not None and _is_cross_attention_of_t5(module):
            position_bias = None  # a tensor of zeros
        options = {"bias": position_bias, "scale": scaling, "dropout_p": dropout}
        if wants_weights(kwargs) and not isinstance(attention_mask, Packed):
            out, weights = attend_with_weights(query, key, value, attention_mask, backend=backend, **options)
            return out.transpose(1, 2), weights
        if isinstance(attention_mask, Packed):
            del options["bias"]
        out = attend(query, key, value, attention_mask, backend=backend, **options)
        return out.transpose(1, 2), None

    return attention


def unknown_keywords(kwargs: dict[str, Any]) -> str | None:
    """None where every keyword of an attention call is known to change nothing, else why it falls back."""
    unknown = [name for name, given in kwargs.items() if given is not None and name not in _HARMLESS]
    return f"its attention was called with {', '.join(unknown)}" if unknown else None


def causal_if_unmasked(module: nn.Module, mask: Any, queries: int, kwargs: dict[str, Any]) -> Any:
    """The mask of a call, with what None stands for written out; a mask, where there is one, says all."""
    if mask is not None or queries == 1:
        return mask
    given = kwargs.get("is_causal")
    return Mask.causal() if (getattr(module, "is_causal", True) if given is None else given) else None


def cache_keyword(original: type) -> str:
    """The name by which a class' forward takes its cache: "past_key_values" until transformers 5.23, then "cache"."""
    return "cache" if "cache" in inspect.signature(original.forward).parameters else "past_key_values"  # type: ignore


def cache_of(cache: Any, kwargs: dict[str, Any]) -> Any:
    """The cache of a call, by either name; taken out of ``kwargs``."""
    return kwargs.pop("past_key_values", None) if cache is None else cache


def named_arguments(original: Any) -> Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any]]:
    """How the arguments behind the hidden states of a layer or its attention are told by name, defaults included."""
    parameters = list(inspect.signature(original.forward).parameters.values())[2:]
    given = (p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
    defaults = {p.name: None if p.default is p.empty else p.default for p in given}
    keyword = cache_keyword(original)

    def named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        told = {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}
        if keyword in defaults:
            told[keyword] = cache_of(told.pop(keyword), told)
        return told

    return named


def file_of(module: nn.Module) -> Any:
    """The Python module that a module's own forward is written in; None where the process does not know it."""
    forward = inspect.getattr_static(swap.found_class(module), "forward", None)  # a TorchScript module's class has none
    return sys.modules.get(getattr(forward, "__module__", ""))


def interface(module: Any) -> Callable[..., Any]:
    """The attention function that a module's own code would call."""
    own = file_of(module)
    return own.ALL_ATTENTION_FUNCTIONS.get_interface(module.config._attn_implementation, own.eager_attention_forward)


def is_ours(config: Any) -> bool:
    """Whether a config's attention goes to us."""
    return str(getattr(config, "_attn_implementation", None)).startswith(NAME)


def attends(module: Any) -> bool:
    """Whether a module's attention is ours: it was switched, not a module of another model that shares its config."""
    return _ATTENDS in module.__dict__ and is_ours(module.config)


def is_idle_collector(hook: Any) -> bool:
    """Whether a forward hook is one by which transformers collects outputs, and now collects nothing.

    The first call with output_hidden_states or output_attentions leaves such hooks for good.
    """
    return getattr(hook, "__name__", "") == "output_capturing_hook" and _collected() == ()


guard.IDLE_HOOKS.append(is_idle_collector)


def asks_for_gradients(hook: Any) -> bool:
    """Whether a forward hook is that by which transformers, where it checkpoints, lets embeddings require gradients.

    They are called as they are, wherever they stand.
    """
    return getattr(hook, "__name__", "") == "make_inputs_require_grads"


guard.IDLE_HOOKS.append(asks_for_gradients)


def wants_weights(kwargs: dict[str, Any]) -> bool:
    """Whether the caller will read the attention weights: asked for by keyword or by transformers' collector."""
    if kwargs.get("output_attentions"):
        return True
    collected = collecting()
    return "attentions" in collected or "cross_attentions" in collected


def why_not_own_attention(asked: Any, x: Tensor) -> str | None:
    """None where attention that knows no registry may be fused, its softmax always in float32, else why not.

    Args:
        asked: whether the call asks for its weights.
        x: what it is given.
    """
    if asked:
        return "output_attentions was asked for"
    return "in float64 its own code takes the softmax in float32" if x.dtype == torch.float64 else None


def collecting() -> tuple[str, ...]:
    """What transformers' hooks now collect, such as "hidden_states"; nothing where a compiled graph cannot ask."""
    return _collected() or ()


def _collected() -> tuple[str, ...] | None:
    """As ``collecting``; None: it cannot be asked. A graph can where the model, which tells, is compiled as a whole."""
    if "transformers.utils.output_capturing" not in sys.modules:
        return ()
    told = sys.modules["transformers.utils.output_capturing"]._active_collector
    if torch.compiler.is_compiling() and not getattr(told, "compiling", False):  # transformers' own, which may change
        return None
    active = told.get()
    return () if active is None else tuple(active)


def packing(
    stack: nn.Module,
    mask: Any,
    x: Tensor,
    layers: Iterable[nn.Module],
    why_not: Callable[[Any], str | None],
    why_not_stack: Callable[[Any], str | None] | None = None,
    **options: Any,
) -> Packed | None:
    """``packed.packing`` for a stack of transformers' layers: not while something collects what the layers give.

    ``why_not_stack(stack)``, where given, tells what else keeps the stack itself from it; ``options`` are
    ``packed.packing``'s.
    """
    if mask is None or not swap.options(stack).packed:
        return None
    if collecting():
        swap.fell_back(stack, "output_hidden_states or output_attentions was asked for")
        return None
    return packed.packing(stack, mask, x, layers, why_not, why_not_stack and why_not_stack(stack), **options)


def _is_cross_attention_of_t5(module: nn.Module) -> bool:
    decoder, causal = getattr(module, "is_decoder", False), getattr(module, "is_causal", True)
    return hasattr(module, "relative_attention_num_buckets") and decoder and not causal


def _stock(module, query, key, value, attention_mask, dropout, scaling, position_bias, kwargs) -> Any:
    from transformers.modeling_utils import AttentionInterface

    if position_bias is not None:
        kwargs = {**kwargs, "position_bias": position_bias}
    name = _original(module.config)
    if name == "eager":  # which reads no is_causal
        attention_mask = causal_if_unmasked(module, attention_mask, query.shape[-2], kwargs)
    attention_mask = _own_mask(name, attention_mask, query, key)
    stock = AttentionInterface._global_mapping["sdpa"]
    if name == "eager":  # which is a function of each family's own
        stock = getattr(file_of(module), "eager_attention_forward", stock)
        if isinstance(attention_mask, Tensor) and attention_mask.dtype == torch.bool:
            hidden = torch.finfo(query.dtype).min
            attention_mask = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill(~attention_mask, hidden)
    return stock(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)


def _own_mask(name: str, attention_mask: Any, query: Tensor, key: Tensor) -> Any:
    """The mask that an implementation of transformers would be given, or a dense one that says the same."""
    if not isinstance(attention_mask, Mask):
        return attention_mask
    if isinstance(attention_mask, Prepared) and attention_mask.asked is not None:
        from transformers.masking_utils import AttentionMaskInterface

        return AttentionMaskInterface._global_mapping[name](**attention_mask.asked)
    return attention_mask.dense(query.shape[0], 1, query.shape[2], key.shape[2], query.device)


def models(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost transformers models in a module."""
    if is_model(module):
        yield module
    else:
        for inner in module.children():
            yield from models(inner)


def asks_registry(module: nn.Module) -> bool:
    """Whether a module's forward asks transformers' registry for its attention."""
    forward = inspect.unwrap(swap.found_class(module).forward)  # type: ignore[attr-defined]
    return "get_interface" in getattr(getattr(forward, "__code__", None), "co_names", ())


def why_not(model: Any) -> str | None:
    """None where a model's attention can be switched, else part of a sentence."""
    current = model.config._attn_implementation
    if getattr(model.config, "output_attentions", False):
        return "config.output_attentions is set"
    if not model._can_set_attn_implementation():
        return "its attention does not go through transformers' AttentionInterface"
    if not model._supports_sdpa:
        capped = getattr(model.config, "attn_logit_softcapping", None) is not None
        return f"its attention {'caps its logits' if capped else 'does more than scaled_dot_product_attention can'}"
    if current not in REPLACES and not str(current).startswith(NAME):
        return f"its attention implementation {current!r} was chosen on purpose"
    return None


def switch(model: Any, backend: str | None, pack: bool) -> list[nn.Module]:
    """Sets the attention of a transformers model and of the models in it to ours; returns those that took it."""
    register()
    inner = [module for module in model.modules() if is_model(module)]
    told = {id(module.config): swap.options(module).previous for module in inner if swap.OPTIONS in module.__dict__}
    before = [(told.get(id(module.config)) or _original(module.config), why_not(module)) for module in inner]
    model.set_attn_implementation(implementation(backend))
    taken = []
    for module, (name, reason) in zip(inner, before, strict=True):
        if module.config._attn_implementation == implementation(backend):
            if reason is not None:  # the outer model's setting goes through to the inner ones
                module.set_attn_implementation(name)
                continue
            if swap.OPTIONS not in module.__dict__:
                _previous[id(module.config)] = (weakref.ref(module.config), name)
            else:
                name = swap.options(module).previous or name
            swap.unswap(module)
            recipe = swap.options(module).recipe if swap.is_derived(module) else RECIPE
            module.__dict__[swap.OPTIONS] = swap.Options(recipe, backend, pack, previous=name)
            taken.append(module)
    for module in taken:
        for config in _copied(module):
            if config._attn_implementation in REPLACES or is_ours(config):
                config._attn_implementation = implementation(backend)
        for each in module.modules():
            if is_ours(getattr(each, "config", None)):
                each.__dict__[_ATTENDS] = True
    return taken


def _copied(model: Any) -> list[Any]:
    """The configs of modules in a model that are copies of its own, as a deepcopy of a layer or attention has one.

    The model sets its own alone; yet all its layers get the masks that its own asks for.
    """
    held = (module.__dict__.get("config") for module in model.modules() if not is_model(module))
    return [config for config in held if type(config) is type(model.config) and config is not model.config]


def _original(config: Any) -> str:
    """A config's implementation before any patch: models built from one config object share it.

    Of a copy of a patched model's config, as from_config makes one for another model, no more is known than that
    transformers chooses "sdpa" for those that are patched.
    """
    if not is_ours(config):
        return str(config._attn_implementation)
    return _previous[id(config)][1] if _is_known(config) else "sdpa"


def _is_known(config: Any) -> bool:
    """Whether patching met this very config."""
    return id(config) in _previous and _previous[id(config)][0]() is config


def _before(model: Any) -> str | None:
    """What a model's attention is to be given back to; None where another model was patched that shares its config."""
    if not is_ours(model.config):
        return model.config._attn_implementation
    previous = swap.options(model).previous
    return previous if previous is not None or _is_known(model.config) else _original(model.config)


def switch_back(outer: Iterable[nn.Module]) -> int:
    """Gives the transformers models in modules their attention back, unless somebody has set another one meanwhile.

    Returns how many of them had ours by their config alone.
    """
    inside = dict.fromkeys(module for each in outer for module in each.modules())
    inner: list[Any] = list(filter(is_model, inside))
    wanted = {module: _before(module) for module in inner}
    by_config = [m for m in inner if is_ours(m.config) and swap.OPTIONS not in m.__dict__]
    for module, name in wanted.items():  # what an outer model is set to goes through to the inner ones, which follow
        if name is not None:  # its own method asks whether the inner ones could take what the outer one had
            module.config._attn_implementation = name
        for config in _copied(module) if name is not None else ():
            if is_ours(config):
                config._attn_implementation = name
    for each in inside:
        each.__dict__.pop(_ATTENDS, None)
    return sum(not is_ours(module.config) for module in by_config)


swap.on_load[RECIPE] = register
