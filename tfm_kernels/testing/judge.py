"""judge(): whether the results of a call keep the numeric contract. It runs nothing but float64 formulas.

C1: every element within the bound that rounding explains. C2: the whole tensor no worse than the written-out eager
formula E in the same type. C3: the error does not lean to one side. The rules and their constants stand in this package
alone; a backend that fails them is mended, never excused.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import attention, ffn, int8_ffn, int8_linear, linear, linear_cross_entropy, norm, rotary
from .data import tame as is_tame
from .report import Report
from .rounding import Expected, rounding

TRUTHS: dict[str, ModuleType] = {
    "layer_norm": norm,
    "add_layer_norm": norm,
    "rms_norm": norm,
    "add_rms_norm": norm,
    "attention": attention,
    "attention_varlen": attention,
    "ffn": ffn,
    "linear": linear,
    "int8_linear": int8_linear,
    "int8_ffn": int8_ffn,
    "linear_cross_entropy": linear_cross_entropy,
    "rotary": rotary,
}
COMPOSED = ("reference", "aten")  # of PyTorch's functions, by which and by autograd they round
GROSS = 8.0  # aten's errors are reported; those beyond so many times what its roundings explain fail
SLACK = {"cpu": 0.10}  # s of C1 by device kind; GPU's approximate exp, rsqrt and reduction order get 0.25

_C3_LIMITS = {"out": 0.05, "y": 0.05, "dquery": 0.15, "dkey": 0.15}
_C3_ELEMENTS = 32768
_C2_ELEMENTS = 64  # effective number, below which chance rules the Frobenius norm


def judge(
    op: str,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Tensor],
    grads: Mapping[str, Tensor | None] | None = None,
    douts: Mapping[str, Tensor | None] | None = None,
    *,
    backend: str = "given results",
    slack: float | None = None,
    tame: bool | None = None,
) -> Report:
    """Judges results, wherever they come from.

    Args:
        op: "layer_norm", "add_layer_norm", "rms_norm", "add_rms_norm", "attention", "attention_varlen", "ffn",
            "linear", "int8_linear", "int8_ffn", "linear_cross_entropy" or "rotary".
        inputs: the public function's arguments by name: tensors in their storage types, options where not default.
            ``seed`` is needed where dropout_p > 0.
        outputs: "out" (and "lse") of attention, "y" of ffn, norms, linear layers and rotary, "z" too of add_* norms,
            "loss" of linear_cross_entropy.
        grads: argument name -> gradient; absent or None is not judged.
        douts: output name -> the gradient that the backward was given; None counts as zeros.
        backend: who computed it, for the report. The errors of "aten", PyTorch's own functions, are measured; they
            fail only where no rounding explains them.
        slack: s of C1, default by device: 0.10 on a CPU, 0.25 elsewhere.
        tame: whether C2 and C3 apply, which need zero-mean data without outliers; None looks at the data.

    Returns:
        The report; ``report.raise_broken()`` raises ContractError where a rule is broken.

    Raises:
        ValueError: the op has no judge, or an output is missing.
    """
    if op not in TRUTHS:
        raise ValueError(f"judge: op must be one of {', '.join(TRUTHS)}, got {op!r}")
    truth, judged = TRUTHS[op], backend != "aten"
    grads, douts = dict(grads or {}), dict(douts or {})
    main = main_tensor(inputs)
    report = Report(op, backend, _label(inputs))
    if slack is None:
        slack = SLACK.get(main.device.type, 0.25)
    with torch.no_grad():
        needed = {attention: "out", linear_cross_entropy: "loss"}.get(truth, "z" if "residual" in inputs else "y")
        if needed not in outputs:
            raise ValueError(f"judge: {op}: outputs must hold {needed!r}, got {', '.join(outputs) or 'none'}")
        expected = truth.expect(op, inputs, outputs, douts)
    given = {**outputs, **{f"d{name}": grad for name, grad in grads.items() if grad is not None}}
    for name in given:
        if name not in expected:
            raise ValueError(f"judge: {op}: no rule for {name!r}; known are {', '.join(expected)}")
    if tame is None:
        tame = is_tame(*(t for t in inputs.values() if _is_data(t) and t.dim() > 1), *douts.values())
        tame = tame and (truth is not attention or attention.tame(op, inputs))
    eager = functools.cache(lambda: eager_results(op, inputs, douts, grads))
    r = rounding(main.dtype)
    for name, got in given.items():
        want = expected[name]
        if not _form(report, name, got, want, main.device):
            continue
        if got.numel() == 0:
            continue
        bound = want.bound if want.summed is None or backend not in COMPOSED else want.bound + want.summed
        _componentwise(report, name, got, want, bound * (1 + slack), judged)
        if not judged:
            _gross(report, name, got, want, bound, eager().get(name) if r.narrow else None)
        if not (tame and want.fair) or name == "lse" or not _ordinary(got, want):
            continue
        if main.dtype == torch.float64:
            continue
        _frobenius(report, name, got, want, eager().get(name), judged, r.unit)
        _leaning(report, name, got, want, judged)
    return report


def main_tensor(inputs: Mapping[str, Any]) -> Tensor:
    """The argument whose dtype and device are the call's."""
    return inputs["query"] if "query" in inputs else inputs["x"]


