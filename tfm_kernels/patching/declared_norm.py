"""A norm as its declaration describes it: what it computes, in words, and by ops, alone or with the sum before it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..ops.layer_norm import layer_norm_of_sum
from . import guard
from .swap import options


@dataclass(frozen=True)
class DeclaredNorm:
    """The names of a class' parts, and what it makes of them.

    Attributes:
        weight: name of the factor's parameter, or None.
        bias: name of the summand's parameter, or None.
        eps: name of the attribute that holds what is added to the variance, or the number; None: torch's of RMSNorm.
        eps_outside: the same of what is added to its root.
        unbiased: whether the variance divides by N - 1.
        rms: whether the mean is neither looked for nor taken off.
        unit_offset: whether the factor is 1 + weight.
    """

    weight: str | None = "weight"
    bias: str | None = "bias"
    eps: str | float | None = "eps"
    eps_outside: str | float = 0.0
    unbiased: bool = False
    rms: bool = False
    unit_offset: bool = False

    def names(self) -> dict[str, Any]:
        """Argument of the declaration -> the attribute that it names, or a number, or None."""
        return {"weight": self.weight, "bias": self.bias, "eps": self.eps, "eps_outside": self.eps_outside}

    def formula(self) -> str:
        """What a forward is to give, in the declaration's words."""
        factor = " * (1 + weight)" if self.unit_offset else " * weight"
        weight, bias = "" if self.weight is None else factor, "" if self.bias is None else " + bias"
        if self.rms:
            return f"x / (sqrt(mean(x**2) + eps) + eps_outside){weight}"
        over = "N - 1" if self.unbiased else "N"
        return f"(x - mean) / (sqrt(var + eps) + eps_outside){weight}{bias}, with a variance over {over}"

    def parameters(self, norm: Any) -> tuple[Tensor | None, Tensor | None]:
        """Factor and summand of a module."""
        weight, bias = self._held(norm)
        if self.unit_offset and weight is not None:  # 16 bits near 1 would be few
            wide = torch.promote_types(weight.dtype, torch.float32)
            weight, bias = 1.0 + weight.to(wide), None if bias is None else bias.to(wide)
        return weight, bias

    def _held(self, norm: Any) -> tuple[Tensor | None, Tensor | None]:
        weight, bias = (None if name is None else guard.attribute(norm, name) for name in (self.weight, self.bias))
        return weight, bias

    def epsilons(self, norm: Any) -> tuple[float | None, float]:
        """eps and eps_outside of a module; an eps of None is torch's of RMSNorm, which depends on the dtype."""
        eps, outside = (
            guard.attribute(norm, held) if isinstance(held, str) else held for held in (self.eps, self.eps_outside)
        )
        return eps if eps is None else float(eps), float(outside)  # type: ignore[arg-type]

    def _reads_tensors(self, norm: Any) -> bool:
        """Whether a number is kept as a tensor, which a graph would have to read."""
        named = (held for held in (self.eps, self.eps_outside) if isinstance(held, str))
        return any(isinstance(guard.attribute(norm, held), Tensor) for held in named)

    def takes(self, norm: Any, *given: Tensor) -> bool:
        """Whether the parameters are rows of the dtype of a sum of ``given``: then the forward's result has it, too."""
        dtype = functools.reduce(torch.promote_types, (t.dtype for t in given))
        if torch.compiler.is_compiling() and self._reads_tensors(norm):
            return False
        found = options(norm).found
        if not dtype.is_floating_point or (found is not None and any(map(found.leaves, given))):
            return False
        return all(p is None or (p.dtype == dtype and p.shape == given[0].shape[-1:]) for p in self._held(norm))

    def run(self, norm: Any, x: Tensor, backend: str | None) -> Tensor:
        """The norm of ``x``."""
        return self.of(x, self.parameters(norm), self.epsilons(norm), backend)

    def of(self, x: Tensor, parameters: tuple, epsilons: tuple, backend: str | None) -> Tensor:
        """The norm of ``x`` by these parameters and epsilons."""
        (weight, bias), (eps, outside) = parameters, epsilons
        if self.rms:
            return ops.rms_norm(x, weight, eps, eps_outside=outside, backend=backend)
        told: Any = {"eps_outside": outside, "unbiased": self.unbiased, "backend": backend}
        return ops.layer_norm(x, weight, bias, eps, **told)

    def run_of_sum(self, norm: Any, x: Tensor, residual: Tensor, dropout_p: float, backend: str | None) -> Tensor:
        """The norm of residual + dropout(x)."""
        (weight, bias), (eps, outside) = self.parameters(norm), self.epsilons(norm)
        told: Any = {"eps_outside": outside, "dropout_p": dropout_p, "backend": backend}
        if self.rms:
            return ops.add_rms_norm(x, residual, weight, eps, **told)[0]
        return layer_norm_of_sum(x, residual, weight, bias, eps, unbiased=self.unbiased, **told)  # type: ignore[arg-type]
