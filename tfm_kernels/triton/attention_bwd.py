"""attention_bwd, Triton: not there yet; ops/attention.py does not let a call that needs gradients come here."""

from __future__ import annotations

from typing import Any


def attention_bwd(*arguments: Any) -> Any:
    """The operator attention_bwd_triton."""
    raise NotImplementedError("attention_bwd_triton: has no kernel yet")
