"""The loss of a language model from its hidden states: linear layer and cross entropy, without the logits in memory.

For rows x (M, K), classes' weights (V, K), targets t (M,), smoothing s:

    z = x w^T + b                                       (M, V), a tile at a time              (LCE.1)
    lse = log sum_v exp(z_v)                            (M,)                                  (LCE.2)
    loss = lse - (1 - s) z_t - s mean_v(z_v), and 0 where t is ignore_index                   (LCE.3)

    dz_v = dloss (exp(z_v - lse) - (1 - s) [v = t] - s / V), and 0 where t is ignored         (LCE.4)
    dx = dz w,  dweight = dz^T x,  dbias = sum of dz over rows                                (LCE.5)

The kernels give one loss a row; "sum" and "mean" (over the rows that are not ignored) are taken of them here. Then all
rows have one dloss, and the forward may leave the gradients for a dloss of 1, while it has z; cpu's does, triton's not:

    gx, gweight, gbias = dx, dweight, dbias of LCE.5 for dloss = 1                            (LCE.6)

Residuals: lse, and LCE.6, each (0,) where it is not saved; then the backward computes z again. They and loss are
float32, float64 for float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import _autograd, _backend, _check, _library, _measured
from ..aten import linear_cross_entropy as aten
from ..reference import linear_cross_entropy as reference

REDUCTIONS = ("mean", "sum", "none")


@dataclass(frozen=True)
class Call:
    """What the choice of a backend depends on."""

    device: str
    dtype: torch.dtype
    rows: int
    width: int
    classes: int
    biased: bool
    training: bool


KERNELS = {"cpu": _backend.can, "triton": _backend.no_float64}
SUPPORT = _backend.support("linear_cross_entropy", KERNELS)

# Rows from which it takes longer to compute the logits again than to read and write a weight's gradient once more.
_SAVING_FROM = {torch.float16: 64, torch.bfloat16: 64, torch.float32: 256, torch.float64: 64}
# Rows of 16 bits up to which cpu is faster in training, however few classes there are.
_FEW_16_BITS = {_library.XEON: 512, _library.ZEN3: 1024, _library.ZEN4: 1024}


def prefer(call: Call) -> tuple[str, ...]:
    """Backends in the order of automatic choice."""
    if call.device != "cpu":
        return _backend.on_gpu(*(("triton",) if _triton_is_faster(call) else ()))
    return ("aten", "reference") if _aten_is_faster(call) else ("cpu", "aten", "reference")


def _triton_is_faster(call: Call) -> bool:
    """On an H200: 0.2 to 0.57 of aten's time for 2,048 to 8,192 rows 512 to 1024 wide, but 1.5 for 16 rows.

    Of 4096 features 0.89, in training 1.37: the logits are computed twice, which then takes longer than keeping them.
    float32, which is multiplied without matrix units, takes 3.3 of aten's time.
    """
    if call.dtype == torch.float32 or torch.compiler.is_compiling() or (call.training and call.width > 2048):
        return False
    # 0.5 ms of the host's time, aten's 0.3
    return call.rows >= 256 and call.rows * call.width * call.classes >= 1 << 35


def _aten_is_faster(call: Call) -> bool:
    """Where there are few classes, whose logits are small."""
    if call.dtype == torch.float64:  # is there to check gradients, and has no tiles
        return True
    # Times over aten's on Zen 4, 16 to 4096 rows of width 128 to 768; of 16 bits that PyTorch emulates 0.02 to 0.2, and
    # on Zen 3 0.02 to 0.9 from 16 rows. On a Xeon with AVX512_FP16 0.56 to 1.06 without gradients.
    if call.dtype == torch.bfloat16 and not _library.bf16_tiles:
        return False
    if call.dtype == torch.float16 and not (_library.f16_products and call.training):
        return False
    if not call.training:
        return call.classes < 65  # 0.8 to 1.4; from 65 on 0.6 to 1.1, from 256 on 0.3 to 1.0
    rows = None if torch.compiler.is_compiling() else call.rows  # a compiled graph must not depend on it
    if call.dtype == torch.float32:  # 1.0 to 1.8 up to 128 classes, 0.8 to 1.1 at 256 and, below 256 rows, up to 1000
        return call.classes < (512 if rows is None or rows >= _SAVING_FROM[torch.float32] else 2048)
    # 1.1 to 1.7 for 4096 rows, 0.84 to 1.05 below; on a Xeon with AMX and AVX512_FP16, 16 to 128 classes of 128 to 512
    # features, 0.9 to 1.9 from 768 rows, 0.78 to 1.3 at 512 and 0.6 to 1.09 below
    return call.classes < 256 and (rows is None or rows > _FEW_16_BITS[_library.nearest])


def describe(x, weight, target, bias=None, *, ignore_index=-100, label_smoothing=0.0, reduction="mean") -> Call:
    """Checks the arguments of linear_cross_entropy(), but for the numbers in ``target``."""
    tensors: dict[str, Tensor | None] = {"x": x, "weight": weight, "bias": bias}
    for name, value in tensors.items():
        _check.tensor("linear_cross_entropy", name, value, optional=name == "bias")
    _check.tensor("linear_cross_entropy", "target", target)
    _check.floating("linear_cross_entropy", **tensors)
    _check.same("linear_cross_entropy", **tensors)
    _check.dense("linear_cross_entropy", **tensors, target=target)
    if x.dim() == 0:
        raise ValueError("linear_cross_entropy: x must have shape (..., K), got ()")
    if weight.dim() != 2 or weight.shape[0] == 0:
        raise ValueError(
            f"linear_cross_entropy: weight must have shape (V, K) with V at least 1, got {tuple(weight.shape)}"
        )
    classes, width = weight.shape
    _check.shape("linear_cross_entropy", "weight", weight, (classes, x.shape[-1]), "x", x)
    _check.shape("linear_cross_entropy", "bias", bias, (classes,), "weight", weight)
    if target.dtype != torch.int64:
        raise ValueError(f"linear_cross_entropy: target must be int64, class numbers, got {_check.dtype_name(target)}")
    _check.shape("linear_cross_entropy", "target", target, x.shape[:-1], "x", x)
    _check.same_device("linear_cross_entropy", x=x, target=target)
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, (int, torch.SymInt)):
        raise TypeError(f"linear_cross_entropy: ignore_index must be an int, got {type(ignore_index).__name__}")
    if not -(2**63) <= ignore_index < 2**63:
        bits = int(ignore_index).bit_length()
        told = ignore_index if bits < 1024 else f"{bits} bits"
        raise ValueError(f"linear_cross_entropy: ignore_index must fit in int64, got {told}")
    _check.probability("linear_cross_entropy", "label_smoothing", label_smoothing)
    _check.choice("linear_cross_entropy", "reduction", reduction, REDUCTIONS)
    training = _check.records_graph(*tensors.values())
    return Call(x.device.type, x.dtype, math.prod(x.shape[:-1]), width, classes, bias is not None, training)


def bucket(call: Call) -> tuple[str, str]:
    """The device, and what a measured time depends on."""
    rows = _measured.rounded(call.rows)
    return call.device, _measured.bucket(
        call.dtype, rows=rows, width=call.width, classes=call.classes, biased=call.biased, training=call.training
    )


def _stand_in(call: Call) -> _backend.StandIn:
    given: dict[str, Any] = {"dtype": call.dtype, "device": call.device}
    x, weight = torch.randn(call.rows, call.width, **given), torch.randn(call.classes, call.width, **given)
    weight.div_(max(call.width, 1) ** 0.5)
    bias = torch.zeros(call.classes, **given) if call.biased else None
    target = torch.randint(call.classes, (call.rows,), device=call.device)
    leaves = [leaf for leaf in (x, weight, bias) if leaf is not None]
    return _backend.StandIn(
        lambda backend: (linear_cross_entropy(x, weight, target, bias, backend=backend),),
        [leaf.requires_grad_() for leaf in leaves] if call.training else [],
    )


OP = _backend.register(_backend.Op("linear_cross_entropy", SUPPORT, prefer, describe, bucket, _stand_in))
_CHOICES = _backend.Choices()  # (backend, Call)


def _fwd_fake(x, weight, bias, target, ignore_index, label_smoothing, *saves):
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    sizes = ((x.shape[0],), (x.shape[0],), *_gradient_sizes(x, weight, saves))
    return tuple(x.new_empty(size, dtype=dtype) for size in sizes)


def _bwd_fake(dloss, x, weight, bias, target, lse, gx, gweight, gbias, ignore_index, label_smoothing, *needs):
    return tuple(x.new_empty(size) for size in _gradient_sizes(x, weight, needs))


def _gradient_sizes(x, weight, wanted):
    sizes = (x.shape, weight.shape, (weight.shape[0],))
    return [size if want else (0,) for size, want in zip(sizes, wanted, strict=True)]


FWD = _library.declare(
    "linear_cross_entropy_fwd",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor target, int ignore_index, float label_smoothing, bool save_x, "
    "bool save_weight, bool save_bias) -> (Tensor loss, Tensor lse, Tensor gx, Tensor gweight, Tensor gbias)",
    _fwd_fake,
    KERNELS,
)
BWD = _library.declare(
    "linear_cross_entropy_bwd",
    "(Tensor dloss, Tensor x, Tensor weight, Tensor? bias, Tensor target, Tensor lse, Tensor gx, Tensor gweight, "
    "Tensor gbias, int ignore_index, float label_smoothing, bool need_x, bool need_weight, bool need_bias) "
    "-> (Tensor dx, Tensor dweight, Tensor dbias)",
    _bwd_fake,
    KERNELS,
)


_apply = _autograd.differentiate(FWD, BWD)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    backend: str | None = None,
) -> Tensor:
    """The cross entropy of ``softmax(x weight^T + bias)`` with class numbers, without a tensor of logits.

    F.cross_entropy(F.linear(x, weight, bias).float(), target, ...)            (LCE.1 to LCE.3)

    Args:
        x: (..., K), float16 | bfloat16 | float32 | float64. Any strides.
        weight: (V, K), dtype of ``x``, as in nn.Linear; V at least 1.
        target: (...), int64, each in [0, V) or ``ignore_index``.
        bias: (V,), or None for no bias.
        ignore_index: the target of rows that count for nothing: their loss and gradients are 0, whatever is in ``x``
            (on aten NaN there spreads, as in PyTorch); the cpu and triton backends spend no time on them.
        label_smoothing: the share of the target's probability that all classes get evenly, in [0, 1].
        reduction: "mean" over the rows that are not ignored (NaN where there are none, as in PyTorch), "sum", "none".
        backend: "reference" | "aten" | "cpu" | "triton", or None to choose automatically.

    Returns:
        (), or (...) where ``reduction`` is "none": float32, float64 for float64, because a loss of 16 bits has two
        digits. On the device of ``x``.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: shapes, dtypes or devices disagree, or, on a CPU, a target is no class (the message names
            argument, expected, got). The triton backend does not look: it makes that row's loss NaN.
        BackendError: ``backend`` was named and cannot run this call (the message says why).

    Numerics: sums and softmax in float32 (float64 for float64); the gradient of the logits is rounded once to the
        dtype of ``x`` where a product takes it so. Deterministic, forward and backward. Differentiable once in x,
        weight and bias (twice on reference and aten).
    Cost: 2 M K V FLOPs forward and 4 backward, M rows that are not ignored. Where a gradient will be needed, the cpu
        backend spends all of them in the forward, which leaves dx and dweight of the summed losses in float32 for the
        backward to scale; for few rows and for "none" the backward computes the logits again instead (2 M K V more).
        It works in memory that does not grow with M: twice the logits of 1024 rows, of fewer where those take more than
        64 MB, where aten makes several tensors (M, V). The triton backend's backward always computes the logits again,
        in 32 MiB, or 256 classes of all rows where those take more, beside 4 bytes an element of dx.
    Source: own work; the idea of leaving the logits out is that of Wijmans et al. 2024, arXiv:2411.09009.

    Example:
        >>> x, weight = torch.randn(2, 5, 8), torch.randn(100, 8)
        >>> linear_cross_entropy(x, weight, torch.randint(100, (2, 5))).shape
        torch.Size([])
    """
    key = _library.signature(backend, x, weight, target, bias, ignore_index, label_smoothing, reduction)
    choice = _CHOICES.get(key)
    if choice is None:
        options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": reduction}
        call = describe(x, weight, target, bias, **options)
        name = _backend.select(OP, call, backend)
        choice = _CHOICES.keep(key, (name, call, _saves(name, call, reduction, x, weight, bias)))
    name, call, saves = choice
    rows = x if x.dim() == 2 else x.reshape(call.rows, call.width)
    numbers = target if target.dim() == 1 else target.reshape(call.rows)
    try:
        loss = _run(name, saves, rows, weight, numbers, bias, ignore_index, float(label_smoothing), reduction)
    except (IndexError, RuntimeError):  # looking first would cost as much as a small kernel
        _refuse_targets(target, call.classes, ignore_index)
        raise
    if reduction != "none" or target.dim() == 1:
        return loss
    return torch.ops.aten._unsafe_view(loss, target.shape)  # which may be written into after torch.no_grad()


def _run(name, saves, rows, weight, target, bias, ignore_index, label_smoothing, reduction):
    if name not in FWD:
        composed = aten if name == "aten" else reference
        return composed.linear_cross_entropy(rows, weight, target, bias, ignore_index, label_smoothing, reduction)
    losses = _apply(name, rows, weight, bias, target, ignore_index, label_smoothing, *saves)[0]
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / (target != ignore_index).sum()


def _saves(backend: str, call: Call, reduction: str, *leaves: Tensor | None) -> list[bool]:
    """Whether the forward leaves the gradient of each: where the rows have one dloss, and are worth it."""
    worth = backend == "cpu" and call.training and reduction != "none"
    # a compiled graph must not depend on the number of rows
    worth = worth and (torch.compiler.is_compiling() or call.rows >= _SAVING_FROM[call.dtype])
    return [worth and leaf is not None and leaf.requires_grad for leaf in leaves]


def _refuse_targets(target: Tensor, classes: int, ignore_index: int) -> None:
    """Refuses numbers that are no class, where reading them waits for no device."""
    if target.device.type != "cpu" or _library.transformed():
        return
    wrong = ((target < 0) | (target >= classes)) & (target != ignore_index)
    if bool(wrong.any()):
        place = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"linear_cross_entropy: target must lie in [0, {classes}) or be ignore_index {ignore_index}, got "
            f"{int(target[tuple(place)])} at {place}"
        )
