"""The registered operators: one schema and one fake for every compiled backend of an op, and one autograd rule.

Importing this module loads the compiled extensions that there are; their kernels register themselves, and no device is
touched.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

NAMESPACE = "tfm_kernels"
_DISPATCH_KEYS = {"cpu": "CPU", "cuda": "CUDA", "triton": "CUDA"}

_library = torch.library.Library(NAMESPACE, "FRAGMENT")  # kept alive: its registrations die with it


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
# whether the CPU kernels run by AVX2, as torch does: vectors of 8 numbers, 16 bits emulated
avx2: bool = cpu_extension is not None and torch.backends.cpu.get_cpu_capability() == "AVX2"
_missing: dict[str, str | None] = {}  # filled by declare(): compiled code may read it, but not ask the dispatcher


def declare(
    name: str, schema: str, fake: Callable[..., Any], backends: Sequence[str]
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
        _library.define(f"{name}_{backend}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.register_fake(f"{NAMESPACE}::{name}_{backend}", fake, lib=_library)
        if backend == "triton":
            for key in ("CUDA", "CPU"):  # on the CPU Triton's interpreter runs it, or its launcher refuses
                _library.impl(f"{name}_triton", _launch_triton(name), key)
        _missing[f"{name}_{backend}"] = _why_missing(name, backend)
        overloads[backend] = getattr(getattr(torch.ops, NAMESPACE), f"{name}_{backend}").default
    return overloads


_signature: Callable[..., bytes | None] = getattr(cpu_extension, "signature", lambda *parts: None)


def signature(*parts: Any) -> bytes | None:
    """All that the checks of a call and the choice of its backend may depend on, as a key for ``_backend.Choices``.

    Args:
        *parts: tensors (dtype, layout, device, shape and need of a gradient count, values do not), numbers, strings,
            None and tuples of these. True is not 1, and 0.0 is not 0.

    Returns:
        Equal bytes for calls that are alike; None where there is no key: a part of another kind, such as a list or a
        subclass of Tensor; while a graph is compiled, where checks cost nothing; without the C++ extension.
    """
    return None if torch.compiler.is_compiling() else _signature(*parts)


def _launch_triton(name: str) -> Callable[..., Any]:
    """The function ``name`` of tfm_kernels/triton/<name>.py, imported, and Triton with it, by its first call."""

    def launch(*arguments: Any) -> Any:
        return getattr(importlib.import_module(f"{NAMESPACE}.triton.{name}"), name)(*arguments)

    return launch


@torch.compiler.assume_constant_result
def triton_interprets() -> bool:
    """Whether Triton was told (TRITON_INTERPRET=1) to interpret its kernels, which then take CPU tensors."""
    if find_spec("triton") is None:
        return False
    import triton

    return triton.knobs.runtime.interpret


def _why_missing(name: str, backend: str) -> str | None:
    if backend == "triton":
        return None if find_spec("triton") is not None else "triton is not installed: pip install triton"
    qualified = f"{NAMESPACE}::{name}_{backend}"
    if torch._C._dispatch_has_kernel_for_dispatch_key(qualified, _DISPATCH_KEYS[backend]):
        return None
    absent, what = (cuda_missing, "CUDA") if backend == "cuda" else (cpu_missing, "C++")
    return absent or f"the {what} extension holds no {name}; `pip install --no-build-isolation .` builds it anew"


def unreachable(device: str, backend: str) -> str | None:
    """None where kernels of a GPU's backend can read tensors on this type of device, else one sentence why not."""
    interpreted = backend == "triton" and device == "cpu" and triton_interprets()
    return None if device == "cuda" or interpreted else f"needs a CUDA tensor, got {device}"


def missing(op: str, backend: str, directions: Sequence[str] = ("fwd", "bwd")) -> str | None:
    """None where the backend's kernels of these directions of ``op`` are registered, else one sentence why not."""
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


def differentiate(
    forward: Mapping[str, Any],
    backward: Mapping[str, Any],
    save: Callable[[Any, tuple, tuple], None],
    gradients: Callable[..., tuple],
) -> Callable[..., tuple]:
    """Joins the forward and backward operators of an op into its one differentiable function.

    The rule serves two doors: an autograd.Function outside the operators, which is the fast one and the one that
    compiled code sees, and register_autograd on the forward operator, so that exported programs can be trained. The
    backward operators raise when they are differentiated again: a double backward must not be silently wrong.

    Args:
        forward: backend -> forward operator, as declare() returned it.
        backward: backend -> backward operator.
        save: save(ctx, arguments, outputs) keeps on ctx what the gradients need.
        gradients: gradients(ctx, backward_operator, needs, *output_gradients) returns one gradient or None per
            argument; ``needs`` holds a bool per argument.

    Returns:
        apply(backend, *arguments) -> the forward operator's outputs, recording a graph where a gradient is needed.
    """

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, backend: str, *arguments: Any) -> Any:
            outputs = below_autograd(forward[backend], *arguments)
            ctx.backend = backend
            save(ctx, arguments, outputs)
            return outputs

        @staticmethod
        def backward(ctx: Any, *output_gradients: Any) -> Any:
            bwd = backward[ctx.backend]
            if not torch.is_grad_enabled():  # else a double backward is being recorded, which the operator refuses
                bwd = functools.partial(below_autograd, bwd)
            return None, *gradients(ctx, bwd, ctx.needs_input_grad[1:], *output_gradients)

    for backend, operator in forward.items():
        bwd = backward[backend]
        torch.library.register_autograd(
            operator._schema.name,
            lambda ctx, *grads, _bwd=bwd: gradients(ctx, _bwd, ctx.needs_input_grad, *grads),
            setup_context=lambda ctx, inputs, output: save(ctx, inputs, output),
            lib=_library,
        )
        _refuse_double_backward(bwd)

    def apply(backend: str, *arguments: Any) -> tuple:
        if torch.is_grad_enabled():
            for argument in arguments:
                if isinstance(argument, torch.Tensor) and argument.requires_grad:
                    return Fused.apply(backend, *arguments)
        return below_autograd(forward[backend], *arguments)

    return apply


def below_autograd(operator: Any, *arguments: Any) -> Any:
    """Calls the operator past its Python autograd registration, which costs as much as a small kernel.

    Only for callers that record no graph; 47 us became 25 for a one-row layer_norm on a 2.5 GHz Cascade Lake.
    """
    if torch.compiler.is_compiling():
        return operator(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*arguments)


def _refuse_double_backward(operator: Any) -> None:
    name = operator._schema.name.removeprefix(f"{NAMESPACE}::")
    op, backend = name.split("_bwd_")

    def refuse(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            f"{op}: the {backend} backend is differentiable once; use backend='reference' or 'aten' for a double "
            "backward"
        )

    torch.library.register_autograd(operator._schema.name, refuse, lib=_library)
