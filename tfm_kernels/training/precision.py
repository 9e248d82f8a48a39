"""Mixed precision: what autocast and loss scaling a run needs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

PRECISIONS = ("fp32", "bf16", "fp16")
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """The context of a forward pass: torch.autocast in bfloat16 or float16, nothing for "fp32".

    Args:
        precision: "fp32", "bf16" or "fp16"; the parameters stay float32 in all of them.
        device: where the model is.

    Raises:
        ValueError: the precision is none of them.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"autocast: precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
    return torch.autocast(device.type, _DTYPES[precision]) if precision in _DTYPES else nullcontext()


def scaler(precision: str, device: torch.device) -> torch.amp.GradScaler:
    """Scales the loss so that small float16 gradients survive; does nothing in the other precisions."""
    return torch.amp.GradScaler(device.type, enabled=precision == "fp16")
