"""assert_contract(): runs an op on a named backend, forward and backward, and judges what comes out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .judge import COMPOSED, TRUTHS, judge, main_tensor
from .report import Report

CONSTANTS = {"rotary": ("cos", "sin")}  # floating arguments that no kernel has a gradient for
FORWARD_ONLY = ("linear", "int8_linear", "int8_ffn")  # ops whose kernels compute no gradients
Douts = Mapping[str, Tensor | None] | Callable[[Mapping[str, Tensor]], Mapping[str, Tensor | None]] | None


@dataclass(frozen=True)
class Results:
    """What one forward and backward left.

    Attributes:
        outputs: output name -> tensor.
        grads: argument name -> gradient, for every floating-point tensor argument; not for rotary's cos and sin.
        douts: output name -> the gradient that the backward was given.
    """

    outputs: dict[str, Tensor]
    grads: dict[str, Tensor | None]
    douts: dict[str, Tensor | None]


def run(
    op: str,
    inputs: Mapping[str, Any],
    backend: str,
    *,
    douts: Douts = None,
    backward: bool | None = None,
) -> Results:
    """Calls ``tfm_kernels.ops.<op>`` on one backend and differentiates it.

    Args:
        op: the public function's name.
        inputs: its arguments by name.
        backend: the backend to name in the call; nothing falls back.
        douts: output name -> output gradient, or a function that makes them from the outputs; None draws normal ones
            from a fixed seed.
        backward: False runs the forward alone; None does where the backend's kernels compute no gradients.
    """
    from .. import ops  # here, because judging must work where no op can be imported

    if backward is None:
        backward = op not in FORWARD_ONLY or backend in COMPOSED
    leaves = {
        name: t.detach().requires_grad_(backward)
        for name, t in inputs.items()
        if isinstance(t, Tensor) and t.is_floating_point() and name not in CONSTANTS.get(op, ())
    }
    with torch.set_grad_enabled(backward):
        result = getattr(ops, op)(**{**inputs, **leaves}, backend=backend)
    outputs = dict(zip(_names(op, inputs), result if isinstance(result, tuple) else (result,), strict=True))
    detached = {name: t.detach() for name, t in outputs.items()}
    if not backward:
        return Results(detached, {}, {})
    if douts is None:
        douts = draw_douts(detached)
    elif callable(douts):
        douts = douts(detached)
    pairs = [(t, douts[name]) for name, t in outputs.items() if douts.get(name) is not None]
    grads = torch.autograd.grad([t for t, _ in pairs], list(leaves.values()), [d for _, d in pairs], allow_unused=True)
    return Results(detached, dict(zip(leaves, grads, strict=True)), dict(douts))


def draw_douts(outputs: Mapping[str, Tensor], seed: int = 7) -> dict[str, Tensor | None]:
    """Normal output gradients from a fixed seed, in the outputs' own types."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(t.shape, generator=generator).to(t.dtype).to(t.device) for name, t in outputs.items()}


