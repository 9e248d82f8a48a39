"""Compiles csrc/cuda for the CPU: the very sources that nvcc compiles, kernels and bindings, run by simt.cpp's threads.

Ninja compiles again only what changed. A build may be of patched sources (tests/simt/defects.py) or sanitized.
"""

import os
import re
import shutil
import zlib
from importlib.util import find_spec
from pathlib import Path

import torch

from tests import ninja

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
ENGINE = HERE / "tile_gemm.cu"  # a kernel of the tests' own, on csrc/cuda/tile.cuh
SANITIZE = "-fsanitize=address,undefined -fno-sanitize-recover=undefined"

RULES = """\
cxx = {cxx}
common = -std=c++20 -g1 -fPIC -fvisibility=hidden -ffp-contract=off -Wall -Wextra -Wno-unknown-pragmas -DTFM_SIMT $
  -I{here}/include {sanitize}

rule kernel
  command = $cxx -MMD -MF $out.d $common -O1 -DTFM_KERNEL_HALF $where -x c++ -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = simt kernels $in
rule bind
  command = $cxx -MMD -MF $out.d $common -DTFM_CPU_TENSORS -O0 -isystem {torch}/include -x c++ -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = simt binding $in
rule runtime
  command = $cxx -MMD -MF $out.d $common -O2 -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = simt runtime
rule link
  command = $cxx -shared {sanitize} -Wl,--no-as-needed $in -L{torch}/lib -ltorch -ltorch_cpu -lc10 -o $out
  description = link $out
"""


def sources():
    """The .cu files, by name."""
    return sorted((ROOT / "csrc" / "cuda").glob("*.cu"))


def included(source):
    """Names of the file itself and of csrc/cuda's files that it includes, and they."""
    found, left = set(), [source.name]
    while left:
        name = left.pop()
        if name not in found and (source.parent / name).exists():
            found.add(name)
            left += re.findall(r'^#include "(.*)"', (source.parent / name).read_text(), re.MULTILINE)
    return found


def build(sanitized=False, patched=None):
    """The shared library that registers every csrc/cuda operator for CPU tensors.

    Args:
        sanitized: with AddressSanitizer and UndefinedBehaviorSanitizer.
        patched: (name, stems, files), a name for the build and file name -> text in place of csrc/cuda's own; only
            kernels of files that begin with one of ``stems`` are compiled anew, where they include one of the files.
    """
    cxx = os.environ.get("CXX", "c++")
    key = zlib.crc32(f"{cxx} {torch.__version__} {sanitized}".encode())
    base = ROOT / "build" / f"simt-{key:08x}"
    place = Path(find_spec("torch").submodule_search_locations[0])
    graph = RULES.format(cxx=cxx, here=HERE, torch=place, sanitize=SANITIZE if sanitized else "")
    if patched is None:
        objects = [("simt.o", f"runtime {HERE / 'simt.cpp'}"), _engine(ROOT / "csrc" / "cuda")]
        for source in sources():
            objects += [(f"{source.stem}.bind.o", f"bind {source}"), (f"{source.stem}.kernel.o", f"kernel {source}")]
        return _ninja(base, graph, objects)
    build(sanitized)
    name, stems, files = patched
    folder = base / name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "csrc" / "cuda", folder / "cuda")
    for file, text in files.items():
        (folder / "cuda" / file).write_text(text)
    kept, objects = [base / "simt.o"], [_engine(folder / "cuda")]
    for source in sources():
        kept.append(base / f"{source.stem}.bind.o")
        if source.name.startswith(stems) and included(source) & set(files):
            objects.append((f"{source.stem}.kernel.o", f"kernel {folder / 'cuda' / source.name}"))
        else:
            kept.append(base / f"{source.stem}.kernel.o")
    return _ninja(folder, graph, objects, kept)


def _engine(cuda):
    """(object, how ninja makes it) of ENGINE, with csrc/cuda's headers from a folder."""
    return f"{ENGINE.stem}.kernel.o", f"kernel {ENGINE}\n  where = -I{cuda}"


def _ninja(folder, graph, objects, kept=()):
    graph += "".join(f"build {name}: {how}\n" for name, how in objects)
    graph += f"build simt.so: link {' '.join([name for name, _ in objects] + list(map(str, kept)))}\n"
    return ninja.build(folder, graph, "simt.so")
