"""layer_norm: LayerNorm and RMSNorm over the last dimension, alone or fused with dropout and the residual sum.

    z    = residual + dropout(x), or x without a residual                                    (LN.1)
    mu   = mean(z), 0 for RMSNorm
    rstd = 1 / (sqrt(sum((z - mu)^2) / (N or N - 1) + eps) + eps_outside)                    (LN.2)
    xhat = (z - mu) * rstd;          y = xhat * weight + bias                                 (LN.3)
    g    = dy * weight;              a = 1 / (1 - eps_outside * rstd), but 0 where the root is 0
    dz'  = rstd * (g - mean(g) - a * xhat * sum(g * xhat) / (N or N - 1)) + dz                 (LN.4)
    dweight = sum over rows of dy * xhat;   dbias = sum over rows of dy                       (LN.5)
    dresidual = dz';   dx = dropout'(dz')                                                     (LN.6)

RMSNorm has mu = 0, no mean(g) and no bias. torch.nn's norms have no eps_outside, so that a is 1; norms that divide by
(std + eps), as that of The Annotated Transformer, have that one alone. Statistics and sums are float32 (float64 for
float64); dweight and dbias are rounded once, to the types of weight and bias.
Source: Ba, Kiros, Hinton 2016, arXiv:1607.06450; Zhang, Sennrich 2019, arXiv:1910.07467.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .. import _autograd, _check, _library
from .._backend import Choices, Op, StandIn, register, select
from ..aten import layer_norm as aten
from ..reference import layer_norm as reference
from .layer_norm_call import KERNELS, SUPPORT, Call, bucket, describe, prefer, unproven


def _fwd_fake(x, residual, weight, bias, eps, eps_outside, rms, unbiased, dropout_p, seed, dropout_rows, keep_sum=True):
    z_dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    statistics = torch.float64 if z_dtype == torch.float64 else torch.float32
    rows = math.prod(x.shape[:-1])  # Size.numel() would make a symbolic length a constant
    y = x.new_empty(x.shape, dtype=z_dtype)
    z = x.new_empty(x.shape if residual is not None and keep_sum else (0,), dtype=z_dtype)
    mean = x.new_empty((0,) if rms else (rows,), dtype=statistics)
    return y, z, mean, x.new_empty((rows,), dtype=statistics)


def _bwd_fake(dy, dz, z, mean, rstd, weight, bias, eps_outside, rms, unbiased, dropout_p, seed, dropout_rows, *needs):
    dresidual = z.new_empty(z.shape if dropout_p > 0.0 else (0,))  # without dropout dx serves for both
    dweight, dbias = (  # of the parameter's dtype, which is all that bias is taken for
        (rstd if parameter is None else parameter).new_empty((z.shape[-1] if need else 0,))
        for parameter, need in zip((weight, bias), needs, strict=True)
    )
    return z.new_empty(z.shape), dresidual, dweight, dbias


FWD = _library.declare(
    "layer_norm_fwd",
    "(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, float eps_outside, bool rms, bool unbiased, "
    "float dropout_p, Tensor? seed, Tensor? dropout_rows, bool keep_sum=True) "
    "-> (Tensor y, Tensor z, Tensor mean, Tensor rstd)",
    _fwd_fake,
    KERNELS,
)
BWD = _library.declare(
    "layer_norm_bwd",
    "(Tensor dy, Tensor? dz, Tensor z, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias, "
    "float eps_outside, bool rms, bool unbiased, float dropout_p, Tensor? seed, Tensor? dropout_rows, "
    "bool need_weight, bool need_bias) -> (Tensor dx, Tensor dresidual, Tensor dweight, Tensor dbias)",
    _bwd_fake,
    KERNELS,
)


# without a residual z is x, and without dropout dx serves for both summands
_apply = _autograd.differentiate(FWD, BWD, like="z", absent={"z": ("residual", "x")}, shared={"dresidual": "dx"})


_CHOICES = Choices()


def _run(
    name: str, x, residual, weight, bias, eps, eps_outside, dropout_p, seed, dropout_rows, unbiased, rms, keep_sum=True
):
    """The way of one call once its backend is chosen: one of three doors. Returns (y, z), z only where it is kept."""
    if name in KERNELS:
        dropout_rows = None if dropout_rows is None else dropout_rows.contiguous()
        y, z, _, _ = _apply(
            name, x, residual, weight, bias, eps, eps_outside, rms, unbiased, dropout_p, seed, dropout_rows, keep_sum
        )
        return y, z
    module: Any = aten if name == "aten" else reference
    z = x if residual is None else module.add(x, residual, dropout_p, seed, dropout_rows)
    if name == "aten":
        return aten.norm(z, weight, bias, eps, rms=rms), z
    return reference.norm(z, weight, bias, eps, eps_outside, rms=rms, unbiased=unbiased), z


def _describe_layer_norm(x, weight=None, bias=None, eps=1e-5, *, eps_outside=0.0, unbiased=False):
    return describe("layer_norm", x, None, weight, bias, eps, eps_outside, 0.0, None, None, unbiased, False)


def _describe_add_layer_norm(
    x, residual, weight=None, bias=None, eps=1e-5, *,
    eps_outside=0.0, dropout_p=0.0, seed=None, dropout_rows=None, unbiased=False,
):  # fmt: skip
    op = "add_layer_norm"
    _check.tensor(op, "residual", residual)
    _check.probability(op, "dropout_p", dropout_p)
    return describe(op, x, residual, weight, bias, eps, eps_outside, dropout_p, seed, dropout_rows, unbiased, False)


def _describe_rms_norm(x, weight=None, eps=None, *, eps_outside=0.0):
    eps = _DEFAULT_EPS if eps is None else eps
    return describe("rms_norm", x, None, weight, None, eps, eps_outside, 0.0, None, None, False, True)


def _describe_add_rms_norm(
    x, residual, weight=None, eps=None, *, eps_outside=0.0, dropout_p=0.0, seed=None, dropout_rows=None
):
    op = "add_rms_norm"
    _check.tensor(op, "residual", residual)
    _check.probability(op, "dropout_p", dropout_p)
    eps = _DEFAULT_EPS if eps is None else eps
    return describe(op, x, residual, weight, None, eps, eps_outside, dropout_p, seed, dropout_rows, False, True)


_DEFAULT_EPS = torch.finfo(torch.float32).eps  # of rms_norm, for all but float64


def _rms_eps(x: Tensor, residual: Tensor | None = None) -> float:
    """torch's default: the machine epsilon of the dtype it computes in, float32 for 16-bit tensors."""
    wide = x.dtype == torch.float64 or (residual is not None and residual.dtype == torch.float64)
    return torch.finfo(torch.float64).eps if wide else _DEFAULT_EPS


