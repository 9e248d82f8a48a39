"""The registered operators: one schema and one fake for every compiled backend of an op; _autograd.py joins them.

Importing this module loads the compiled extensions that there are; their kernels register themselves, and no device is
touched.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch.autograd import forward_ad

NAMESPACE = "tfm_kernels"
ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")  # of feed-forward blocks, whose operators take the index
_DISPATCH_KEYS = {"cpu": "CPU", "cuda": "CUDA", "triton": "CUDA"}

library = torch.library.Library(NAMESPACE, "FRAGMENT")  # kept alive: its registrations die with it


def _load(name: str, what: str, where: str = "") -> tuple[ModuleType | None, str]:
    try:
        return importlib.import_module(f"{NAMESPACE}.{name}"), ""
    except ModuleNotFoundError:
        return None, f"{what} was not built; `pip install --no-build-isolation .` builds it{where}"
    except ImportError as error:
        reason = str(error).splitlines()[0]
        return None, (
            f"{what} does not load with torch {torch.__version__} ({reason}); "
            "`pip install --no-build-isolation --force-reinstall --no-deps .` builds it anew"
        )


cpu_extension, cpu_missing = _load("_C", "the C++ extension")
_CUDA = ("_cuda", "the CUDA extension", " where nvcc is")
cuda_extension, cuda_missing = _load(*_CUDA)
# whether the CPU kernels multiply bfloat16 as it is stored (AMX, AVX512_BF16)
bf16_tiles: bool = cpu_extension is not None and cpu_extension.build_info()["bf16_tiles"]
# whether PyTorch multiplies float16 as it is stored (AVX512_FP16); elsewhere it takes six times as long as for float32
f16_products: bool = (
    torch.backends.mkldnn.is_available()
    and hasattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported")
    and torch.ops.mkldnn._is_mkldnn_fp16_supported()
)
# The processors that automatic choice was measured on: AVX2; AVX-512 with AVX512_BF16; AVX-512 with AMX, AVX512_FP16.
ZEN3, ZEN4, XEON = "Zen 3", "Zen 4", "Xeon"


def _nearest() -> str:
    capability = torch.backends.cpu.get_cpu_capability()
    if cpu_extension is None or capability not in ("AVX2", "AVX512"):
        return XEON
    return ZEN3 if capability == "AVX2" else ZEN4 if cpu_extension.build_info()["amd"] else XEON


# The one that this processor is most like: by the vectors that torch uses and, because MKL makes less of AMD's, by its
# maker.
nearest: str = _nearest()
plain_calls: dict[
    torch._ops.OpOverload, int
] = {}  # operator -> its number for cpu_extension.apply(); filled by declare()
_missing: dict[str, str | None] = {}  # filled by declare(): compiled code may read it, but not ask the dispatcher


def declare(
    name: str, schema: str, fake: Callable[..., Any], backends: Iterable[str]
) -> dict[str, torch._ops.OpOverload]:
    """Defines ``<name>_<backend>`` for each compiled backend, all with one schema and one fake.

    Args:
        name: op and direction, such as "layer_norm_fwd".
        schema: arguments and returns in torch.library's language, without a name: "(Tensor x) -> Tensor".
        fake: the same signature; returns empty tensors of the right shape, dtype and device.
        backends: which of "cpu", "triton", "cuda" have kernels for it.

    Returns:
        backend -> the operator to call.
    """
    overloads = {}
    for backend in backends:
        library.define(f"{name}_{backend}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.register_fake(f"{NAMESPACE}::{name}_{backend}", fake, lib=library)
        if backend == "triton":
            for key in ("CUDA", "CPU"):  # on the CPU Triton's interpreter runs it, or its launcher refuses
                library.impl(f"{name}_triton", _launch_triton(name), key)
        _missing[f"{name}_{backend}"] = _why_missing(name, backend)
        overloads[backend] = operator = getattr(getattr(torch.ops, NAMESPACE), f"{name}_{backend}").default
        if cpu_extension is not None:
            plain_calls[operator] = cpu_extension.plan(f"{NAMESPACE}::{name}_{backend}")
    return overloads


_signature: Callable[..., bytes | None] = getattr(cpu_extension, "signature", lambda *parts: None)
_launch_signature: Callable[..., bytes | None] = getattr(cpu_extension, "launch_signature", lambda *parts: None)
_lock = threading.Lock()
_planned_anew = 0  # blocks of plans_anew() that are under way


def signature(*parts: Any) -> bytes | None:
    """All that the checks of a call and the choice of its backend may depend on, as a key for ``_backend.Choices``.

    Args:
        *parts: tensors (dtype, layout, device, shape and need of a gradient count, values do not), numbers, strings,
            None and tuples of these. True is not 1, and 0.0 is not 0.

    Returns:
        Equal bytes for calls that are alike; None where there is no key: a part of another kind, such as a list or a
        subclass of Tensor; while a graph is compiled, where checks cost nothing; in a transform of torch.func or in
        forward-mode differentiation, whose tensors look like plain ones; without the C++ extension.
    """
    return None if torch.compiler.is_compiling() or forward_ad._current_level >= 0 else _signature(*parts)


def _launch_key(*arguments: Any) -> bytes | None:
    return None if _planned_anew else _launch_signature(*arguments)


@contextmanager
def plans_anew() -> Iterator[None]:
    """Inside, in all threads, Triton's launchers plan every call: for whatever changes how they plan or make tensors.

    Outside they repeat what they did for a call of the same shapes (triton/_replay.py).
    """
    global _planned_anew
    with _lock:
        _planned_anew += 1
    try:
        yield
    finally:
        with _lock:
            _planned_anew -= 1


def _launch_triton(name: str) -> Callable[..., Any]:
    """The function ``name`` of tfm_kernels/triton/<name>.py, imported, and Triton with it, by its first call."""
    launcher: Callable[..., Any] | None = None

    def first(*arguments: Any) -> Any:
        return getattr(importlib.import_module(f"{NAMESPACE}.triton.{name}"), name)(*arguments)

    def launch(*arguments: Any) -> Any:
        nonlocal launcher
        if launcher is None:
            replay = importlib.import_module(f"{NAMESPACE}.triton._replay")
            launcher = replay.Launcher(first, _launch_key)
        return launcher(*arguments)

    return launch


def triton_interprets() -> bool:
    """Whether Triton was told (TRITON_INTERPRET=1) to interpret its kernels, which then take CPU tensors."""
    if find_spec("triton") is None:
        return False
    import triton

    return triton.knobs.runtime.interpret


# What torch.compiler.assume_constant_result does, which would import torch's compiler and, with it, Triton: 2 s.
triton_interprets._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _why_missing(name: str, backend: str) -> str | None:
    if backend == "triton":
        return None if find_spec("triton") is not None else "triton is not installed: pip install triton"
    qualified = f"{NAMESPACE}::{name}_{backend}"
    if torch._C._dispatch_has_kernel_for_dispatch_key(qualified, _DISPATCH_KEYS[backend]):
        return None
    absent, what = (cuda_missing, "CUDA") if backend == "cuda" else (cpu_missing, "C++")
    return absent or f"the {what} extension holds no {name}; `pip install --no-build-isolation .` builds it anew"


def unreachable(device: str, backend: str) -> str | None:
    """None where kernels of a backend can read tensors on this type of device, else one sentence why not."""
    if backend == "cpu":
        return None if device == "cpu" else f"needs a CPU tensor, got {device}"
    interpreted = backend == "triton" and device == "cpu" and triton_interprets()
    return None if device == "cuda" or interpreted else f"needs a CUDA tensor, got {device}"


def transformed() -> bool:
    """Whether a transform of torch.func (grad, vmap, ...) or forward-mode differentiation is under way."""
    if torch.compiler.is_compiling():
        return False
    return forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None


def differentiates_twice() -> bool:
    """Whether transforms of torch.func that differentiate in reverse mode are under way one in another."""
    stack = None if torch.compiler.is_compiling() else torch._C._functorch.get_interpreter_stack()
    return sum(level.key() == torch._C._functorch.TransformType.Grad for level in stack or ()) > 1


if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12):

    def exporting() -> bool:
        """Whether torch.export is under way; torch 2.11's is_exporting() says so of every graph that it compiles."""
        return torch.compiler._is_exporting_flag

