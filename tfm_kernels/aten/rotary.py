"""Backend "aten" of rotary: PyTorch's functions, in the dtype of x and the factors together, as models write it."""

from __future__ import annotations

import torch
from torch import Tensor

from .._autocast import beyond_autocast


@beyond_autocast
def rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """(B, H, T, D) -> the same; the arguments are those of ops.rotary, already checked."""
    width, turned = x.shape[-1], cos.shape[-1]
    cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)
    part = x if turned == width else x[..., :turned]
    if interleaved:
        other = torch.stack((-part[..., 1::2], part[..., 0::2]), dim=-1).flatten(-2)
    else:
        first, second = part.chunk(2, dim=-1)
        other = torch.cat((-second, first), dim=-1)
    y = (part * cos + other * sin).to(x.dtype)
    return y if turned == width else torch.cat((y, x[..., turned:]), dim=-1)
