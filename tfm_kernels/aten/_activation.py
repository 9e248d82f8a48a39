"""PyTorch's own activations by the names of ops.ffn."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

ACTIVATE: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda p: F.gelu(p, approximate="tanh"),
    "silu": F.silu,
}