else:
    exporting = torch.compiler.is_exporting


def certain(condition: Any) -> bool:
    """Whether a condition on sizes holds. Of dynamic sizes compiled code says so only where no guard is needed for it.

    A guard would bind the graph, or an exported program, to a range of sizes.
    """
    if not torch.compiler.is_compiling():
        return bool(condition)
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # sympy: not for every import

    return statically_known_true(condition)


def missing(op: str, backend: str, directions: Sequence[str] = ("fwd", "bwd")) -> str | None:
    """None where the backend's kernels of these directions of ``op`` can be called, else one sentence why not."""
    if transformed():
        return (
            "a transform of torch.func (grad, vmap, ...) or forward-mode differentiation is under way, which knows "
            "PyTorch's own operators alone"
        )
    reasons = (_missing[f"{op}_{direction}_{backend}"] for direction in directions)
    return next((reason for reason in reasons if reason is not None), None)


def kernels() -> dict[str, str | None]:
    """Every declared operator, "<name>_<backend>": None where its kernel is registered, else one sentence why not."""
    return dict(_missing)


def load_again() -> None:
    """Loads the CUDA extension where it was built since this module was imported; a loaded one stays as it is."""
    global cuda_extension, cuda_missing
    importlib.invalidate_caches()
    cuda_extension, cuda_missing = _load(*_CUDA)
    for operator in _missing:
        if operator.endswith("_cuda"):
            _missing[operator] = _why_missing(operator.removesuffix("_cuda"), "cuda")
