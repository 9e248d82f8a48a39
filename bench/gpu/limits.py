"""The GPU's two limits, measured in the same run as the kernels, on random data."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from tfm_kernels.bench.record import Results

from . import machine
from .part import Item, Room

COPY_BYTES = tuple(1 << shift for shift in (24, 27, 30, 33))  # read plus written
MATRIX = {"bfloat16": 8192, "float16": 8192, "float32": 4096}  # side of a square product
_TIMES = 11


def items(room: Room, results: Results) -> Iterator[Item]:
    for size in COPY_BYTES:
        yield Item(f"copy {size}", partial(copy, size, room.device))
    for dtype, side in MATRIX.items():
        yield Item(f"matrix {dtype}", partial(matrix, dtype, side, room.device))


def measured(results: Results) -> dict[str, Any] | None:
    """The part's file in the form that the harness's limits.py reads: the largest copy's rate, for every size; or None.

    Smaller copies are slower by what a launch costs; a kernel's share of the limit must not look better for that.
    """
    rates = {item["key"]: item["rate"] for item in results.data["groups"] if "rate" in item}
    copies = {key: rate for key, rate in rates.items() if key.startswith("copy")}
    matrices = {key.removeprefix("matrix "): rate for key, rate in rates.items() if key.startswith("matrix")}
    if len(copies) < len(COPY_BYTES) or set(matrices) != set(MATRIX):
        return None
    return {"copy": {str(COPY_BYTES[-1]): max(copies.values())}, "matrix": matrices}


def copy(moved: int, device: str) -> dict[str, Any]:
    """Bytes / s of a copy that reads and writes ``moved`` bytes together."""
    source = torch.randn(moved // 8, device=device)
    target = torch.empty_like(source)
    flush = Flush(device)
    return _rate(moved, lambda: target.copy_(source), flush)


def matrix(dtype: str, side: int, device: str) -> dict[str, Any]:
    """FLOP / s of the library's own product of two random square matrices."""
    a, b = (torch.randn(side, side, device=device).to(getattr(torch, dtype)) for _ in range(2))
    out = torch.empty_like(a)
    flush = Flush(device)
    return _rate(2 * side**3, lambda: torch.mm(a, b, out=out), flush)


class Flush:
    """Empties the L2 cache and keeps the GPU busy while the host queues what is timed behind it."""

    def __init__(self, device: str) -> None:
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        self.buffer = torch.empty(4 * max(cache, 1 << 26), dtype=torch.uint8, device=device)

    def __call__(self, host_seconds: float) -> None:
        """Queues the flush and at least ``host_seconds`` of waiting (about 2e9 cycles a second)."""
        self.buffer.zero_()
        torch.cuda._sleep(int(2e9 * host_seconds))


def timed(call: Callable[[], Any], flush: Flush, host_seconds: float = 5e-4) -> float:
    """Seconds on the device of one call: between two events, with cold L2, the host ahead."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flush(host_seconds)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def _rate(amount: int, call: Callable[[], Any], flush: Flush) -> dict[str, Any]:
    for _ in range(3):
        call()
    seconds = statistics.median(timed(call, flush) for _ in range(_TIMES))
    return {"rate": amount / seconds, "seconds_each": seconds, "clocks": machine.clocks()}