def _form(report: Report, name: str, got: Tensor, want: Expected, device: torch.device) -> bool:
    for what, seen, wanted in (
        ("shape", tuple(got.shape), tuple(want.value.shape)),
        ("dtype", got.dtype, want.dtype),
        ("device", got.device, device),
    ):
        if seen != wanted:
            report.add(name, "form", float("inf"), f"{what} must be {wanted}, got {seen}")
            return False
    return True


def _componentwise(report: Report, name: str, got: Tensor, want: Expected, bound: Tensor, judged: bool) -> None:
    """C1, and where NaN, Inf and exact zeros have to be."""
    k, value = got.detach().double(), want.value
    same = (k == value) | (k.isnan() & value.isnan())
    largest = torch.finfo(want.dtype).max
    overflown = (value.abs() + bound >= largest) & ~k.isfinite() & value.isfinite()
    wrong = ~same & (~k.isfinite() | ~value.isfinite()) & ~overflown
    if want.zeros is not None:
        wrong = wrong | (want.zeros & (k != 0) & ~k.isnan())
    if bool(wrong.any()):
        where = _first(wrong)
        report.add(
            name, "placement", float("inf"), f"{_at(where)}: got {k[where].item()}, expected {value[where].item()}"
        )
    error = (k - value).abs()
    ratio = torch.where(same | overflown | wrong, 0.0, error / bound)
    ratio = torch.where(same | overflown | wrong | (error > 0) | ~k.isfinite(), ratio, 0.0)
    where = _first(ratio == ratio.amax()) if not bool(ratio.isnan().any()) else _first(ratio.isnan())
    detail = (
        f"{_at(where)}: got {k[where].item():.9g}, expected {value[where].item():.9g} +- {bound[where].item():.3g}, "
        f"{int((ratio > 1).sum())} of {ratio.numel()} elements"
    )
    report.add(name, "C1", float(ratio[where]), detail, judged)


def _gross(report: Report, name: str, got: Tensor, want: Expected, bound: Tensor, eager: Tensor | None) -> None:
    """Whether aten computes this at all: its error is a few times what it may round, in 16 bits what E rounds too."""
    allowed = bound if want.between is None else bound + want.between
    if eager is not None:
        allowed = allowed + (eager.double() - want.value).abs().nan_to_num(0.0, 0.0, 0.0)
    ratio = (got.detach().double() - want.value).abs() / (GROSS * allowed)
    ratio = ratio.nan_to_num(0.0, 0.0, 0.0)  # what is exact, and what is no number: its place is judged already
    where = _first(ratio == ratio.amax())
    detail = (
        f"{_at(where)}: got {got[where].item():.9g}, expected {want.value[where].item():.9g}, is it the same function?"
    )
    report.add(name, "gross", float(ratio[where]), detail)


