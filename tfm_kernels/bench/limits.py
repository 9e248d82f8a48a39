"""The two limits of the machine, measured in the same run as the kernels: copy bandwidth and matrix rate."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable

import torch

_COPY_SIZES = tuple(1 << shift for shift in (14, 17, 20, 23, 26))  # bytes read plus written: L1 ... memory
# (M, N, K): square, a linear layer's, and the tiles that brgemm gets inside attention
_MATRICES = ((1024, 1024, 1024), (1024, 2048, 512), (512, 512, 64))


def measure(dtypes: tuple[str, ...], seconds: float = 0.15) -> dict:
    """Copy bandwidth by working set and matrix rate by type, each the best of what was tried.

    Args:
        dtypes: storage types whose matrix rate is wanted.
        seconds: how long each of about a dozen probes runs.

    Returns:
        {"copy": {bytes: bytes / s}, "matrix": {dtype: FLOP / s}}, keys as strings so that JSON keeps them.
    """
    copy = {str(size): _copy_rate(size, seconds) for size in _COPY_SIZES}
    return {"copy": copy, "matrix": {dtype: _matrix_rate(getattr(torch, dtype), seconds) for dtype in dtypes}}


def copy_rate(limits: dict, moved: int) -> float:
    """Bytes / s that a copy of this working set reaches, between the sizes that were measured."""
    points = sorted((math.log(int(size)), rate) for size, rate in limits["copy"].items())
    at = math.log(max(moved, 1))
    if at <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in zip(points, points[1:], strict=False):
        if at <= x1:
            return y0 + (y1 - y0) * (at - x0) / (x1 - x0)
    return points[-1][1]


def matrix_rate(limits: dict, dtype: str) -> float:
    """FLOP / s of a type: its own, or float32's where the CPU multiplies that faster and widening is free to do."""
    return max(limits["matrix"][dtype], limits["matrix"]["float32"])


def least_time(limits: dict, dtype: str, flops: int, moved: int) -> float:
    """Seconds below which nobody gets: the longer of arithmetic and traffic."""
    return max(flops / matrix_rate(limits, dtype), moved / copy_rate(limits, moved))


def bound_by(limits: dict, dtype: str, flops: int, moved: int) -> str:
    """Which of the two limits is the nearer one: "matrix" or "copy"."""
    return "matrix" if flops / matrix_rate(limits, dtype) >= moved / copy_rate(limits, moved) else "copy"


def _fastest(run: Callable[[], object], seconds: float) -> float:
    """The shortest of many runs: a limit is what the machine can do, not what it does on average.

    With all threads and with one: where something else runs, threads that wait for each other are the slower ones.
    """
    threads = torch.get_num_threads()
    try:
        best = _shortest(run, seconds)
        torch.set_num_threads(1)
        return min(best, _shortest(run, seconds / 2))
    finally:
        torch.set_num_threads(threads)


def _shortest(run: Callable[[], object], seconds: float) -> float:
    run()
    best, end = math.inf, time.perf_counter() + seconds
    while True:
        start = time.perf_counter()
        run()
        now = time.perf_counter()
        best = min(best, now - start)
        if now > end:
            return best


def _copy_rate(moved: int, seconds: float) -> float:
    source = torch.ones(moved // 8)
    target = torch.zeros_like(source)
    return moved / _fastest(lambda: target.copy_(source), seconds)


def _matrix_rate(dtype: torch.dtype, seconds: float) -> float:
    best = 0.0
    for m, n, k in _MATRICES if dtype == torch.float32 else _MATRICES[1:]:  # emulated 16-bit types take their time
        a, b = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
        out = torch.empty(m, n, dtype=dtype)
        best = max(best, 2 * m * n * k / _fastest(functools.partial(torch.mm, a, b.t(), out=out), seconds))
        if dtype == torch.float32 and torch.backends.mkldnn.is_available():  # oneDNN, the weight packed beforehand
            packed = torch.ops.mkldnn._reorder_linear_weight(b, m)
            best = max(best, 2 * m * n * k / _fastest(functools.partial(_packed_linear, a, packed), seconds))
    return best


def _packed_linear(a: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(a, packed, None, "none", [], "")
