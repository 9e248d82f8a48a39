"""LayerNorm and RMSNorm, drop-in for torch.nn's, and the residual sum that the layers fuse with them.

They subclass torch.nn's, so isinstance checks, ``reset_parameters``, repr and pickles made by torch keep working; only
``forward`` is new, and torch's norms have no other path to drag in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from .. import _check, ops
from .._autocast import autocast_dtype
from ..ops.layer_norm import layer_norm_of_sum
from . import _arguments
from ._bypass import dropout_p, ordinary, plain


class LayerNorm(nn.LayerNorm):
    """y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dimensions.

    Drop-in for ``torch.nn.LayerNorm``: same arguments, same state_dict. Differences: bad arguments raise ValueError or
    TypeError, and so do sizes below 1, no sizes at all, and an eps that is negative or not finite, which torch takes.

    Args:
        normalized_shape: int, list or tuple: the sizes of the dimensions to normalise.
        eps: added to the variance, inside the square root.
        elementwise_affine: whether there are a weight and a bias.
        bias: False leaves the bias out.
        device: of the parameters.
        dtype: of the parameters.
        backend: "reference" | "aten" | "cpu" | "triton" | "cuda", or None to choose automatically.

    Shape:
        input (..., *normalized_shape) -> the same.

    Example:
        >>> LayerNorm(8)(torch.randn(2, 5, 8)).shape
        torch.Size([2, 5, 8])
    """

    backend: str | None = None

    def __init__(
        self,
        normalized_shape: int | Sequence[int] | torch.Size,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        backend: str | None = None,
    ) -> None:
        _arguments.normalized_shape("LayerNorm", normalized_shape)
        _check.eps("LayerNorm", eps)
        _arguments.backend("LayerNorm", backend)
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        self.backend = backend

    def forward(self, input: Tensor) -> Tensor:
        """Normalises ``input``."""
        weight: Tensor | None = self.weight
        bias: Tensor | None = self.bias
        if _is_special(input, weight, bias):
            return super().forward(input)
        x = _rows("LayerNorm", input, self.normalized_shape)
        weight, bias = _parameter(weight, x.dtype), _parameter(bias, x.dtype)
        return _shaped(ops.layer_norm(x, weight, bias, self.eps, backend=self.backend), input)


class RMSNorm(nn.RMSNorm):
    """y = x / sqrt(mean(x**2) + eps) * weight over the last dimensions.

    Drop-in for ``torch.nn.RMSNorm``: same arguments, same state_dict. Differences: as in ``LayerNorm``.

    Args:
        normalized_shape: int, list or tuple: the sizes of the dimensions to normalise.
        eps: added to the mean square; None is the machine epsilon of float32 (of float64 for float64).
        elementwise_affine: whether there is a weight.
        device: of the weight.
        dtype: of the weight.
        backend: "reference" | "aten" | "cpu" | "triton" | "cuda", or None to choose automatically.

    Shape:
        x (..., *normalized_shape) -> the same.

    Example:
        >>> RMSNorm(8)(torch.randn(2, 5, 8)).shape
        torch.Size([2, 5, 8])
    """

    backend: str | None = None

    def __init__(
        self,
        normalized_shape: int | Sequence[int] | torch.Size,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        backend: str | None = None,
    ) -> None:
        _arguments.normalized_shape("RMSNorm", normalized_shape)
        if eps is not None:
            _check.eps("RMSNorm", eps)
        _arguments.backend("RMSNorm", backend)
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        self.backend = backend

    def forward(self, x: Tensor) -> Tensor:
        """Normalises ``x``."""
        weight: Tensor | None = self.weight
        if _is_special(x, weight) or (weight is not None and weight.dtype == torch.float64 != x.dtype):
            return super().forward(x)
        rows = _rows("RMSNorm", x, self.normalized_shape)
        weight = _parameter(weight, rows.dtype)
        return _shaped(ops.rms_norm(rows, weight, self.eps, backend=self.backend), x)


NORMS = (LayerNorm, RMSNorm, nn.LayerNorm, nn.RMSNorm)


def add_norm(x: Tensor, residual: Tensor, dropout: nn.Module, norm: nn.Module, **options: Any) -> tuple[Tensor, Tensor]:
    """What stands between two sublayers: z = residual + dropout(x) and y = norm(z), fused where the children allow it.

    Args:
        x: what the sublayer gives.
        residual: what it is added to.
        dropout: of ``x``.
        norm: of the sum.
        options: of ``ops.add_layer_norm``, for the fused form alone.

    Returns:
        (y, z).
    """
    p = _fused(x, residual, dropout, norm)
    if p is None:
        z = residual + dropout(x)
        return norm(z), z
    layer, backend = cast(Any, norm), getattr(norm, "backend", None)
    weight, bias = _parameters(norm, x, residual)
    if isinstance(norm, nn.LayerNorm):
        return ops.add_layer_norm(x, residual, weight, bias, layer.eps, dropout_p=p, backend=backend, **options)
    return ops.add_rms_norm(x, residual, weight, layer.eps, dropout_p=p, backend=backend, **options)


def norm_of_sum(x: Tensor, residual: Tensor, dropout: nn.Module, norm: nn.Module, **options: Any) -> Tensor:
    """y of ``add_norm``, where nobody goes on with z."""
    p = _fused(x, residual, dropout, norm) if isinstance(norm, nn.LayerNorm) else None
    if p is None:
        return add_norm(x, residual, dropout, norm, **options)[0]
    layer, backend = cast(Any, norm), getattr(norm, "backend", None)
    parameters = _parameters(norm, x, residual)
    return layer_norm_of_sum(x, residual, *parameters, layer.eps, dropout_p=p, backend=backend, **options)


def _fused(x: Tensor, residual: Tensor, dropout: nn.Module, norm: nn.Module) -> float | None:
    """The probability of dropout where dropout, sum and norm may run as one, else None."""
    p = dropout_p(dropout)
    if p is None or not plain(norm, *NORMS) or x.shape != residual.shape:
        return None
    parameters: Any = (norm.weight, getattr(norm, "bias", None))
    fits = norm.normalized_shape == x.shape[-1:] and ordinary(*parameters) and not _sum_widened(x, residual)
    return p if fits else None


def add(x: Tensor, residual: Tensor, dropout: nn.Module, backend: str | None, **options: Any) -> Tensor:
    """z = residual + dropout(x), by the project's random rule where dropout is torch's and drops anything."""
    p = dropout_p(dropout)
    if p is None or (p > 0.0 and x.shape != residual.shape):
        return residual + dropout(x)
    return dropped_sum(x, residual, p, backend=backend, **options)


def dropped_sum(x: Tensor, residual: Tensor, p: float, **options: Any) -> Tensor:
    """z = residual + dropout(x) of one shape, by the project's random rule; ``options`` as of ``ops.add_rms_norm``."""
    if p == 0.0:
        return residual + x
    return ops.add_rms_norm(x, residual, eps=1.0, dropout_p=p, **options)[1]  # the norm itself is not wanted


