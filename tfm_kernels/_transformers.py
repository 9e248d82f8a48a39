"""Hugging Face's transformers, where a process has imported it: nothing here does."""

from __future__ import annotations

import sys

from torch import nn


def is_model(module: nn.Module) -> bool:
    """Whether the module is one of transformers' models."""
    library = sys.modules.get("transformers.modeling_utils")  # `import transformers` alone imports none, or cannot
    return library is not None and isinstance(module, library.PreTrainedModel)
