"""setup.py: which extensions it makes of what is there, and for which GPUs; its flags, on activations alone."""

import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import setuptools

from tfm_kernels import _library

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def described(monkeypatch):
    """A function that runs setup.py in a world with or without nvcc and GPUs: (what setup() was told, its globals)."""
    which, run = shutil.which, subprocess.run
    monkeypatch.setattr(setuptools, "setup", lambda **words: told.update(words))
    told = {}

    def describe(nvcc="/usr/bin/nvcc", gpus=None, archs=None):
        def answer(command, **options):
            if command[0] != "nvidia-smi":
                return run(command, **options)
            if gpus is None:
                raise FileNotFoundError(command[0])
            return subprocess.CompletedProcess(command, 0, stdout=gpus, stderr="")

        monkeypatch.setattr(shutil, "which", lambda name: nvcc if name.endswith("nvcc") else which(name))
        monkeypatch.setattr(subprocess, "run", answer)
        monkeypatch.delenv("TFM_KERNELS_CUDA_ARCHS", raising=False)
        if archs is not None:
            monkeypatch.setenv("TFM_KERNELS_CUDA_ARCHS", archs)
        told.clear()
        return runpy.run_path(str(ROOT / "setup.py")), told

    return describe


def names(told):
    return [extension.name for extension in told["ext_modules"]]


def test_nvcc_decides_not_a_gpu(described):
    made, told = described()
    assert names(told) == ["tfm_kernels._C", "tfm_kernels._cuda"] and made["ARCHS"] == ["80", "90a"]
    sources = told["ext_modules"][1].sources
    assert "csrc/cuda/layer_norm_fwd.cu" in sources and "csrc/cuda/module.cpp" in sources
    assert not set(sources) & set(told["ext_modules"][0].sources)


@pytest.mark.parametrize("named", [None, "AVX2", "DEFAULT"])
def test_instruction_sets_may_be_left_out(named, described, monkeypatch):
    """isa.h then takes the next best. Other processors have one instruction set."""
    monkeypatch.delenv("TFM_KERNELS_ISAS", raising=False)
    every = set(described()[0]["ISAS"])
    assert every == ({"DEFAULT", "AVX2", "AVX512"} if platform.machine() in ("x86_64", "AMD64") else {"DEFAULT"})
    if named is not None:
        monkeypatch.setenv("TFM_KERNELS_ISAS", named)
    made, _ = described()
    left = {None: {"DEFAULT", "AVX2", "AVX512"}, "AVX2": {"DEFAULT", "AVX2"}, "DEFAULT": {"DEFAULT"}}[named]
    assert set(made["ISAS"]) == left & every
    for isa in every:
        assert (f"-DTFM_WITHOUT_{isa}" in made["CXX_FLAGS"]) == (isa not in left)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="other processors have one instruction set")
def test_no_other_instruction_sets(described, monkeypatch):
    for named in ("avx2", "AVX512,AVX2", "AVX-512"):
        monkeypatch.setenv("TFM_KERNELS_ISAS", named)
        with pytest.raises(SystemExit, match=f"TFM_KERNELS_ISAS must name AVX2, .*got '{named}'"):
            described()


@pytest.mark.parametrize("kind", ["macosx-14.0-arm64", "macosx-10.13-universal2"])
def test_a_mac_takes_openmp_of_torch(kind, described, monkeypatch, tmp_path):
    """`make macos` compiles and links with these words."""
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    monkeypatch.setattr(sysconfig, "get_platform", lambda: kind)
    made, told = described(nvcc=None)
    assert set(made["ISAS"]) == {"DEFAULT"} and names(told) == ["tfm_kernels._C"]
    assert made["OPENMP"] == "-Xclang -fopenmp"
    assert made["LINKED"].split() == ["-shared", "-undefined", "dynamic_lookup", "-Wl,-rpath,{torch}/lib"]
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "omp.h").touch()
    assert described(nvcc=None)[0]["OPENMP"] == f"-Xclang -fopenmp -isystem {tmp_path}/include"
    monkeypatch.setattr(sysconfig, "get_platform", lambda: "linux-x86_64")
    made, _ = described(nvcc=None)
    assert made["OPENMP"] == "-fopenmp" and "-fopenmp" in made["LINKED"].split()


