"""Which output positions are padding, and left to either model's taste.

A padded batch may run packed (padding-free), and then the padded positions of the encoder's output are 0, or what a
head makes of 0, where the original computes values that nobody reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

KEEP_MASKS = ("attention_mask", "decoder_attention_mask")  # 1 = a token, as in Hugging Face's models
IGNORE_MASKS = ("src_key_padding_mask", "tgt_key_padding_mask", "key_padding_mask")  # True = ignore, as in torch.nn


def masks(arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """Name -> (B, T) bool, True = padding, of every padding mask among the arguments of a model."""
    found: dict[str, Tensor] = {}
    for name in KEEP_MASKS + IGNORE_MASKS:
        value = arguments.get(name)
        if isinstance(value, Tensor) and value.dim() == 2:
            if name in KEEP_MASKS:
                found[name] = value == 0
            else:
                found[name] = value if value.dtype == torch.bool else value < 0
    return found


def padded(
    outputs: Mapping[str, Tensor], found: Mapping[str, Tensor], arguments: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Name -> (B, T) or (T, B) bool of the outputs whose padding the patched model left out.

    Args:
        outputs: of the patched model.
        found: what ``masks`` gave.
        arguments: the model's arguments by name; they tell an encoder-decoder model from an encoder.
    """
    ignored: dict[str, Tensor] = {}
    for name, output in outputs.items():
        mask = _mask_of(name, found, arguments)
        if mask is None or output.dim() < 2:
            continue
        if output.shape[:2] != mask.shape:
            mask = mask.T
        if output.shape[:2] == mask.shape and mask.any() and _one_value(output[mask]):
            ignored[name] = mask
    return ignored


def _mask_of(output: str, found: Mapping[str, Tensor], arguments: Mapping[str, Any]) -> Tensor | None:
    """The mask of the sequence that an output belongs to: the target's in an encoder-decoder model."""
    if "tgt" in arguments:
        return found.get("tgt_key_padding_mask")
    if any(name.startswith("decoder_") and arguments[name] is not None for name in arguments):
        return found.get("attention_mask" if ".encoder_" in output else "decoder_attention_mask")
    return next(iter(found.values()), None)


def _one_value(rows: Tensor) -> bool:
    """Whether all padded positions hold the same, which live positions do not."""
    rows = rows.flatten(1) if rows.dim() > 1 else rows.unsqueeze(1)
    return bool((rows - rows[0]).abs().max() <= 1e-3 * rows.abs().max())
