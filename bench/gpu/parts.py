"""The parts of the proof in their order, and how the time is shared out between them."""

from __future__ import annotations

from collections.abc import Iterator

from tfm_kernels.bench.record import Results

from . import build, contract, limits, machine, memory, models, repeats, sanitizers, speed
from .part import Item, Part, Room


def _environment(room: Room, results: Results) -> Iterator[Item]:
    yield Item("machine", lambda: {"machine": room.now, "clocks": machine.clocks(), "packages": _packages()})
    yield Item("nvidia-smi", lambda: {"words": machine.output("nvidia-smi").splitlines()})


def _packages() -> dict[str, str | None]:
    return {name: machine.package(name) for name in ("torch", "triton", "ninja", "pybind11", "pytest", "numpy")}


PROCESSES = 12  # an item of the contract keeps a host thread busy and the GPU hardly at all; what is timed is alone
PATIENCE = 40.0  # seconds: a call of the contract takes one, and compiles for ten where the build was cut short
# seconds of a run of 480; a part that ends early leaves the rest to those behind it
PARTS = (
    Part("environment", "GPU, driver, tools, clocks as read", 5, _environment),
    Part("build", "compiles every kernel and launch, and the extensions", 170, build.items),
    Part("contract", "the numeric contract, dropout masks", 85, contract.items, PATIENCE, PROCESSES),
    Part(
        "repeats", f"{repeats.REPEATS} runs and CUDA graph replays, bit for bit", 35, repeats.items, PATIENCE, PROCESSES
    ),
    Part("memory", "guards, more than 2**31 elements", 40, memory.items, PATIENCE, PROCESSES),
    Part("limits", "copy bandwidth and matrix rate", 10, limits.items),
    Part("speed", "kernels and peers in turns", 135, speed.items),
    Part("models", "whole models, eager and compiled", 400, models.items, 300.0, named=True),
    Part(
        "sanitizers",
        "the smallest calls under compute-sanitizer",
        480,
        sanitizers.items,
        processes=sanitizers.PROCESSES,
        named=True,
    ),
)