def _stand_in(call: Call) -> StandIn:
    x = torch.randn(call.rows, call.features, dtype=call.dtype, device=call.device)
    weight = torch.ones(call.features, dtype=torch.float32 if call.mixed else call.dtype, device=call.device)
    options: dict[str, Any] = {"dropout_p": call.dropout_p} if call.residual else {}
    if call.eps_outside:
        options["eps_outside"] = 1e-6
    if not call.rms:
        options |= {"bias": torch.zeros_like(weight), "unbiased": call.unbiased}
    sums = (torch.randn_like(x),) if call.residual else ()
    leaves = [x, *sums, weight, *(value for value in options.values() if isinstance(value, Tensor))]
    function = globals()[f"{'add_' if call.residual else ''}{'rms' if call.rms else 'layer'}_norm"]

    def run(backend: str) -> tuple[Tensor, ...]:
        outputs = function(x, *sums, weight=weight, **options, backend=backend)
        return outputs if call.residual else (outputs,)

    return StandIn(run, [leaf.requires_grad_() for leaf in leaves] if call.training else [])


_LAYER_NORM = register(Op("layer_norm", SUPPORT, prefer, _describe_layer_norm, bucket, _stand_in, unproven))
_ADD_LAYER_NORM = register(Op("add_layer_norm", SUPPORT, prefer, _describe_add_layer_norm, bucket, _stand_in, unproven))
_RMS_NORM = register(Op("rms_norm", SUPPORT, prefer, _describe_rms_norm, bucket, _stand_in, unproven))
_ADD_RMS_NORM = register(Op("add_rms_norm", SUPPORT, prefer, _describe_add_rms_norm, bucket, _stand_in, unproven))


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    eps_outside: float = 0.0,
    unbiased: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Normalise the last dimension of ``x`` to zero mean and unit variance, then scale and shift.

    y = (x - mean(x)) / (sqrt(var(x) + eps) + eps_outside) * weight + bias       (LN.2, LN.3)

    Args:
        x: (..., N), float16 | bfloat16 | float32 | float64. Any strides; copied if N is strided.
        weight: (N,), dtype of ``x`` or float32, or None for no scale.
        bias: (N,) as ``weight``, or None for no shift.
        eps: added to the variance, inside the square root; same unit as x**2; >= 0.
        eps_outside: added to the root; same unit as x; >= 0. Norms that divide by (std + eps) have eps 0 and this one.
        unbiased: divide the sum of squares by N - 1 instead of N; needs N >= 2.
        backend: "reference" | "aten" | "cpu" | "triton" | "cuda", or None to choose automatically.

    Returns:
        (..., N), dtype and device of ``x``, contiguous.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: shapes, dtypes or devices disagree (the message names argument, expected, got).
        BackendError: ``backend`` was named and cannot run this call (the message says why).

    Numerics: two-pass statistics in float32 (float64 for float64); one rounding, at the store. Deterministic.
        Differentiable once in x, weight, bias (twice on reference and aten). A constant row gives the bias; a row with
        an inf gives NaN in that row only. Where the root is 0, its gradient is 0, as that of torch.std.
    Cost: moves 2*M*N*itemsize bytes forward, 3*M*N*itemsize backward; M = product of the leading dimensions.
    Source: Ba, Kiros, Hinton 2016, arXiv:1607.06450, eq. 3-4.

    Example:
        >>> layer_norm(torch.randn(2, 5, 8), torch.ones(8)).shape
        torch.Size([2, 5, 8])
    """
    key = _library.signature("layer_norm", backend, x, weight, bias, eps, eps_outside, unbiased)
    name = _CHOICES.get(key)
    if name is None:
        call = _describe_layer_norm(x, weight, bias, eps, eps_outside=eps_outside, unbiased=unbiased)
        name = _CHOICES.keep(key, select(_LAYER_NORM, call, backend))
    if name == "aten":  # the door of small calls
        return aten.norm(x, weight, bias, eps)
    return _run(name, x, None, weight, bias, eps, eps_outside, 0.0, None, None, unbiased, False)[0]


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    eps_outside: float = 0.0,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    dropout_rows: Tensor | None = None,
    unbiased: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The residual sum and the LayerNorm that follows it, in one pass over memory.

    z = residual + dropout(x);   y = LayerNorm(z) * weight + bias                (LN.1 to LN.3)

    Args:
        x: (..., N), a sublayer's output, float16 | bfloat16 | float32 | float64.
        residual: as ``x``; its dtype may differ, z then has the promoted dtype.
        weight: (N,), dtype of z or float32, or None.
        bias: (N,) as ``weight``, or None.
        eps: added to the variance, inside the square root; >= 0.
        eps_outside: added to the root; as in ``layer_norm``.
        dropout_p: probability, in [0, 1], to drop an element of ``x``; kept ones are scaled by 1 / (1 - dropout_p).
        seed: () int64 on the call's device, or None to draw one from torch's generator.
        dropout_rows: (M,) int64 row numbers for the random rule, None for 0 .. M-1; packed execution passes the rows
            of the padded run, and gets its masks.
        unbiased: divide by N - 1 instead of N.
        backend: as in ``layer_norm``.

    Returns:
        (y, z), both (..., N), of the promoted dtype: y for the next sublayer, z for the next residual sum.

    Raises:
        TypeError, ValueError, BackendError: as in ``layer_norm``.

    Numerics: z is rounded once to its dtype, and y follows from the rounded z. The dropped elements are the same on
        every backend, forward and backward. Otherwise as ``layer_norm``.
    Cost: moves 4*M*N*itemsize bytes forward, 4 backward (5 with dropout); the mask is never stored.
    Source: Vaswani et al. 2017, arXiv:1706.03762, section 5.4, for the order dropout, sum, norm.

    Example:
        >>> y, z = add_layer_norm(torch.randn(2, 5, 8), torch.randn(2, 5, 8), torch.ones(8), dropout_p=0.1)
    """
    return _add_layer_norm(
        x, residual, weight, bias, eps, True, eps_outside=eps_outside,
        dropout_p=dropout_p, seed=seed, dropout_rows=dropout_rows, unbiased=unbiased, backend=backend,
    )  # fmt: skip


