"""doctor(): every state of an installation is told with its reason and one command."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tfm_kernels as tfk
from tfm_kernels import _library, diagnosis

ROOT = Path(__file__).resolve().parents[1]


class Extension:
    def __init__(self, **info):
        self.info = {
            "torch": torch.__version__.split("+")[0],
            "compiler": "12.2.0",
            "cpu_capability": "AVX512",
            "bf16_tiles": False,
            "vnni": True,
            "int8_tiles": False,
            "instruction_sets": "DEFAULT AVX2 AVX512",
            **info,
        }

    def build_info(self):
        return self.info


class CudaExtension:
    def build_info(self):
        return {"architectures": "80 90a", "cuda": "13.0", "flags": "-O3 -fmad=false"}


@pytest.fixture
def built(monkeypatch):
    """An installation where all is well, whatever is built here; returns a function that spoils one part."""

    def state(extension=None, missing="", kernels=None, cuda=None, cuda_missing=""):
        monkeypatch.setattr(_library, "cpu_extension", extension)
        monkeypatch.setattr(_library, "cpu_missing", missing)
        monkeypatch.setattr(_library, "cuda_extension", cuda)
        monkeypatch.setattr(_library, "cuda_missing", cuda_missing)
        monkeypatch.setattr(_library, "_missing", kernels or {})

    state(Extension(), kernels={"layer_norm_fwd_cpu": None}, cuda=CudaExtension())
    monkeypatch.setattr(diagnosis, "_best_capability", lambda: None)
    monkeypatch.setattr(diagnosis.metadata, "distributions", lambda name: [])  # nor does pip know of another one
    return state


def finding(part):
    return next(found for found in diagnosis.examine() if found.part == part)


def test_a_whole_installation_has_no_faults(built):
    assert finding("CPU kernels").state == "good"
    assert "No faults." in tfk.doctor()


def test_a_python_only_installation_names_the_reason_and_the_command(built, monkeypatch, tmp_path):
    built(None, missing="the C++ extension was not built; `pip ...` builds it")
    monkeypatch.setattr(diagnosis, "PACKAGE", tmp_path / "tfm_kernels")
    monkeypatch.setattr(diagnosis, "_installed_from", lambda: None)
    found = finding("CPU kernels")
    assert found.state == "fault" and "was not built" in found.text and "builds in a place without torch" in found.text
    assert "pip install --no-build-isolation --force-reinstall --no-deps ." in found.mend
    assert tfk.doctor().endswith(f"1 fault. Run first: {found.mend}")


def test_no_compiler_is_named_as_the_reason(built, monkeypatch):
    built(None, missing="the C++ extension was not built; `pip ...` builds it")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(diagnosis, "PACKAGE", Path("/nowhere/tfm_kernels"))
    assert "No C++ compiler is here" in finding("CPU kernels").text


def test_an_extension_for_another_python_is_recognised(built, monkeypatch, tmp_path):
    built(None, missing="the C++ extension was not built; `pip ...` builds it")
    (tmp_path / "_C.cpython-39-x86_64-linux-gnu.so").touch()
    monkeypatch.setattr(diagnosis, "PACKAGE", tmp_path)
    assert "built for another Python (_C.cpython-39-x86_64-linux-gnu.so)" in finding("CPU kernels").text


def test_an_extension_for_another_torch_is_a_fault_whether_it_loads_or_not(built):
    built(Extension(torch="1.0.0"))
    assert "built for torch 1.0.0" in finding("CPU kernels").text and finding("CPU kernels").state == "fault"
    built(None, missing="the C++ extension does not load with torch 2.13.0 (undefined symbol: x); `pip` builds it")
    assert "undefined symbol: x" in finding("CPU kernels").text and finding("CPU kernels").mend


def test_an_extension_older_than_the_python_part_names_what_it_lacks(built):
    built(Extension(), kernels={"ffn_fwd_cpu": "the C++ extension holds no ffn_fwd", "layer_norm_fwd_cpu": None})
    found = finding("CPU kernels")
    assert found.state == "fault" and "lacks ffn_fwd_cpu" in found.text and "layer_norm" not in found.text


def test_how_a_processor_multiplies_is_told(built):
    assert finding("processor").text.endswith("8-bit products in VNNI")
    built(Extension(int8_tiles=True))
    assert finding("processor").text.endswith("8-bit products in hardware tiles")
    older = Extension()
    del older.info["vnni"], older.info["int8_tiles"]
    built(older)
    assert finding("processor").state == "good"


def test_a_lowered_processor_is_noted(built, monkeypatch):
    monkeypatch.setattr(diagnosis, "_best_capability", lambda: "AVX512")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    found = finding("processor")
    assert found.state == "note" and "torch runs AVX2, this processor has AVX512" in found.text
    assert found.mend == "unset ATEN_CPU_CAPABILITY"


def test_cuda_kernels_are_told(built, monkeypatch):
    found = finding("CUDA kernels")
    assert (found.state, found.text) == ("good", "built for sm_80 sm_90a by CUDA 13.0 with -O3 -fmad=false")
    built(cuda=CudaExtension(), kernels={"ffn_fwd_cuda": "the CUDA extension holds no ffn_fwd"})
    assert finding("CUDA kernels").state == "fault" and "lacks ffn_fwd_cuda" in finding("CUDA kernels").text


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("nvcc", [None, "/usr/bin/nvcc"])
def test_absent_cuda_kernels_are_a_fault_only_where_a_gpu_is(built, monkeypatch, nvcc, gpu):
    built(Extension(), cuda_missing="the CUDA extension was not built; `pip ...` builds it where nvcc is")
    monkeypatch.setattr(diagnosis, "nvcc", lambda: nvcc)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    found = finding("CUDA kernels")
    why = "although nvcc is here" if nvcc else "and nvcc, which it needs, is not here"
    assert found.text == f"the CUDA extension was not built, {why}" + ("" if gpu else "; only a GPU needs it")
    assert found.state == ("fault" if gpu else "note" if nvcc else "good")
    assert bool(found.mend) == gpu and ("toolkit" in found.mend) == (gpu and nvcc is None)


def test_missing_build_tools_come_before_the_build(monkeypatch):
    monkeypatch.setattr(diagnosis, "find_spec", lambda name: None if name == "ninja" else object())
    assert diagnosis.rebuild_command().startswith("pip install ninja && pip install --no-build-isolation")


def test_a_cuda_torch_without_a_gpu_and_a_gpu_without_triton(built, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert finding("GPU").state == "note" and "sees no GPU" in finding("GPU").text
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "H200")
    monkeypatch.setattr(diagnosis, "find_spec", lambda name: None)
    assert finding("GPU").state == "good" and "H200" in finding("GPU").text
    assert finding("Triton").state == "fault" and finding("Triton").mend == "pip install triton"


def test_a_triton_of_another_distribution_has_an_unknown_version(built, monkeypatch):
    def version(name):
        raise diagnosis.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(diagnosis, "find_spec", lambda name: object())
    monkeypatch.setattr(diagnosis.metadata, "version", version)
    assert (finding("Triton").state, finding("Triton").text) == ("good", "triton of an unknown version")


def test_it_works_where_nothing_is_built(tmp_path):
    shutil.copytree(ROOT / "tfm_kernels", tmp_path / "tfm_kernels", ignore=shutil.ignore_patterns("*.so", "*.pyd"))
    # an editable install finds the checkout's extension for any package of this name: leave its finder out
    code = (
        "import runpy, sys\n"
        "sys.meta_path = [finder for finder in sys.meta_path if 'editable' not in str(finder).lower()]\n"
        "sys.argv = ['tfm_kernels', 'doctor']\n"
        "runpy.run_module('tfm_kernels', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "the C++ extension was not built" in done.stdout and "Run first: pip install" in done.stdout
    assert str(tmp_path) in done.stdout and not done.stderr


def test_a_checkout_hides_the_installed_package(built, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tfm_kernels").mkdir()
    (tmp_path / "tfm_kernels" / "_C.so").touch()

    class Installed:
        def locate_file(self, name):
            return tmp_path / name

    class Source:  # what pip leaves beside the source
        def locate_file(self, name):
            return ROOT / name

    monkeypatch.setattr(diagnosis.metadata, "distributions", lambda name: [Source(), Installed()])
    assert "hides" not in tfk.doctor(), "here there are kernels too"
    built(None, missing="the C++ extension was not built; run x")
    said = tfk.doctor()
    assert f"the source in {diagnosis.PACKAGE} hides the installed package in {tmp_path / 'tfm_kernels'}" in said
    for path, folder, way in (
        ([ROOT, "/usr"], ROOT, "cd /"),
        (["/usr", ROOT], "/", "unset PYTHONPATH"),
        ([ROOT, ROOT], ROOT, "unset PYTHONPATH && cd /"),
        ([ROOT, "/usr"], "/", f"move the script out of {ROOT}"),
    ):
        monkeypatch.setattr(sys, "path", [str(each) for each in path])
        monkeypatch.chdir(folder)
        assert tfk.doctor().endswith(f"Run first: {way}")