def assert_contract(
    op: str,
    inputs: Mapping[str, Any],
    backend: str,
    *,
    douts: Douts = None,
    backward: bool | None = None,
    tame: bool | None = None,
    slack: float | None = None,
) -> Report:
    """Runs an op on a named backend and holds its results to the numeric contract.

    Forward and backward run twice and must repeat bit for bit; the inputs must be left as they were; every output and
    gradient must lie within the error that rounding explains (C1), be no worse than the same formula in eager PyTorch
    (C2) and not lean to one side (C3). The errors of backend "aten", PyTorch's own functions, are measured; they fail
    only where no rounding explains them.

    Args:
        op: "layer_norm", "add_layer_norm", "rms_norm", "add_rms_norm", "attention", "attention_varlen", "ffn",
            "linear", "int8_linear", "int8_ffn", "linear_cross_entropy" or "rotary".
        inputs: the public function's arguments by name, such as {"x": x, "weight": w, "eps": 1e-6}. With dropout_p > 0
            and no seed, seed 0 is used: the judge has to know the mask.
        backend: "reference" | "aten" | "cpu" | "triton" | "cuda".
        douts: output name -> output gradient, or a function that makes them from the outputs; None draws normal ones.
        backward: False judges the forward alone; None does where the backend's kernels compute no gradients.
        tame: whether C2 and C3 apply, which need zero-mean data without outliers; None looks at the data.
        slack: s of C1; None is 0.10 on a CPU, 0.25 elsewhere.

    Returns:
        The report: ``print(report)`` shows error / bound by tensor and rule, ``report.worst`` the C1 ratios.

    Raises:
        ContractError: a rule is broken; the message names op, backend, tensor, index and error / bound.
        BackendError: the backend cannot run the call.

    Example:
        >>> x = torch.randn(4, 256, dtype=torch.bfloat16)
        >>> print(assert_contract("layer_norm", {"x": x}, "cpu"))
        layer_norm [cpu] x bfloat16[4, 256]
          tensor               C1         C2         C6
          y                   ...
    """
    return contract_report(op, inputs, backend, douts=douts, backward=backward, tame=tame, slack=slack).raise_broken()


def contract_report(
    op: str,
    inputs: Mapping[str, Any],
    backend: str,
    *,
    douts: Douts = None,
    backward: bool | None = None,
    tame: bool | None = None,
    slack: float | None = None,
) -> Report:
    """What assert_contract() finds, without raising."""
    if op not in TRUTHS:
        raise ValueError(f"assert_contract: op must be one of {', '.join(TRUTHS)}, got {op!r}")
    if not isinstance(inputs, Mapping):
        raise TypeError(
            f"assert_contract: inputs must be a mapping of {op}'s arguments by name, got {type(inputs).__name__}"
        )
    needed = "query" if op.startswith("attention") else "x"
    if needed not in inputs:
        raise ValueError(f"assert_contract: inputs of {op} must hold {needed!r}, got {', '.join(map(repr, inputs))}")
    inputs = dict(inputs)
    main = main_tensor(inputs)
    if inputs.get("dropout_p", 0.0) > 0.0 and inputs.get("seed") is None:
        inputs["seed"] = torch.zeros((), dtype=torch.int64, device=main.device)
    before = {name: t.detach().clone() for name, t in inputs.items() if isinstance(t, Tensor)}
    first = run(op, inputs, backend, douts=douts, backward=backward)
    second = run(op, inputs, backend, douts=first.douts or None, backward=backward)
    report = judge(op, inputs, first.outputs, first.grads, first.douts, backend=backend, slack=slack, tame=tame)
    _same(report, "C6", "differs from a second run of the same call", first.outputs, second.outputs)
    if inputs.get("deterministic", True):
        _same(report, "C6", "differs from a second run of the same call", first.grads, second.grads, "d")
    for name, grad in first.grads.items():
        if grad is None:
            report.add(f"d{name}", "form", float("inf"), "no gradient reached the argument")
    for name, t in before.items():
        if not bits_equal(t, inputs[name]):
            report.add(name, "form", float("inf"), "the call changed its argument")
    return report


def _same(
    report: Report, rule: str, message: str, first: Mapping[str, Any], second: Mapping[str, Any], prefix: str = ""
) -> None:
    for name, t in first.items():
        if t is not None:
            equal = bits_equal(t, second[name])
            report.add(prefix + name, rule, 0.0 if equal else float("inf"), "" if equal else message)


def bits_equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bits (NaN equals NaN, 0 differs from -0)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(_bits(a), _bits(b))


def _bits(t: Tensor) -> Tensor:
    t = t.detach().contiguous()
    if not t.is_floating_point():
        return t
    return t.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])


def _names(op: str, inputs: Mapping[str, Any]) -> tuple[str, ...]:
    if op.startswith("attention"):
        return ("out", "lse") if inputs.get("return_lse", False) else ("out",)
    if op == "linear_cross_entropy":
        return ("loss",)
    return ("y", "z") if op.startswith("add_") else ("y",)
