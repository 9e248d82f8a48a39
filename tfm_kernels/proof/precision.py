"""In which precision the original runs: the truth in float64 throughout, what it is measured by in the dtype to judge.

Code that is written for 16 bits asks for float32 by name where it must not round (Llama's and T5's norms, rotary
angles), and code in float64 would be rounded there. PyTorch's composed attention does the reverse: it computes 16-bit
calls in float32, where its fused attention, which it takes for calls without dropout and without a bias that needs a
gradient, rounds the weights to 16 bits as any fused kernel does. So what a 16-bit model is measured by is the formula
in its own dtype (rule C2 of the numeric contract).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..nn import Int8Linear
from ..patching.copying import copied

_aten = torch.ops.aten
_DRAWS = (_aten.rand, _aten.randn)  # give other numbers in another dtype


class _Float64(TorchDispatchMode):
    """Where a program asks for float32 it gets float64, and the other way round where it draws numbers.

    Works below autograd, so that a checkpointed model that runs again in the backward is met there, too.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket in _DRAWS:
            return func(*args, **{**kwargs, "dtype": kwargs.get("dtype") or torch.float32})
        if func is _aten.view.dtype:  # reads the bits anew
            return func(*args, **kwargs)
        if func is _aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
            gradients = _attention_bwd(*args, **kwargs)
            if gradients is not None:
                return gradients
        return func(*map(_wide, args), **{name: _wide(value) for name, value in kwargs.items()})


def _attention_bwd(dout, q, k, v, out, lse, dropout_p, is_causal, *, attn_mask=None, scale=None):
    """Gradients of PyTorch's fused attention for CPUs, by the formula where its own are wrong, else None.

    Where a bias hides all keys of a row by one large number, as models do with padding, that number swallows the
    scores, and in lse the number of keys as well: its gradients are so many times too large.
    """
    if attn_mask is None or not attn_mask.is_floating_point() or 0 in attn_mask.shape or is_causal or dropout_p:
        return None
    most = attn_mask.amax(-1)
    if not (most.isfinite() & (most < -(2.0**40))).any() or q.shape[1] != k.shape[1]:
        return None
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    p = torch.softmax(q @ k.transpose(-1, -2) * scale + attn_mask, -1)
    dp = dout @ v.transpose(-1, -2)
    ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
    return ds @ k, ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ dout


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def exact(model: nn.Module) -> nn.Module:
    """A copy in float64, in which no linear layer rounds its input to int8.

    That rounding is an error of the original as of whatever is compared with it, and one integer more or less, which
    the last bit of an input may decide, is a small part of it. transformers' mixtures of experts run one expert after
    another: the grouped product that it chooses for them knows no float64.
    """
    wide = copied(model).double()
    for module in wide.modules():
        if isinstance(module, Int8Linear):
            module.dynamic = False
        config: Any = module.__dict__.get("config")
        if getattr(config, "_experts_implementation", None) is not None:
            config._experts_implementation = "eager"
    return wide


@contextmanager
def exactly(dtype: torch.dtype) -> Iterator[None]:
    """For the float64 run of a model whose ``dtype`` is judged: nothing in it is rounded to float32.

    A model that is judged in float64 keeps to what its own code says, which the patched one must do too.
    """
    if dtype == torch.float64:
        yield
        return
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Float64():
            yield
    finally:
        torch.set_default_dtype(default)


@contextmanager
def in_its_own_dtype() -> Iterator[None]:
    """For the original's run: composed attention rounds to the dtype of its arguments, as fused attention does."""
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)
