"""The activations of feed-forward blocks, written out."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def activate(p: Tensor, activation: str) -> Tensor:
    """act(p), written out."""
    if activation == "relu":
        return torch.relu(p)  # not clamp, whose gradient at 0 is 1
    if activation == "gelu":
        return 0.5 * p * (1.0 + torch.erf(p / math.sqrt(2.0)))
    if activation == "gelu_tanh":
        return 0.5 * p * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (p + 0.044715 * p**3)))
    return p * torch.sigmoid(p)  # not p / (1 + e^-p), whose gradient is inf/inf where e^-p overflows
