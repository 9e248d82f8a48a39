"""Triton's kernels in a file: compiled on a machine without a GPU, put into the cache of one that has one.

A file is a tar.xz of manifest.json and, for each kernel, the two files that Triton loads: its machine code and what it
is started with, in a folder of the hash that Triton finds it by. C launchers stay out: they belong to a machine.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import platform
import re
import tarfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from bench.launch import SHARED, host_driver, host_only
from tfm_kernels.bench import record

from . import build, keys, machine
from .part import Room
from .subject import GpuSubject

FORMAT = 1
ARCHITECTURES = {f"{arch // 10}.{arch % 10}": arch for arch in SHARED}  # compute capability -> what Triton calls it
_MANIFEST = "manifest.json"
_KERNEL = re.compile(r"([0-9a-f]{64})/(\w+)\.(cubin|json)")
_SAY_EVERY = 15.0  # seconds


class PackError(Exception):
    """Raised for a file that cannot be made or used; the words are a sentence."""


def make(file: Path, subjects: Sequence[GpuSubject], capability: str, ahead: bool = False) -> list[str]:
    """Compiles what the calls of all parts launch, and packs it.

    What is compiled stays in Triton's cache: an interrupted run goes on from there.

    Args:
        file: to be written.
        subjects: the ops.
        capability: compute capability, one of ARCHITECTURES.
        ahead: whether the kernels that wait for their proof are switched on, for the manifest.

    Returns:
        The words of calls that do not compile; the others' kernels are in the file.
    """
    from triton import knobs

    if knobs.runtime.interpret:
        raise PackError("--compile cannot run with TRITON_INTERPRET set, which leaves nothing to compile")
    print(f"compiling for compute capability {capability} into {knobs.cache.dir}", flush=True)
    keys.settle()
    kernels: dict[str, dict[str, str]] = {}
    failures: list[str] = []
    room = Room(file.parent, {}, math.inf, subjects, "cpu")
    processes = len(os.sched_getaffinity(0))
    with _gpu_of(ARCHITECTURES[capability]):
        for subject in subjects:
            if subject.backend == "triton":
                told = _Told(subject.stem)
                found = build.shared_out(subject, room, processes, told.every)
                told.end(found)
                kernels |= {kernel["hash"]: kernel["files"] for kernel in found["kept"]}
                failures += [f"{subject.stem}: {words}" for words in found["failures"]]
        manifest = {
            "format": FORMAT, "key": _key(capability), "capability": capability, "ahead": ahead,
            "ops": [subject.stem for subject in subjects if subject.backend == "triton"], "kernels": len(kernels),
            "triton": machine.package("triton"), "python": platform.python_version(),
            "sources": record.sources(machine.SOURCES), "date": record.today(),
        }  # fmt: skip
    _write(file, manifest, kernels)
    print(f"written to {file}: {len(kernels)} kernels, {file.stat().st_size / 1e6:.1f} MB", flush=True)
    return failures


@contextmanager
def _gpu_of(arch: int) -> Iterator[None]:
    """Inside, launchers plan for such a GPU, and Triton compiles for it."""
    from tfm_kernels.triton import _launch

    with host_only(host_driver(arch)), mock.patch.object(_launch, "capability", lambda x: divmod(arch, 10)):
        yield


class _Told:
    """Says how far an op is."""

    def __init__(self, stem: str) -> None:
        self.stem = stem
        self.start = self.last = time.monotonic()

    def every(self, kernels: int) -> None:
        now = time.monotonic()
        if now - self.last >= _SAY_EVERY:
            self.last = now
            print(f"  {self.stem}: {kernels} launches, {now - self.start:.0f} s", flush=True)

    def end(self, found: dict[str, list]) -> None:
        new = len({kernel["hash"] for kernel in found["kept"] if not kernel["hit"]})
        every = len({kernel["hash"] for kernel in found["kept"]})
        seconds = time.monotonic() - self.start
        print(f"-- {self.stem}: {every} kernels, {new} of them compiled now, {seconds:.0f} s", flush=True)
        for words in found["failures"]:
            print(f"   {words}", flush=True)


def _key(capability: str) -> str:
    """All that Triton finds a kernel by but for its source and options: Triton itself, ptxas, libdevice, settings."""
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime.cache import get_cache_key

    backend = make_backend(GPUTarget("cuda", ARCHITECTURES[capability], 32))
    no_source, settings = SimpleNamespace(hash=str), get_cache_invalidating_env_vars()
    key = get_cache_key(no_source, backend, backend.parse_options({}), env_vars=settings)
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def _write(file: Path, manifest: dict[str, Any], kernels: dict[str, dict[str, str]]) -> None:
    """Beside its name, then renamed; kernels of one name lie together, which packs them smaller."""
    partial = file.with_name(f"{file.name}.partial")
    paths = [
        (Path(path).stem, hash, Path(path))
        for hash, files in kernels.items()
        for path in files.values()
        if _KERNEL.fullmatch(f"{hash}/{Path(path).name}")
    ]
    with tarfile.open(partial, "w:xz") as tar:
        _add(tar, _MANIFEST, json.dumps(manifest, indent=1).encode())
        for _, hash, path in sorted(paths):
            _add(tar, f"{hash}/{path.name}", path.read_bytes())
    partial.replace(file)


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    header = tarfile.TarInfo(name)
    header.size = len(data)
    tar.addfile(header, io.BytesIO(data))


def check(file: Path, capability: str | None = None) -> dict[str, Any]:
    """The manifest of a file whose kernels Triton will find here; needs no GPU.

    Args:
        file: to be read.
        capability: of the GPU, where it is known.

    Raises:
        PackError: the file is another one, or Triton would compile every kernel anew, which a GPU need not wait for.
    """
    for name, data in _members(file):
        try:
            manifest = json.loads(data) if name == _MANIFEST else {}
        except ValueError:
            manifest = {}
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            break
        made_for = manifest["capability"]
        if made_for not in ARCHITECTURES:
            break
        if capability not in (None, made_for):
            raise PackError(f"{file} was compiled for compute capability {made_for}, and this GPU has {capability}")
        if manifest["key"] != _key(made_for):
            theirs = f"triton {manifest['triton']} of Python {manifest['python']}"
            ours = f"triton {machine.package('triton')} of Python {platform.python_version()}"
            raise PackError(
                f"{file} was compiled by {theirs}, and this is {ours}: files or settings of Triton differ, so that it "
                "would find none of the kernels; compile them with what runs here, or leave --kernels out"
            )
        return manifest
    raise PackError(f"{file} was not written by this tree's --compile")


def unpack(file: Path, capability: str) -> None:
    """Puts a file's kernels into Triton's cache; those that are there stay as they are."""
    from triton.runtime.cache import get_cache_manager

    manifest = check(file, capability)
    count, start = 0, time.monotonic()
    found: dict[str, dict[str, str]] = {}
    for name, data in _members(file):
        if name == _MANIFEST:
            continue
        match = _KERNEL.fullmatch(name)
        if match is None:
            raise PackError(f"{file} holds {name!r}, which is no kernel's file")
        hash, kernel, suffix = match.groups()
        manager = get_cache_manager(hash)
        both = {f"{kernel}.cubin", f"{kernel}.json"}
        if not both <= (manager.get_group(f"{kernel}.json") or {}).keys():
            found.setdefault(hash, {})[f"{kernel}.{suffix}"] = manager.put(data, f"{kernel}.{suffix}")
            if both == found[hash].keys():
                manager.put_group(f"{kernel}.json", found[hash])  # with paths of this cache
        count += suffix == "cubin"
    if count != manifest["kernels"]:
        raise PackError(f"{file} ends early: it holds {count} of {manifest['kernels']} kernels")
    print(f"{file}: {count} kernels are in Triton's cache, {time.monotonic() - start:.1f} s", flush=True)
    if manifest["sources"] != record.sources(machine.SOURCES):
        print(f"{file} was compiled from other sources: kernels that changed since are compiled anew", flush=True)


def _members(file: Path) -> Iterator[tuple[str, bytes]]:
    """(name, content) of what a tar holds, in its order; nothing of it is written by tarfile."""
    try:
        with tarfile.open(file, "r:xz") as tar:
            for member in tar:
                content = tar.extractfile(member) if member.isreg() else None
                if content is None:
                    raise tarfile.TarError(f"{member.name} is no plain file")
                yield member.name, content.read()
    except Exception as error:  # tarfile's, xz's, the file system's
        raise PackError(f"{file} cannot be read: {error}") from error
