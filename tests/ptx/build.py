"""Compiles the machine that runs PTX (tests/ptx/machine), and csrc/cuda for it; ninja compiles only what changed."""

import os
import re
import sys
import zlib
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch

from tests import ninja
from tests.aot.sass import TOOLS
from tfm_kernels import diagnosis

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((Path(__file__).resolve().parent / "machine").glob("*.cpp"))
KERNELS = sorted((ROOT / "csrc" / "cuda").glob("*.cu"))

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
# csrc/cuda: bindings for CPU tensors; kernels and launchers too where setup.py made none with PTX
CUDA_RULES = """\
nvcc = {nvcc}
torch = -isystem {torch}/include
rule kernels
  command = $nvcc -MMD -MF $out.d -std=c++20 {flags} -DNDEBUG -lineinfo $
    -gencode=arch=compute_80,code=compute_80 -Xcompiler -fPIC,-fvisibility=hidden -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = kernels $in
rule host
  command = $nvcc -MMD -MF $out.d -std=c++20 -x c++ -Xcompiler -fPIC,-fvisibility=hidden,-Wno-psabi -DTFM_CPU_TENSORS $
    -I{here}/include $torch -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = host $in
rule ptx
  command = {tools}/cuobjdump -ptx $in | sed -n '/^[.]version/,/^Fatbin/{{/^Fatbin/!p}}' > $out
  description = PTX of $in
rule join
  command = cat $in > $out
rule link_cuda
  command = $cxx -shared $in -Wl,--no-as-needed -L{torch}/lib -ltorch -ltorch_cpu -lc10 -o $out
  description = link $out
"""


def built_kernels():
    """The objects that setup.py made here, anew where a source has changed; [] where they have no PTX for sm_80."""
    cxx = os.environ.get("CXX", "c++")
    # the folder's name is setup.py's
    key = f"torch-{version('torch')}-{sys.implementation.cache_tag}-{zlib.crc32(cxx.encode()):08x}"
    graph = ROOT / "build" / key / "build.ninja"
    if not graph.exists() or "code=[sm_80,compute_80]" not in graph.read_text():
        return []
    objects = [f"csrc/cuda/{source.name}.nvcc.o" for source in KERNELS]
    ninja.build(graph.parent, graph.read_text(), *objects)
    return [graph.parent / name for name in objects]


def build_cuda():
    """The shared library of csrc/cuda, with cuda.ptx beside it; None where nvcc is not."""
    nvcc = diagnosis.nvcc()
    if nvcc is None:
        return None
    flags = re.search(r'^NVCC_FLAGS = "(.*)"$', (ROOT / "setup.py").read_text(), re.MULTILINE)[1]
    cxx, here = os.environ.get("CXX", "c++"), Path(__file__).resolve().parent
    folder = ROOT / "build" / f"ptx-cuda-{zlib.crc32(f'{cxx} {nvcc} {torch.__version__}'.encode()):08x}"
    graph = RULES.format(cxx=cxx)
    place = find_spec("torch").submodule_search_locations[0]
    graph += CUDA_RULES.format(nvcc=nvcc, flags=flags, here=here, torch=place, tools=TOOLS)
    made = {"runtime.o": f"host {here / 'cuda_runtime.cpp'}"}
    made |= {f"{source.stem}.bind.o": f"host {source}" for source in KERNELS}
    kernels = built_kernels()
    if not kernels:
        kernels = [Path(f"{source.stem}.kernels.o") for source in KERNELS]
        made |= {str(path): f"kernels {source}" for path, source in zip(kernels, KERNELS, strict=True)}
    objects = dict.fromkeys([*made, *map(str, kernels)])
    made |= {f"{source.stem}.ptx": f"ptx {path}" for path, source in zip(kernels, KERNELS, strict=True)}
    made["cuda.ptx"] = f"join {' '.join(name for name in made if name.endswith('.ptx'))}"
    made["cuda.so"] = f"link_cuda {' '.join(objects)}"
    graph += "".join(f"build {name}: {how}\n" for name, how in made.items())
    return ninja.build(folder, graph, "cuda.so", "cuda.ptx")


def build():
    """The machine's shared library."""
    cxx = os.environ.get("CXX", "c++")
    folder = ROOT / "build" / f"ptx-{zlib.crc32(cxx.encode()):08x}"
    objects = [f"{source.stem}.o" for source in SOURCES]
    graph = RULES.format(cxx=cxx)
    graph += "".join(f"build {name}: compile {source}\n" for name, source in zip(objects, SOURCES, strict=True))
    graph += f"build ptx.so: link {' '.join(objects)}\n"
    return ninja.build(folder, graph, "ptx.so")
