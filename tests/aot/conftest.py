"""These tests compile Triton's kernels for GPUs that are not there; they need Triton, not interpreting."""

import os
from collections import defaultdict
from importlib.util import find_spec

import pytest

REASON = None
if find_spec("triton") is None:
    REASON = "triton is not installed: pip install triton"
elif os.environ.get("TRITON_INTERPRET") == "1":
    REASON = "compiles kernels: run it without TRITON_INTERPRET"


class Skipped(pytest.Module):
    """A file that is not even imported."""

    def collect(self):
        pytest.skip(REASON, allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    return Skipped.from_parent(parent, path=module_path) if REASON else None


@pytest.fixture
def compilations(monkeypatch):
    """Kernel -> keys under which Triton would keep what it compiled; launches stop there, and need no GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import JITFunction, compute_cache_key, create_function_from_signature

    from tfm_kernels.triton import _launch

    backend = make_backend(GPUTarget("cuda", 90, 32))
    binders, keys = {}, defaultdict(set)

    def run(kernel, *args, grid, warmup, **kwargs):
        if kernel not in binders:
            binders[kernel] = create_function_from_signature(kernel.signature, kernel.params, backend)
        _, specialization, options = binders[kernel](*args, **kwargs)
        for parameter, (kind, what) in zip(kernel.params, specialization, strict=True):
            assert kind == "constexpr" or what is None, f"{parameter.name} is specialised: {what}"
        keys[kernel.fn.__name__].add(compute_cache_key({}, specialization, options))

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(_launch, "check_device", lambda op, x: None)  # tensors on the CPU stand in for a GPU's
    return keys
