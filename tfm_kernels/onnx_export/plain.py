"""The copy of a model that is exported: PyTorch's own operators alone, in evaluation mode, and nothing asked of values.

The user's model is never touched, so nothing has to be put back.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from .. import patching
from .._backend import use_backend
from ..patching.copying import copied_apart
from ..patching.model import is_own
from ..proof.runs import Call, buffers_kept

_STACKS = (nn.TransformerEncoder, nn.TransformerDecoder)


def plain(model: nn.Module) -> nn.Module:
    """A copy on the CPU, without patches and without the backends that its modules were given by name."""
    own = copied_apart(model).to("cpu").eval()
    patching.unpatch(own)
    for module in own.modules():
        if is_own(module) and hasattr(module, "backend"):
            cast(Any, module).backend = None  # within_aten() and the judge choose
        if type(module) in _STACKS:
            module.register_forward_pre_hook(_without_looking, with_kwargs=True)
    return own


def _without_looking(stack: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """torch.nn's stacks look into a mask for whether it is causal; told that it is none, they take it as it stands."""
    call = inspect.signature(stack.forward).bind(*args, **kwargs)
    for hint in ("is_causal", "tgt_is_causal"):
        if hint in call.signature.parameters and call.arguments.get(hint) is None:
            call.arguments[hint] = False
    return call.args, call.kwargs


def returned(model: nn.Module, call: Call) -> Any:
    """What a call returns; buffers that it changes are put back."""
    with torch.no_grad(), buffers_kept(model):
        return model(*call.args, **call.kwargs)


@contextmanager
def within_aten() -> Iterator[None]:
    """Every op by PyTorch's own operators, those that exporters know; no graph for gradients."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # its fused operator has no counterpart in ONNX
    try:
        with torch.no_grad(), use_backend("aten"):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
