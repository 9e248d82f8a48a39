"""Data that makes kernels show their errors, and the memory layouts it may arrive in.

Nothing here is all-positive: positive values make attention nearly uniform, and then off-by-one masks go unseen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def _randn(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=generator)


def _heavy(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Student's t with 2 degrees of freedom: now and then a value 30 times the usual one."""
    chi2 = -2 * torch.log(1 - torch.rand(*shape, generator=generator))
    return (torch.randn(*shape, generator=generator) * (2 / chi2.clamp(min=1e-4)).sqrt()).clamp(-500, 500)


def _outlier(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    values = torch.randn(*shape, generator=generator)
    if values.numel():
        values[..., shape[-1] // 3] *= 100
    return values


def _constant_rows(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.randn(*shape[:-1], 1, generator=generator).expand(*shape)


def _mean_1000(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Rows around +1000 and -1000 in turn."""
    values = torch.randn(*shape, generator=generator)
    if len(shape) < 2:
        return values + 1000
    return values + 1000 * (1 - 2 * (torch.arange(shape[-2]) % 2)).unsqueeze(-1)


def _integers(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.randint(-3, 4, tuple(shape), generator=generator).float()


def _extremes(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """The largest numbers of fp16, with random signs, among ordinary ones."""
    values = torch.randn(*shape, generator=generator)
    large = torch.rand(*shape, generator=generator) < 0.25
    return torch.where(large, 65504.0 * (1 - 2 * (values < 0).float()), values)


def _subnormals(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=generator) * (2.0**-18 if dtype == torch.float16 else 2.0**-128)


# name -> function(shape, dtype, generator) -> float32 values
CLASSES: dict[str, Callable[[Sequence[int], torch.dtype, torch.Generator], Tensor]] = {
    "randn": _randn,
    "randn4": lambda shape, dtype, generator: 4 * _randn(shape, dtype, generator),
    "heavy": _heavy,
    "outlier": _outlier,
    "constant_rows": _constant_rows,
    "mean_1000": _mean_1000,
    "integers": _integers,
    "extremes": _extremes,
    "subnormals": _subnormals,
}


def draw(name: str, shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Values of a data class in storage type ``dtype``, contiguous.

    Args:
        name: a key of CLASSES.
        shape: any shape, size-0 axes included.
        dtype: the storage type; values are drawn in float32 and rounded to it.
        generator: a CPU generator; the same state gives the same values on every machine.
    """
    return CLASSES[name](shape, dtype, generator).to(dtype).contiguous()


def _transposed(t: Tensor) -> Tensor:
    return t.transpose(-1, -2).contiguous().transpose(-1, -2) if t.dim() > 1 else _sliced(t)


def _token_major(t: Tensor) -> Tensor:
    """(B, H, T, D) laid out as (B, T, H, D), the way projections leave it."""
    return t.transpose(1, 2).contiguous().transpose(1, 2) if t.dim() == 4 else t


def _sliced(t: Tensor) -> Tensor:
    if t.dim() == 0:
        return _sliced(t.view(1))[0]
    wide = t.new_full((*t.shape[:-1], t.shape[-1] + 5), torch.nan)
    wide[..., 2 : 2 + t.shape[-1]] = t
    return wide[..., 2 : 2 + t.shape[-1]]


def _expanded(t: Tensor) -> Tensor:
    """The first entry of the leading axis, repeated with stride 0: other values, same shape."""
    return t[:1].contiguous().expand(t.shape) if t.dim() > 1 and t.shape[0] > 0 else t


def _misaligned(t: Tensor) -> Tensor:
    """Contiguous, but starting one element behind an aligned address."""
    flat = t.new_full((t.numel() + 1,), torch.nan)
    flat[1:] = t.reshape(-1)
    return flat[1:].view(t.shape)


# name -> function(tensor) -> the same values (expanded: the first slice repeated) in another layout
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "transposed": _transposed,
    "token_major": _token_major,
    "sliced": _sliced,
    "expanded": _expanded,
    "misaligned": _misaligned,
}


def lay_out(t: Tensor, layout: str) -> Tensor:
    """``t`` in one of LAYOUTS; padding around it is NaN, so that reading it shows."""
    return LAYOUTS[layout](t)


def tame(*tensors: Tensor | None) -> bool:
    """Whether the data looks drawn from one narrow distribution around 0: zero mean in every row, few repeated values.

    Only there is the eager formula's error a fair measure of a kernel's (C2), and the error's lean a matter of
    thousands of independent roundings (C3).
    """
    for t in tensors:
        if t is None or t.numel() == 0:
            continue
        if any(stride == 0 and size > 1 for stride, size in zip(t.stride(), t.shape, strict=True)):
            return False
        wide = torch.atleast_1d(t.detach().double())
        if int((wide.abs() == wide.abs().max()).sum()) > 2 + 0.01 * wide.numel():
            return False
        square = wide.square().mean()
        across = wide.mean(-1).square().mean() if wide.dim() > 1 else wide.mean().square()
        if not (across <= square * (0.05 + 6 / wide.shape[-1]) and wide.pow(4).mean() <= 10 * square.square()):
            return False
        if not wide.mean().square() <= square * (0.0025 + 36 / wide.numel()):
            return False
    return True