def layer_norm_of_sum(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    **options: Any,
) -> Tensor:
    """y of ``add_layer_norm``, for layers that go on with y alone: z is kept for a backward only, a write less.

    Arguments, errors and numerics are those of ``add_layer_norm``.
    """
    keep_sum = _check.records_graph(x, residual, weight, bias)
    return _add_layer_norm(x, residual, weight, bias, eps, keep_sum, **options)[0]


def _add_layer_norm(
    x, residual, weight, bias, eps, keep_sum, *,
    eps_outside=0.0, dropout_p=0.0, seed=None, dropout_rows=None, unbiased=False, backend=None,
):  # fmt: skip
    key = _library.signature(
        "add_layer_norm", backend, x, residual, weight, bias, eps, eps_outside, dropout_p, dropout_rows, unbiased
    )
    name = _CHOICES.get(key)
    if name is None:
        call = _describe_add_layer_norm(
            x, residual, weight, bias, eps, eps_outside=eps_outside,
            dropout_p=dropout_p, seed=seed, dropout_rows=dropout_rows, unbiased=unbiased,
        )  # fmt: skip
        name = _CHOICES.keep(key, select(_ADD_LAYER_NORM, call, backend))
    if seed is not None or dropout_p > 0.0:
        seed = _check.seed("add_layer_norm", dropout_p, seed, x.device)
    return _run(
        name, x, residual, weight, bias, eps, eps_outside, dropout_p, seed, dropout_rows, unbiased, False, keep_sum
    )


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    eps_outside: float = 0.0,
    backend: str | None = None,
) -> Tensor:
    """Divide the last dimension of ``x`` by its root mean square, then scale.

    y = x / (sqrt(mean(x**2) + eps) + eps_outside) * weight                      (LN.2, LN.3 with mu = 0)

    Args:
        x: (..., N), float16 | bfloat16 | float32 | float64. Any strides.
        weight: (N,), dtype of ``x`` or float32, or None.
        eps: added to the mean square, inside the root; None is the machine epsilon of float32
            (float64 for float64), as in torch.
        eps_outside: added to the root; as in ``layer_norm``.
        backend: as in ``layer_norm``.

    Returns:
        (..., N), dtype and device of ``x``, contiguous.

    Raises:
        TypeError, ValueError, BackendError: as in ``layer_norm``.

    Numerics: as ``layer_norm``. Cost: 2*M*N*itemsize bytes forward, 3*M*N*itemsize backward.
    Source: Zhang, Sennrich 2019, arXiv:1910.07467.

    Example:
        >>> rms_norm(torch.randn(2, 5, 8), torch.ones(8)).shape
        torch.Size([2, 5, 8])
    """
    key = _library.signature("rms_norm", backend, x, weight, eps, eps_outside)
    name = _CHOICES.get(key)
    if name is None:
        call = _describe_rms_norm(x, weight, eps, eps_outside=eps_outside)
        name = _CHOICES.keep(key, select(_RMS_NORM, call, backend))
    if eps is None:
        eps = _rms_eps(x)
    return _run(name, x, None, weight, None, eps, eps_outside, 0.0, None, None, False, True)[0]


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    eps_outside: float = 0.0,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    dropout_rows: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The residual sum and the RMSNorm that follows it: ``add_layer_norm`` without mean and bias.

    z = residual + dropout(x)                                                    (LN.1)
    y = z / (sqrt(mean(z**2) + eps) + eps_outside) * weight                      (LN.2, LN.3 with mu = 0)

    Args:
        x: (..., N), as in ``add_layer_norm``.
        residual: as ``x``; its dtype may differ.
        weight: (N,), dtype of z or float32, or None.
        eps: as in ``rms_norm``, for the dtype of z.
        eps_outside: added to the root; as in ``layer_norm``.
        dropout_p: as in ``add_layer_norm``.
        seed: as in ``add_layer_norm``.
        dropout_rows: as in ``add_layer_norm``.
        backend: as in ``layer_norm``.

    Returns:
        (y, z), both (..., N), of the promoted dtype.

    Raises:
        TypeError, ValueError, BackendError: as in ``layer_norm``.

    Numerics and cost: as ``add_layer_norm``.
    Source: Zhang, Sennrich 2019, arXiv:1910.07467.

    Example:
        >>> y, z = add_rms_norm(torch.randn(2, 5, 8), torch.randn(2, 5, 8))
    """
    key = _library.signature("add_rms_norm", backend, x, residual, weight, eps, eps_outside, dropout_p, dropout_rows)
    name = _CHOICES.get(key)
    if name is None:
        call = _describe_add_rms_norm(
            x, residual, weight, eps,
            eps_outside=eps_outside, dropout_p=dropout_p, seed=seed, dropout_rows=dropout_rows,
        )  # fmt: skip
        name = _CHOICES.keep(key, select(_ADD_RMS_NORM, call, backend))
    if eps is None:
        eps = _rms_eps(x, residual)
    if seed is not None or dropout_p > 0.0:
        seed = _check.seed("add_rms_norm", dropout_p, seed, x.device)
    return _run(name, x, residual, weight, None, eps, eps_outside, dropout_p, seed, dropout_rows, False, True)
