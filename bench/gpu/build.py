"""Everything is compiled before it is judged: the extensions, and each Triton kernel on all processors at once."""

from __future__ import annotations

import multiprocessing
import os
import queue
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from bench import gate, record
from bench.record import Results
from bench.subject import groups
from tfm_kernels import _library
from tfm_kernels.testing import run

from . import machine
from .part import GREEN, RED, UNAVAILABLE, Item, Room
from .subject import GpuSubject

Call = tuple[str, Callable[[], Any]]


def items(room: Room, results: Results) -> Iterator[Item]:
    for subject in room.subjects:
        if subject.backend == "triton":
            yield Item(f"triton {subject.stem}", partial(compile_all, subject, room))
    yield Item("extensions", partial(extensions, room))
    if any(subject.backend == "cuda" for subject in room.subjects):
        yield Item("cuda extension", cuda_extension)


def cuda_extension() -> dict[str, Any]:
    """What tfm_kernels._cuda was built for; it is built with the other extension."""
    _library.load_again()
    if _library.cuda_extension is not None:
        absent = {name: why for name, why in _library.kernels().items() if name.endswith("_cuda") and why}
        return {"built": _library.cuda_extension.build_info()} | (
            {"state": RED, "why": next(iter(absent.values()))} if absent else {}
        )
    return {"state": UNAVAILABLE if machine.nvcc() == "not found" else RED, "why": _library.cuda_missing}


def extensions(room: Room) -> dict[str, Any]:
    """Builds tfm_kernels._C, and _cuda where nvcc is there, in place where a C++ compiler is there."""
    compiler = (os.environ.get("CXX") or "c++").split()[-1]
    if shutil.which(compiler) is None:
        return {"state": UNAVAILABLE, "why": f"no C++ compiler: {compiler} is not found"}
    for name in ("ninja", "pybind11", "setuptools"):
        if machine.package(name) is None:
            return {"state": UNAVAILABLE, "why": f"{name} is not installed"}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    limit = max(room.left(), 1.0)
    try:
        done = subprocess.run(command, cwd=record.ROOT, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"state": UNAVAILABLE, "why": f"was not built within the {limit:.0f} s that were left"}
    return {} if done.returncode == 0 else {"state": RED, "why": (done.stderr or done.stdout)[-2000:]}


def calls(subject: GpuSubject, device: str) -> Iterator[Call]:
    """(name, function) of every call that the other parts make: to be run where launches stop after compiling."""
    for case in subject.cases():
        yield case.id, partial(lambda case: run(case.op, case.inputs(device), subject.backend, douts=case.douts), case)
    for name, (op, inputs) in subject.branches(device).items():
        yield name, partial(run, op, inputs, subject.backend)
    for group in groups(subject.speed):
        if group.kind == "train":
            yield group.key, partial(_small, subject, group, device)


def _small(subject: GpuSubject, group: Any, device: str) -> None:
    case = subject.speed.proof(group.case)
    inputs = subject.speed.arguments(case, group.dtype)
    run(case.op, gate.on(device, inputs), subject.backend)


def compile_all(subject: GpuSubject, room: Room, processes: int | None = None) -> dict[str, Any]:
    """Compiles what all calls need, into Triton's cache on disk, where the other parts find it.

    Returns:
        How many kernels, the most registers, every kernel that spills, and the words of the calls that fail.
    """
    processes = processes or min(16, len(os.sched_getaffinity(0)))
    fork = multiprocessing.get_context("fork")
    answers: Any = fork.Queue()
    shards = [fork.Process(target=_shard, args=(subject, room, n, processes, answers)) for n in range(processes)]
    for shard in shards:
        shard.start()
    found: dict[str, list] = {"kernels": [], "failures": []}
    lost = len(shards)
    while lost:
        alive = any(shard.is_alive() for shard in shards)  # asked before: a shard answers, then ends
        try:
            answer = answers.get(timeout=1.0)
        except queue.Empty:
            if not alive:
                break
            continue
        lost -= 1
        for name, values in answer.items():
            found[name] += values
    for shard in shards:
        shard.join()
    kernels = {kernel["name"]: kernel for kernel in found["kernels"]}
    failures = found["failures"] + [f"{lost} of {processes} compiling processes died"] * bool(lost)
    return {
        "state": RED if failures else GREEN,
        **({"why": f"{len(failures)} calls do not compile; the first: {failures[0]}"} if failures else {}),
        "processes": processes,
        "kernels": len(kernels),
        "registers": max((kernel["registers"] for kernel in kernels.values()), default=0),
        "spilling": [kernel for kernel in kernels.values() if kernel["spills"]],
        "failures": failures[:20],
        "unfinished": room.left() <= 0,
    }


def _shard(subject: GpuSubject, room: Room, index: int, count: int, answers: Any) -> None:
    """Every count-th call, launches stopped after compiling."""
    from triton.runtime.jit import JITFunction

    seen: dict[int, dict] = {}
    launch = JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled = launch(kernel, *args, grid=grid, warmup=True, **kwargs)
        if id(compiled) not in seen:
            compiled._init_handles()  # loads it: only then its registers are known
            seen[id(compiled)] = {
                "name": f"{compiled.name} {compiled.hash[:12]}", "registers": compiled.n_regs,
                "spills": compiled.n_spills, "shared": compiled.metadata.shared, "warps": compiled.metadata.num_warps,
            }  # fmt: skip
        return compiled

    JITFunction.run = compile_only
    failures, last = [], time.monotonic() + room.left()
    for position, (name, call) in enumerate(calls(subject, room.device)):
        if position % count != index:
            continue
        if time.monotonic() > last:
            break
        try:
            call()
        except Exception as error:  # reported, and the next one is tried
            failures.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
    answers.put({"kernels": list(seen.values()), "failures": failures})
