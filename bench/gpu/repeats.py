"""The same bits every time: 250 runs of each branch, and replays of a CUDA graph that captured it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tfm_kernels import _library
from tfm_kernels.bench.record import Results
from tfm_kernels.testing import run
from tfm_kernels.testing.contract import Results as Found
from tfm_kernels.testing.contract import bits_equal

from .part import Item, Room

REPEATS = 250
REPLAYS = 5


def items(room: Room, results: Results) -> Iterator[Item]:
    for subject in room.built():
        for name, (op, inputs) in subject.branches(room.device).items():
            yield subject.item(f"{name} {REPEATS} times", partial(repeat, op, inputs, subject.backend), op)
            yield subject.item(f"{name} as a CUDA graph", partial(replay, op, inputs, subject.backend), op)


def repeat(op: str, inputs: Mapping[str, Any], backend: str, times: int = REPEATS) -> dict[str, Any]:
    """Forward and backward, ``times`` times, compared bit by bit with the first."""
    first = run(op, inputs, backend)
    for number in range(1, times):
        assert_same(first, run(op, inputs, backend, douts=first.douts), f"run {number} differs from the first")
    others = {name: _elsewhere(t) for name, t in inputs.items()}
    with _library.plans_anew():
        planned = run(op, others, backend, douts=first.douts)
    assert_same(planned, run(op, others, backend, douts=first.douts), "on other numbers a repeated call differs")
    return {"repeats": times}


def _elsewhere(value: Any) -> Any:
    """A tensor of numbers with others, in other memory that lies alike; everything else as it is."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or 0 in value.stride():
        return value
    other = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return other.copy_(value * 0.5)


def replay(op: str, inputs: Mapping[str, Any], backend: str) -> dict[str, Any]:
    """Captures forward and backward, replays them on other data, and compares with a run without a graph."""
    static = {name: t.clone() if isinstance(t, Tensor) else t for name, t in inputs.items()}
    first = run(op, static, backend)  # compiles; nothing may be compiled during the capture
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(op, static, backend, douts=first.douts)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(op, static, backend, douts=first.douts)
    generator = torch.Generator().manual_seed(11)
    for number in range(REPLAYS):
        for t in static.values():
            if isinstance(t, Tensor) and t.is_floating_point():
                t.copy_(torch.randn(t.shape, generator=generator))
        if "seed" in static:
            static["seed"].fill_(number)
        graph.replay()
        torch.cuda.synchronize()
        assert_same(captured, run(op, static, backend, douts=first.douts), f"replay {number} differs from a plain run")
    return {"replays": REPLAYS}


def assert_same(first: Found, second: Found, what: str) -> None:
    """Raises where an output or a gradient differs in a bit."""
    for name, t in [*first.outputs.items(), *((f"d{name}", t) for name, t in first.grads.items())]:
        other = second.grads[name[1:]] if name not in first.outputs else second.outputs[name]
        if t is not None:
            assert other is not None and bits_equal(t, other), f"{name}: {what}"
