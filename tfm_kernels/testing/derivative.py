"""C7: float64 gradcheck of a public function, and torch.library.opcheck of the operators it calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .contract import CONSTANTS, run


def assert_gradcheck(op: str, inputs: Mapping[str, Any], backend: str) -> None:
    """Compares the backward with finite differences in float64; results must repeat bit for bit.

    Args:
        op: the public function's name.
        inputs: its arguments; floating-point tensors are cast to float64. Keep them tiny: each element costs two calls.
        backend: the backend to name.
    """
    from .. import ops

    wanted = {name: t for name, t in inputs.items() if _floating(t) and name not in CONSTANTS.get(op, ())}
    leaves = {name: t.detach().double().requires_grad_() for name, t in wanted.items()}
    others = {name: value for name, value in inputs.items() if name not in leaves}

    def function(*tensors: Tensor) -> Any:
        return getattr(ops, op)(**dict(zip(leaves, tensors, strict=True)), **others, backend=backend)

    torch.autograd.gradcheck(function, tuple(leaves.values()), nondet_tol=0.0, atol=1e-6, rtol=1e-4)


def assert_opcheck(op: str, inputs: Mapping[str, Any], backend: str) -> list[str]:
    """Runs torch.library.opcheck on every registered operator that a forward and backward call.

    Args:
        op: the public function's name.
        inputs: its arguments.
        backend: the backend to name; reference and aten call no registered operators.

    Returns:
        The names of the operators that were checked.
    """
    with _Recorder() as recorder:
        run(op, inputs, backend)
    for operator, args, kwargs in recorder.calls:
        # the backward operators refuse to be differentiated
        wanted = "_fwd_" in operator._schema.name
        fresh = tuple(a.detach().clone().requires_grad_(wanted) if _floating(a) else a for a in args)
        torch.library.opcheck(operator, fresh, kwargs)
    return [operator._schema.name for operator, _, _ in recorder.calls]


class _Recorder(TorchDispatchMode):
    """Notes the calls of this package's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple, dict]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.namespace == "tfm_kernels":
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
