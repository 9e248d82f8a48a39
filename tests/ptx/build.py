"""Compiles the machine that runs PTX (tests/ptx/machine); ninja compiles again only what changed."""

import os
import zlib
from pathlib import Path

from tests import ninja

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


def build():
    """The shared library."""
    cxx = os.environ.get("CXX", "c++")
    folder = ROOT / "build" / f"ptx-{zlib.crc32(cxx.encode()):08x}"
    objects = [f"{source.stem}.o" for source in SOURCES]
    graph = RULES.format(cxx=cxx)
    graph += "".join(f"build {name}: compile {source}\n" for name, source in zip(objects, SOURCES, strict=True))
    graph += f"build ptx.so: link {' '.join(objects)}\n"
    return ninja.build(folder, graph, "ptx.so")
