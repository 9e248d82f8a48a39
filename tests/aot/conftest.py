"""These tests compile Triton's kernels for GPUs that are not there; they need Triton, not interpreting."""

from collections import defaultdict

import pytest

from tests.compiled import pytest_pycollect_makemodule  # noqa: F401


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


@pytest.fixture
def told(monkeypatch):
    """Every launch since it was cleared: (kernel, grid, arguments, whether it was repeated); no call is known yet."""
    from triton.runtime.jit import JITFunction

    from bench.launch import host_only
    from tests.aot.repeated import Compiled
    from tfm_kernels.triton import _replay

    launches = []

    def run(kernel, *args, grid, warmup, **given):
        assert not args and not warmup
        launches.append((kernel, (*grid, 1, 1)[:3], [given.get(p.name, p.default) for p in kernel.params], False))
        return Compiled(kernel, launches.append)

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(_replay, "_found", {})
    with host_only():
        yield launches