def _is_special(x: Any, *parameters: Tensor | None) -> bool:
    """Whether torch's own forward has to take ``x``: of a kind of its own (sharded, nested), or traced by torch.fx."""
    if isinstance(x, Tensor):
        return x.is_nested or not ordinary(x, *parameters)
    return isinstance(x, fx.Proxy)


def _widened(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether autocast runs norms of ``dtype`` in float32: everywhere but on the CPU."""
    return dtype in (torch.float16, torch.bfloat16) and device.type != "cpu" and autocast_dtype(device) is not None


def _sum_widened(x: Tensor, residual: Tensor) -> bool:
    """Whether autocast runs the norm of the sum in a wider dtype than the sum has."""
    return not x.is_cpu and _widened(torch.promote_types(x.dtype, residual.dtype), x.device)


def _rows(op: str, x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``x`` with the normalised dimensions as one, in the dtype that torch would normalise in."""
    _check.tensor(op, "input", x)
    count = len(shape)
    if not (count == 1 and x.dim() > 0 and x.size(-1) == shape[0]):  # the common case, in half of the time
        if tuple(x.shape[-count:]) != shape:
            raise ValueError(f"{op}: input must end in normalized_shape {shape}, got shape {tuple(x.shape)}")
        x = x.flatten(-count)
    return x.float() if _widened(x.dtype, x.device) else x


def _shaped(y: Tensor, like: Tensor) -> Tensor:
    if not isinstance(y, Tensor):  # torch.fx traces
        return y.view(like.shape)
    # what autograd takes for a view could not be written into after torch.no_grad()
    return y if like.dim() == y.dim() else torch.ops.aten._unsafe_view(y, like.shape)


def _parameter(parameter: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A weight or bias as ops takes it for tensors of ``dtype``: one axis; a narrower one in the dtype computed in."""
    if parameter is None:
        return None
    if parameter.dim() > 1:
        parameter = parameter.flatten()
    if parameter.dtype != dtype and parameter.dtype in (torch.float16, torch.bfloat16):
        parameter = parameter.to(torch.float64 if dtype == torch.float64 else torch.float32)
    return parameter


def _parameters(norm: Any, x: Tensor, residual: Tensor) -> tuple[Tensor | None, Tensor | None]:
    dtype = x.dtype if x.dtype == residual.dtype else torch.promote_types(x.dtype, residual.dtype)
    return _parameter(norm.weight, dtype), _parameter(getattr(norm, "bias", None), dtype)
