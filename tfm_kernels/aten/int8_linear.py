"""Backend "aten" of int8_linear: PyTorch's own functions."""

from __future__ import annotations

from .._autocast import beyond_autocast
from . import _int8

# (M, K) -> (M, N); the arguments are those of ops.int8_linear, already checked, and whether to differentiate
int8_linear = beyond_autocast(_int8.int8_linear)
products_of_int8 = _int8.products_of_int8
