"""get_attention_maps: who attended to whom, in every layer and head, for one input.

Nothing in the model is touched: the attention calls are watched as they happen, and each map is computed again from the
call's lse. So the fused layers stay fused, and what is shown is what they did.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from . import _check, ops
from .mask import Mask
from .nn.evaluation import evaluating
from .ops.attention_call import AttentionCall
from .ops.attention_watch import watching

_NAME = "get_attention_maps"


@torch.no_grad()
def get_attention_maps(
    model: nn.Module,
    *inputs: Any,
    layers: str | Sequence[str] | None = None,
    heads: int | Sequence[int] | None = None,
) -> dict[str, Tensor]:
    """The attention weights of a model for one input, exact, for every layer and head or some of them.

    The model runs once, in evaluation mode and without gradients, with its fused layers as they are.

    Args:
        model: one of ``tfk.models`` or ``tfk.nn``, or a model that ``tfk.patch`` has been called on: of torch.nn, of
            transformers, or of classes declared to it.
        inputs: what the model is called with; one dict stands for keyword arguments, one tuple for all the others.
        layers: names to keep, as they are in the result, with * and ? as in file names; None keeps all. Others cost
            nothing beyond the model's own run.
        heads: a head or several, None for all.

    Returns:
        {name: (B, heads, Tq, Tk)} in the order of the calls, in the dtype and on the device of the layer. The name is
        that of the innermost module that attended, such as "encoder.layers.0.self_attn"; where patching has fused a
        whole layer, the layer's. A module that attends several times has ":2", ":3" ... behind its name. Rows are
        queries; each has the sum 1, or 0 where it may see no key, or is padding that a packed stack leaves out. Dropout
        takes no part.

    Raises:
        TypeError: model is no module, layers no names.
        ValueError: no attention call was seen (the model is compiled, or not patched), no layer has such a name, or
            there is no such head.

    Cost: one forward, and 2 B heads Tq Tk D operations and B heads Tq Tk numbers for each layer kept.

    Example:
        >>> model = tfk.nn.TransformerEncoder(tfk.nn.TransformerEncoderLayer(8, 2, 32, batch_first=True), 2)
        >>> {name: tuple(map.shape) for name, map in get_attention_maps(model, torch.randn(3, 5, 8)).items()}
        {'layers.0.self_attn': (3, 2, 5, 5), 'layers.1.self_attn': (3, 2, 5, 5)}
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"{_NAME}: model must be a module, got {type(model).__name__}")
    patterns = _patterns(layers)
    wanted = [heads] if isinstance(heads, int) and not isinstance(heads, bool) else heads
    names = {id(module): name for name, module in model.named_modules()}
    maps: dict[str, Tensor] = {}
    seen: list[str] = []

    def watch(call: AttentionCall, lse: Tensor | None) -> None:
        name = _owner(names)
        count = 1 + sum(other == name or other.startswith(f"{name}:") for other in seen)
        name = name if count == 1 else f"{name}:{count}"
        seen.append(name)
        if patterns is None or any(fnmatchcase(name, pattern) for pattern in patterns):
            maps[name] = _map(call, lse, wanted)

    whole = len(inputs) == 1 and (isinstance(inputs[0], Mapping) or type(inputs[0]) is tuple)
    args, kwargs = _check.call_arguments(_NAME, inputs[0] if whole else inputs)
    with evaluating(model), watching(watch):
        model(*args, **kwargs)
    if not seen:
        raise ValueError(
            f"{_NAME}: model must attend through tfm_kernels, as after tfk.patch(model), and not be compiled; no "
            f"attention call was seen in {type(model).__name__}; print(tfk.patch(model)) tells what was kept"
        )
    for pattern in patterns or ():
        if not any(fnmatchcase(name, pattern) for name in seen):
            raise ValueError(f"{_NAME}: layers must name some of {', '.join(seen)}, got {pattern!r}")
    return maps


def _patterns(layers: Any) -> list[str] | None:
    if layers is None:
        return None
    given = [layers] if isinstance(layers, str) else layers
    if not isinstance(given, Sequence) or not all(isinstance(pattern, str) for pattern in given):
        raise TypeError(f"{_NAME}: layers must be a name, a list of names or None, got {layers!r}")
    return list(given)


def _owner(names: dict[int, str]) -> str:
    """The name of the innermost module of the model that is being run, found among the callers of this function.

    Functions that act for a module have it as their first argument, ``self`` or ``module``. Hooks would tell the same,
    but layers that carry hooks do not run fused.
    """
    frame = sys._getframe(1)
    while frame is not None:
        for argument in ("self", "module"):
            name = names.get(id(frame.f_locals.get(argument)))
            if name is not None:
                return name
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def _map(call: AttentionCall, lse: Tensor | None, heads: Any) -> Tensor:
    """(B, heads, Tq, Tk), the weights of a call without its dropout."""
    if call.cu_seqlens_q is None:
        return _dense_map(call.query, call.key, lse, call.mask, call.bias, call.scale, heads)
    assert call.cu_seqlens_k is not None
    ends_q, ends_k = call.cu_seqlens_q.tolist(), call.cu_seqlens_k.tolist()
    query, key = call.query.transpose(0, 1)[None], call.key.transpose(0, 1)[None]  # (1, H, total, D)
    found = None
    for b in range(len(ends_q) - 1):
        q, k = slice(ends_q[b], ends_q[b + 1]), slice(ends_k[b], ends_k[b + 1])
        part = None if lse is None else lse[None, :, q]
        one = _dense_map(query[:, :, q], key[:, :, k], part, call.mask, None, call.scale, heads)
        if found is None:
            found = one.new_zeros(len(ends_q) - 1, one.shape[1], call.max_seqlen_q, call.max_seqlen_k)
        found[b, :, : one.shape[2], : one.shape[3]] = one[0]
    return query.new_zeros(0, query.shape[1], call.max_seqlen_q, call.max_seqlen_k) if found is None else found


def _dense_map(
    query: Tensor, key: Tensor, lse: Tensor | None, mask: Mask, bias: Tensor | None, scale: float, heads: Any
) -> Tensor:
    if lse is None:  # PyTorch's own attention keeps none
        told: Any = {"bias": bias, "scale": scale, "return_lse": True, "backend": "reference"}
        lse = ops.attention(query, key, key, mask, **told)[1]
    return ops.attention_weights(query, key, lse, mask, bias=bias, scale=scale, heads=heads)
