"""Compiles the machine that runs PTX (tests/ptx/machine), and csrc/cuda for it; ninja compiles only what changed."""

import os
import re
import zlib
from importlib.util import find_spec
from pathlib import Path

import torch

from tests import ninja
from tfm_kernels import diagnosis

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((Path(__file__).resolve().parent / "machine").glob("*.cpp"))

RULES = """\
cxx = {cxx}
rule compile
  command = $cxx -MMD -MF $out.d -std=c++20 -O2 -g1 -march=native -ffp-contract=off -fPIC -fvisibility=hidden $
    -Wall -Wextra -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = machine $in
rule link
  command = $cxx -shared $in -o $out
  description = link $out
"""
# csrc/cuda: kernels and launchers as in setup.py but that there is PTX alone, readable; bindings for CPU tensors
CUDA_RULES = """\
nvcc = {nvcc}
torch = -isystem {torch}/include
rule kernels
  command = $nvcc -MMD -MF $out.d -std=c++20 {flags} -DNDEBUG -lineinfo --no-compress $
    -gencode=arch=compute_80,code=compute_80 -Xcompiler -fPIC,-fvisibility=hidden -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = PTX of $in
rule host
  command = $nvcc -MMD -MF $out.d -std=c++20 -x c++ -Xcompiler -fPIC,-fvisibility=hidden,-Wno-psabi -DTFM_CPU_TENSORS $
    -I{here}/include $torch -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = host $in
rule link_cuda
  command = $cxx -shared $in -Wl,--no-as-needed -L{torch}/lib -ltorch -ltorch_cpu -lc10 -o $out
  description = link $out
"""


def build_cuda():
    """The shared library of csrc/cuda; None where nvcc is not."""
    nvcc = diagnosis.nvcc()
    if nvcc is None:
        return None
    flags = re.search(r'^NVCC_FLAGS = "(.*)"$', (ROOT / "setup.py").read_text(), re.MULTILINE)[1]
    cxx, here = os.environ.get("CXX", "c++"), Path(__file__).resolve().parent
    folder = ROOT / "build" / f"ptx-cuda-{zlib.crc32(f'{cxx} {nvcc} {torch.__version__}'.encode()):08x}"
    graph = RULES.format(cxx=cxx)
    place = find_spec("torch").submodule_search_locations[0]
    graph += CUDA_RULES.format(nvcc=nvcc, flags=flags, here=here, torch=place)
    objects = {"runtime.o": f"host {here / 'cuda_runtime.cpp'}"}
    for source in sorted((ROOT / "csrc" / "cuda").glob("*.cu")):
        objects[f"{source.stem}.kernels.o"] = f"kernels {source}"
        objects[f"{source.stem}.bind.o"] = f"host {source}"
    graph += "".join(f"build {name}: {how}\n" for name, how in objects.items())
    graph += f"build cuda.so: link_cuda {' '.join(objects)}\n"
    return ninja.build(folder, graph, "cuda.so")


def build():
    """The machine's shared library."""
    cxx = os.environ.get("CXX", "c++")
    folder = ROOT / "build" / f"ptx-{zlib.crc32(cxx.encode()):08x}"
    objects = [f"{source.stem}.o" for source in SOURCES]
    graph = RULES.format(cxx=cxx)
    graph += "".join(f"build {name}: compile {source}\n" for name, source in zip(objects, SOURCES, strict=True))
    graph += f"build ptx.so: link {' '.join(objects)}\n"
    return ninja.build(folder, graph, "ptx.so")
