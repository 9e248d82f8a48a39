"""Everything is compiled before it is judged: the extensions and, beside them, each Triton kernel once."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench import places
from tfm_kernels import _library
from tfm_kernels.bench import gate
from tfm_kernels.bench.record import Results
from tfm_kernels.bench.subject import groups
from tfm_kernels.testing import run

from . import machine
from .part import GREEN, RED, UNAVAILABLE, Item, Room
from .subject import GpuSubject

Call = tuple[str, Callable[[], Any]]


def items(room: Room, results: Results) -> Iterator[Item]:
    extensions = Extensions(room)
    for subject in room.subjects:
        if subject.backend == "triton":
            begins = (lambda: None) if results.has("extensions") else extensions.begin
            yield Item(f"triton {subject.stem}", partial(_beside, begins, partial(compile_all, subject, room)))
    yield Item("extensions", extensions.end)
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


def _beside(begins: Callable[[], None], rest: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    begins()
    return rest()


class Extensions:
    """Builds tfm_kernels._C, and _cuda where nvcc is there, in place where a C++ compiler is there.

    A few of their sources take a processor for a minute each, which is why they begin first.
    """

    def __init__(self, room: Room) -> None:
        self.room, self.process = room, None
        self.words = tempfile.TemporaryFile("w+")  # a pipe that nobody reads yet could fill

    def begin(self) -> None:
        """Starts the compilers, once."""
        if self.process is None and self._absent() is None:
            command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
            self.process = subprocess.Popen(command, cwd=places.ROOT, stdout=self.words, stderr=subprocess.STDOUT)

    def end(self) -> dict[str, Any]:
        """Waits for them; what there was no time for is tried again by the next run."""
        self.begin()
        if self.process is None:
            return {"state": UNAVAILABLE, "why": self._absent()}
        try:
            code = self.process.wait(max(self.room.left(), 1.0))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return {"state": UNAVAILABLE, "why": "was not built before the part had to end", "unfinished": True}
        self.words.seek(0)
        return {} if code == 0 else {"state": RED, "why": self.words.read()[-2000:]}

    def _absent(self) -> str | None:
        compiler = (os.environ.get("CXX") or "c++").split()[-1]
        if shutil.which(compiler) is None:
            return f"no C++ compiler: {compiler} is not found"
        missing = (name for name in ("ninja", "pybind11", "setuptools") if machine.package(name) is None)
        return next((f"{name} is not installed" for name in missing), None)


def calls(subject: GpuSubject, device: str) -> Iterator[Call]:
    """(name, function) of every call that the other parts make: to be run where launches stop after compiling."""
    for case in subject.cases():
        yield case.id, partial(lambda case: run(case.op, case.inputs(device), subject.backend, douts=case.douts), case)
    for name, (op, inputs) in subject.branches(device).items():
        yield name, partial(run, op, inputs, subject.backend)
    for group in groups(subject.speed):
        if group.kind == "train" or "train" not in group.case.passes:
            yield group.key, partial(_small, subject, group, device)


def _small(subject: GpuSubject, group: Any, device: str) -> None:
    case = subject.speed.proof(group.case)
    inputs = subject.speed.arguments(case, group.dtype)
    run(case.op, gate.on(device, inputs), subject.backend)


def compile_all(subject: GpuSubject, room: Room, processes: int | None = None) -> dict[str, Any]:
    """Compiles what all calls need, into Triton's cache on disk, where the other parts find it.

    Returns:
        How many kernels, how many of them the cache did not hold, the most registers, every kernel that spills, and the
        words of the calls that fail.
    """
    processes = processes or min(16, len(os.sched_getaffinity(0)))
    found = shared_out(subject, room, processes)
    kernels = {kernel["name"]: kernel for kernel in found["kernels"]}
    failures = found["failures"]
    return {
        "state": RED if failures else GREEN,
        **({"why": f"{len(failures)} calls do not compile; the first: {failures[0]}"} if failures else {}),
        "processes": processes,
        "kernels": len(kernels),
        "compiled": sum(not kept["hit"] for kept in found["kept"]),
        "registers": max((kernel["registers"] for kernel in kernels.values()), default=0),
        "spilling": [kernel for kernel in kernels.values() if kernel["spills"]],
        "failures": failures[:20],
        "unfinished": room.left() <= 0,
    }


def shared_out(
    subject: GpuSubject, room: Room, processes: int, tell: Callable[[int], None] = lambda kernels: None
) -> dict[str, list]:
    """Compiles it in several processes.

    Args:
        subject: whose calls.
        room: says where tensors are put, and until when calls are begun.
        processes: how many.
        tell: is told every second how many kernels were begun.

    Returns:
        "kernels" as they were loaded, what Triton's cache has "kept" of each, and "failures": words.
    """
    fork = multiprocessing.get_context("fork")
    answers: Any = fork.Queue()
    claims = Path(tempfile.mkdtemp())
    shards = [
        fork.Process(target=_shard, args=(subject, room, n, processes, answers, claims)) for n in range(processes)
    ]
    found: dict[str, list] = {"kernels": [], "kept": [], "failures": []}
    try:
        for shard in shards:
            shard.start()
        lost = _collect(shards, answers, found, lambda: tell(len(os.listdir(claims))))
    except BaseException:  # interrupted: they do not know
        for shard in shards:
            if shard.pid is not None:
                shard.terminate()
        raise
    finally:
        for shard in shards:
            if shard.pid is not None:
                shard.join()
        shutil.rmtree(claims)
    found["failures"] += [f"{lost} of {processes} compiling processes died"] * bool(lost)
    return found


def _collect(shards: list, answers: Any, found: dict[str, list], look: Callable[[], None]) -> int:
    """Adds the processes' answers to ``found``; how many gave none."""
    lost = len(shards)
    while lost:
        alive = any(shard.is_alive() for shard in shards)  # asked before: a shard answers, then ends
        try:
            answer = answers.get(timeout=1.0)
        except queue.Empty:
            if not alive:
                break
            look()
            continue
        lost -= 1
        for name, values in answer.items():
            found[name] += values
    return lost


