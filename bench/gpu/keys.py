"""The keys by which Triton finds kernels in its cache, the same in every process."""

from __future__ import annotations

from typing import Any

from . import machine


def settle() -> None:
    """From here on a kernel's key depends on sources alone, not on the kernels that the process has met before.

    A key holds the global constants that called functions use. Triton 3.6 asks a function for them before it has
    looked for them, unless another kernel has called it; so attention's, ffn's and products' kernels had several keys
    each, and were compiled for each. Triton 3.9 looks first, as this does.
    """
    if machine.package("triton") is None:
        return
    from triton.runtime.jit import DependenciesFinder

    update = DependenciesFinder._update_hash
    if update.__module__ == __name__:
        return

    def look_first(finder: Any, function: Any) -> None:
        hash(function)  # Triton's, which looks for them
        update(finder, function)

    DependenciesFinder._update_hash = look_first
