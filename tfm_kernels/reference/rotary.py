"""Backend "reference" of rotary: ROTARY.1 as it stands, in float64, rounded once at the end."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """(B, H, T, D) -> the same; the arguments are those of ops.rotary, already checked."""
    turned = cos.shape[-1]
    columns = torch.arange(turned, device=x.device)
    first, second = (columns[0::2], columns[1::2]) if interleaved else columns.chunk(2)
    cos, sin = cos.double().unsqueeze(-3), sin.double().unsqueeze(-3)
    wide = x.double()
    xi, xj = wide[..., first], wide[..., second]
    yi = xi * cos[..., first] - xj * sin[..., first]
    yj = xj * cos[..., second] + xi * sin[..., second]
    pairs = torch.stack((yi, yj), dim=-1).flatten(-2) if interleaved else torch.cat((yi, yj), dim=-1)
    return torch.cat((pairs, wide[..., turned:]), dim=-1).to(x.dtype)
