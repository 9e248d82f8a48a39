"""Rows as PyTorch's linear layer needs them."""

from __future__ import annotations

import torch
from torch import Tensor


def closed(x: Tensor) -> Tensor:
    """``x`` without gaps between its rows, where they would reach the product of a linear layer.

    Of bfloat16 on a CPU oneDNN (in torch 2.13) reads on behind the end of a row whose length is no multiple of 32, and
    multiplies what it finds by 0, which a NaN survives.
    """
    if x.dtype != torch.bfloat16 or not x.is_cpu or torch.compiler.is_compiling() or x.shape[-1] % 32 == 0:
        return x
    return x.contiguous()
