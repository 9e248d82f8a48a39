"""LinearCrossEntropyLoss, drop-in for torch.nn's, on ops.linear_cross_entropy.

torch.nn has it since 2.13. It is not subclassed, because the project runs on releases that lack it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.loss import _WeightedLoss

from .. import _check, ops
from .._autocast import as_autocast, autocast_dtype
from ..ops.linear_cross_entropy import REDUCTIONS
from . import _arguments
from ._bypass import plain_linear

_NAME = "LinearCrossEntropyLoss"
_IGNORED = -100  # where ignore_index is None, as in F.cross_entropy


def of_linear(linear: Any, input: Tensor, target: Tensor, **options: Any) -> Tensor:
    """ops.linear_cross_entropy of a layer's output, which is not called: for callers that asked ``plain_linear``.

    Args:
        linear: the nn.Linear whose weight and bias are read.
        input: (..., E). It and the parameters in autocast's dtype, where autocast is on.
        target: (...), int64.
        options: of ops.linear_cross_entropy.
    """
    x, weight, bias = as_autocast(input, linear.weight, linear.bias)  # torch's does not see inside our operators
    return ops.linear_cross_entropy(x, weight, target, bias, **options)


class LinearCrossEntropyLoss(_WeightedLoss):
    """loss = cross_entropy(linear(input), target), for class numbers without a tensor of logits.

    Drop-in for ``torch.nn.LinearCrossEntropyLoss``: same arguments, same state_dict (``linear.weight``,
    ``linear.bias``, and ``weight`` where there are class weights). Differences: ``input`` may have more dimensions in
    front, as a language model's (B, T, E); ``options`` changes nothing, because no chunk needs to be chosen; it is no
    subclass of torch's, which older releases lack; bad arguments raise ValueError or TypeError.

    ops.linear_cross_entropy runs where the target holds class numbers, there are neither class weights nor
    out_features, and ``linear`` is an nn.Linear that nobody watches. All else is computed by calling ``linear`` and
    F.cross_entropy, on every backend, and then the logits are in memory.

    Args:
        in_features: E, width of the input.
        num_classes: V.
        out_features: (d1, ..., dK), the sizes of a K-dimensional loss: one softmax over the classes for each place.
        bias: adds a bias to the logits.
        device: of the parameters.
        dtype: of the parameters.
        reduction: "mean" over the targets that are not ignored, by their class weights where there are any; "sum";
            "none".
        weight: (V,), what each class counts, None for all alike. A buffer.
        ignore_index: a target that counts for nothing, None for -100; must be None for probabilities.
        label_smoothing: the share of the target's probability that all classes get evenly, in [0, 1].
        options: torch's LinearCrossEntropyOptions, kept and not looked at.
        backend: "reference" | "aten" | "cpu" | "triton", or None to choose automatically.

    Shape:
        input (..., E), target (..., d1, ..., dK) of class numbers, int64, or (..., V, d1, ..., dK) of probabilities,
        floating -> (), or (..., d1, ..., dK) where ``reduction`` is "none". In the dtype of the input, under autocast
        float32 (float64 for float64). out_features need a batched input, (N, E) or more.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: sizes, shapes, dtypes or devices disagree, or, on a CPU, a target is no class (an IndexError where
            F.cross_entropy computes).
        BackendError: ``backend`` was named and cannot run ops.linear_cross_entropy here (the message says why).

    Cost: that of ops.linear_cross_entropy; the cpu and triton backends store no logits, in no pass.

    Example:
        >>> loss = LinearCrossEntropyLoss(8, 100)
        >>> loss(torch.randn(2, 5, 8), torch.randint(100, (2, 5))).shape
        torch.Size([])
    """

    backend: str | None = None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        out_features: tuple[int, ...] = (),
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        reduction: str = "mean",
        weight: Tensor | None = None,
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        options: Any = None,
        backend: str | None = None,
    ) -> None:
        _arguments.size(_NAME, "in_features", in_features)
        _arguments.size(_NAME, "num_classes", num_classes)
        if not isinstance(out_features, (tuple, list)):
            raise TypeError(f"{_NAME}: out_features must be a tuple of ints, got {type(out_features).__name__}")
        for length in out_features:
            _arguments.size(_NAME, "each size in out_features", length)
        _check.choice(_NAME, "reduction", reduction, REDUCTIONS)
        _check.tensor(_NAME, "weight", weight, optional=True)
        _check.shape(_NAME, "weight", weight, (num_classes,), "num_classes")
        if ignore_index is not None:
            _arguments.size(_NAME, "ignore_index", ignore_index, -(2**63))
        _check.probability(_NAME, "label_smoothing", label_smoothing)
        _arguments.backend(_NAME, backend)
        super().__init__(weight, reduction=reduction)
        self.in_features, self.num_classes, self.out_features = in_features, num_classes, tuple(out_features)
        self.ignore_index, self.label_smoothing = ignore_index, label_smoothing
        self.linear = nn.Linear(in_features, num_classes * math.prod(out_features), bias, device, dtype)
        self.options = options
        self.backend = backend

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """The loss of ``input`` for ``target``."""
        _arguments.features(_NAME, "input", input, self.in_features, "in_features")
        numbers = self._holds_numbers(input, target)
        if numbers and self.weight is None and not self.out_features and plain_linear(self.linear):
            return self._fused(input, target)
        return self._composed(input, target)

    def _holds_numbers(self, input: Tensor, target: Tensor) -> bool:
        """Whether ``target`` holds class numbers, and no probabilities; refuses what is neither."""
        _check.tensor(_NAME, "target", target)
        if self.out_features and input.dim() == 1:
            raise ValueError(
                f"{_NAME}: input must be batched, (N, {self.in_features}), where there are out_features "
                f"{self.out_features}, got shape {tuple(input.shape)}"
            )
        batch = input.shape[:-1]
        if target.dtype == torch.int64 and target.shape == (*batch, *self.out_features):
            return True
        if not target.is_floating_point() or target.shape != (*batch, self.num_classes, *self.out_features):
            raise ValueError(
                f"{_NAME}: target must be int64 of shape {(*batch, *self.out_features)}, class numbers, or floating of "
                f"shape {(*batch, self.num_classes, *self.out_features)}, probabilities, got "
                f"{_check.dtype_name(target)} of shape {tuple(target.shape)}"
            )
        if self.ignore_index is not None:
            raise ValueError(
                f"{_NAME}: ignore_index must be None where target holds probabilities, got {self.ignore_index}"
            )
        return False

    def _fused(self, input: Tensor, target: Tensor) -> Tensor:
        linear: Any = self.linear
        sizes = self.num_classes, self.in_features  # a weight that was tied may have others
        _check.shape(_NAME, "linear.weight", linear.weight, sizes, "num_classes and in_features")
        loss = of_linear(linear, input, target, **self._options(), backend=self.backend)
        return loss.to(input.dtype) if autocast_dtype(input.device) is None else loss

    def _composed(self, input: Tensor, target: Tensor) -> Tensor:
        batch = input.shape[:-1]
        logits = self.linear(input).unflatten(-1, (self.num_classes, *self.out_features))
        if len(batch) > 1:  # F.cross_entropy has the classes second
            logits, target = logits.flatten(0, len(batch) - 1), target.flatten(0, len(batch) - 1)
        loss = F.cross_entropy(logits, target, self.weight, **self._options())
        return loss.reshape((*batch, *self.out_features)) if self.reduction == "none" else loss

    def _options(self) -> dict[str, Any]:
        return {
            "ignore_index": _IGNORED if self.ignore_index is None else self.ignore_index,
            "label_smoothing": self.label_smoothing,
            "reduction": self.reduction,
        }

    def extra_repr(self) -> str:
        """The arguments, as torch's class gives them."""
        return (
            f"in_features={self.in_features}, num_classes={self.num_classes}, out_features={self.out_features}, "
            f"bias={getattr(self.linear, 'bias', None) is not None}, reduction={self.reduction}, "
            f"ignore_index={self.ignore_index}, label_smoothing={self.label_smoothing}, options={self.options}"
        )