def test_windows_gets_the_python_part(described, monkeypatch, capsys):
    monkeypatch.setattr(sys, "platform", "win32")
    _, told = described(nvcc=None)
    assert names(told) == [] and "on Windows only the Python part is installed" in capsys.readouterr().err


def test_without_nvcc_everything_else_is_built_and_it_is_said(described, capsys):
    _, told = described(nvcc=None, gpus="9.0\n")
    assert names(told) == ["tfm_kernels._C"]
    assert capsys.readouterr().err == "tfm_kernels: nvcc is not here, so the CUDA kernels are left out\n"


@pytest.mark.parametrize(
    "gpus, archs, expected",
    [
        ("9.0\n9.0\n", None, ["90a"]),
        ("8.6\n8.0\n", None, ["80", "86"]),
        ("N/A\n", None, ["80", "90a"]),
        ("9.0\n", "80", ["80"]),
        ("9.0\n", "80;100a", ["80", "100a"]),
    ],
)
def test_architectures(described, gpus, archs, expected):
    made, told = described(gpus=gpus, archs=archs)
    assert made["ARCHS"] == expected and "tfm_kernels._cuda" in names(told)


def test_no_architectures_leave_the_cuda_kernels_out(described, capsys):
    made, told = described(archs="")
    assert names(told) == ["tfm_kernels._C"] and made["ARCHS"] == [] and capsys.readouterr().err == ""


def test_ptx_of_the_first_portable_architecture(described):
    made, _ = described()
    words = made["gencode"](["80", "90a"]).split()
    assert words == ["-gencode=arch=compute_80,code=[sm_80,compute_80]", "-gencode=arch=compute_90a,code=sm_90a"]
    assert made["gencode"](["90a"]) == "-gencode=arch=compute_90a,code=sm_90a"


@pytest.mark.skipif(_library.cuda_extension is None, reason=_library.cuda_missing or "")
def test_what_was_built_says_for_what():
    info = _library.cuda_extension.build_info()
    assert set(info) == {"architectures", "cuda", "flags", "compiler"} and all(info.values())
    if "TFM_KERNELS_CUDA_ARCHS" not in os.environ and shutil.which("nvidia-smi") is None:
        assert info["architectures"] == "80 90a" and "-fmad=false" in info["flags"]


ACTIVATIONS = ("Relu", "Gelu", "GeluTanh", "Silu")


@pytest.mark.parametrize("isa", ["DEFAULT", "AVX2", "AVX512"])
def test_activations_are_computed_by_vectors(isa, described, tmp_path):
    """With setup.py's flags, for every instruction set: one number at a time, a GELU costs more than its products."""
    made, _ = described()
    if isa not in made["ISAS"]:
        pytest.skip(f"{isa} is of another processor")
    compiler = made["CXX"].split()
    about = subprocess.run([*compiler, "--version"], capture_output=True, text=True).stdout
    clang = "clang" in about
    report, said = ("-Rpass=loop-vectorize", "vectorized loop") if clang else ("-fopt-info-vec", "loop vectorized")
    above = 1 if clang else 0  # it names the line of the pragma
    if not clang and "Free Software Foundation" not in about:
        pytest.skip("only gcc's and clang's reports of their loops are read")
    lines = ['#include "activation.h"', "namespace tfm_kernels {"]
    loops = {}
    for name in ACTIVATIONS:
        for what, body in (
            ("value", "h[j] = A::value(h[j]);"),
            ("slope", "float s; h[j] = A::value(h[j], s); d[j] *= s;"),
        ):
            lines += [
                f"void {name}_{what}(float* h, float* d, long n) {{ using A = {name};",
                "#pragma omp simd",
                f"for (long j = 0; j < n; ++j) {{ {body} }} }}",
            ]
            loops[f"{name} {what}"] = len(lines)
    (tmp_path / "loops.cpp").write_text("\n".join([*lines, "}"]))
    found = subprocess.run(
        [*compiler, "-std=c++20", *made["CXX_FLAGS"].split(), *made["OPENMP"].split(), *made["ISAS"][isa].split(),
         f"-DCPU_CAPABILITY={isa}", f"-I{ROOT / 'csrc/cpu'}", report, "-c", "loops.cpp", "-o", "loops.o"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    ).stderr  # fmt: skip
    scalar = [name for name, line in loops.items() if not re.search(rf"loops.cpp:{line - above}:.*{said}", found)]
    assert scalar == []