def claim(claims: Path, kernel: Any, given: dict[str, Any]) -> bool:
    """Whether this launch's machine code is ours to make: a process that comes later finds the file of the first.

    Sizes and addresses are no part of it: our kernels are not specialised on them.
    """
    constant = {parameter.name: parameter.is_constexpr for parameter in kernel.params}

    def kind(name: str, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return str(value.dtype)
        return repr(value) if value is None or constant.get(name, True) else type(value).__name__

    words = repr((kernel.fn.__name__, sorted((name, kind(name, value)) for name, value in given.items())))
    try:
        (claims / hashlib.sha256(words.encode()).hexdigest()).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _shard(subject: GpuSubject, room: Room, index: int, count: int, answers: Any, claims: Path) -> None:
    """Every count-th call, launches stopped after compiling what no other process does."""
    from triton import knobs
    from triton.runtime.jit import JITFunction

    leader = os.getppid()
    os.nice(5)  # behind the extensions, which have the longest single pieces
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who leads ends us, or a traceback would come from each
    torch.set_num_threads(1)  # the processors are shared
    seen: dict[int, dict] = {}
    kept: list[dict] = []
    launch = JITFunction.run

    def keep(metadata: dict[str, Any], metadata_group: dict[str, str], cache_hit: bool, **_: Any) -> None:
        kept.append({"hash": metadata["hash"], "files": metadata_group, "hit": cache_hit})

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if not claim(claims, kernel, {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}):
            return None
        compiled = launch(kernel, *args, grid=grid, warmup=True, **kwargs)
        if id(compiled) not in seen:
            compiled._init_handles()  # loads it: only then its registers are known
            seen[id(compiled)] = {
                "name": f"{compiled.name} {compiled.hash[:12]}", "registers": compiled.n_regs,
                "spills": compiled.n_spills, "shared": compiled.metadata.shared, "warps": compiled.metadata.num_warps,
            }  # fmt: skip
        return compiled

    JITFunction.run, knobs.compilation.listener = compile_only, keep
    failures, last = [], time.monotonic() + room.left()
    for position, (name, call) in enumerate(calls(subject, room.device)):
        if position % count != index:
            continue
        if time.monotonic() > last or os.getppid() != leader:
            break
        try:
            with _library.plans_anew():
                call()
        except Exception as error:  # reported, and the next one is tried
            failures.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
    answers.put({"kernels": list(seen.values()), "kept": kept, "failures": failures})