def _frobenius(
    report: Report, name: str, got: Tensor, want: Expected, eager: Tensor | None, judged: bool, unit: float
) -> None:
    """C2 for backends that are judged; aten's whole error may be a few times E's."""
    size = want.value.norm()
    if eager is None or size == 0 or not bool(eager.isfinite().all()):
        return
    r = rounding(want.dtype)
    mine, theirs = (
        float((got.detach().double() - want.value).norm() / size),
        float((eager.double() - want.value).norm() / size),
    )
    count = _effective(want.value)
    if count < _C2_ELEMENTS:
        return
    if not judged:
        report.add(name, "gross", mine / (8 * theirs + 32 * unit), "is it the same function, the same dropout mask?")
        if theirs > 0:
            report.add(name, "C2", mine / theirs, "", False)
        return
    if theirs == 0:
        return
    # Two independent errors of equal size differ by chance: with n elements by about 1/sqrt(n).
    limit = (1.05 if r.narrow else 2.0) * (1 + 1.5 / count**0.5) * theirs + 0.02 * r.unit
    if not r.narrow:
        limit += want.extra
    report.add(name, "C2", mine / limit, f"relative error {mine:.4g}, eager's {theirs:.4g}")


def _leaning(report: Report, name: str, got: Tensor, want: Expected, judged: bool) -> None:
    """C3: the error's component along R, which truncation and wrong scales have and rounding has not."""
    r = rounding(want.dtype)
    if name not in _C3_LIMITS or not r.narrow or got.numel() < _C3_ELEMENTS:
        return
    if _effective(want.value) < got.numel() / 16:
        return
    value = want.value
    lean = float(((got.detach().double() - value) * value).sum() / value.square().sum()) / r.unit
    report.add(name, "C3", abs(lean) / _C3_LIMITS[name], f"error leans by {lean:+.3f} u along the result", judged)


def _effective(value: Tensor) -> float:
    """How many elements the Frobenius norm rests on."""
    squares = value.square()
    return float(squares.sum().square() / squares.square().sum())


def _ordinary(got: Tensor, want: Expected) -> bool:
    """Finite, and large enough that rounding is relative: subnormal results may be flushed to 0 altogether."""
    if not (bool(got.isfinite().all()) and bool(want.value.isfinite().all())):
        return False
    r = rounding(want.dtype)
    return float(want.value.square().mean().sqrt()) > 4 * r.tiny / r.unit


def eager_results(
    op: str,
    inputs: Mapping[str, Any],
    douts: Mapping[str, Tensor | None],
    grads: Mapping[str, Tensor | None],
) -> dict[str, Tensor]:
    """E's outputs and gradients by autograd, named as the judge names them ("y", "dx" ...).

    Args:
        op: the public function's name.
        inputs: its arguments by name.
        douts: output name -> output gradient or None.
        grads: argument name -> anything but None where a gradient is wanted.
    """
    leaves = {
        name: t.detach().clone().requires_grad_(grads.get(name) is not None)
        for name, t in inputs.items()
        if _is_data(t)
    }
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    with torch.enable_grad():
        outputs = TRUTHS[op].eager(op, {**inputs, **leaves})
    found = {name: t.detach() for name, t in outputs.items()}
    pairs = [(outputs[name], dout) for name, dout in douts.items() if dout is not None and outputs[name].requires_grad]
    if wanted and pairs:
        given = [dout.to(out.dtype) for out, dout in pairs]
        results = torch.autograd.grad([out for out, _ in pairs], list(wanted.values()), given, allow_unused=True)
        found |= {f"d{name}": grad for name, grad in zip(wanted, results, strict=True) if grad is not None}
    return found


def _is_data(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _first(where: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in where.nonzero()[0])


def _at(index: tuple[int, ...]) -> str:
    return f"at {list(index)}"


def _label(inputs: Mapping[str, Any]) -> str:
    """The call in words: tensors as dtype[shape], options as name=value."""
    words = []
    for name, value in inputs.items():
        if isinstance(value, Tensor):
            if name != "seed":
                words.append(f"{name} {str(value.dtype).removeprefix('torch.')}{list(value.shape)}")
        elif hasattr(value, "explain"):
            words.append(f"mask ({value.explain()})")
        elif value is not None:
            words.append(f"{name}={value}")
    return ", ".join(words)
