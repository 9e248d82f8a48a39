"""doctor(): what is built here, for which machine, what is missing and why, and the command that mends it."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlparse

import torch

from . import _library, _measured

PACKAGE = Path(__file__).resolve().parent
BUILD_TOOLS = ("setuptools", "ninja", "pybind11")  # what --no-build-isolation leaves to the environment


@dataclass(frozen=True)
class Finding:
    """One part of the installation.

    Attributes:
        part: its name, "CPU kernels".
        state: "good", "note" (works, but worth knowing) or "fault" (something that should be here is not).
        text: what was found, one sentence or two.
        mend: the command that mends it, or "".
    """

    part: str
    state: str
    text: str
    mend: str = ""


def doctor() -> str:
    """Says what was built, for which torch and processor, what is missing and why, and the command that mends it.

    Returns:
        A few lines of text, the command to run first at the end. Nothing is changed, and no device is touched beyond
        asking torch for its name.

    Example:
        >>> print(doctor())
        tfm_kernels ...
          good  CPU kernels  built for torch ...
    """
    findings = examine()
    lines = [_title()]
    for finding in findings:
        lines.append(f"  {finding.state:6}{finding.part:13}{finding.text}")
        if finding.mend:
            lines.append(f"{'':21}mend: {finding.mend}")
    faults = [finding for finding in findings if finding.state == "fault"]
    if faults:
        lines.append(f"{len(faults)} fault{'s' * (len(faults) > 1)}. Run first: {faults[0].mend}")
    else:
        lines.append("No faults.")
    return "\n".join(lines)


def examine() -> list[Finding]:
    """All findings, in the order they are told."""
    return [_cpu_kernels(), _cpu_capability(), _threads(), _cuda_kernels(), _gpu(), _triton(), _tuned()]


def _title() -> str:
    try:
        version = metadata.version("tfm_kernels")
    except metadata.PackageNotFoundError:
        version = "(not installed by pip)"
    return (
        f"tfm_kernels {version} in {PACKAGE}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{platform.system()} {platform.machine()}"
    )


def _cpu_kernels() -> Finding:
    extension = _library.cpu_extension
    if extension is None:
        reason, hidden = _library.cpu_missing, _hidden_by_source()
        if "not built" in reason and hidden is not None:
            text = f"the source in {PACKAGE} hides the installed package in {hidden}"
            return Finding("CPU kernels", "fault", text, _way_past_the_source())
        return Finding("CPU kernels", "fault", _why_not_built(reason), rebuild_command())
    info = extension.build_info()
    text = (
        f"built for torch {info['torch']} with compiler {info['compiler']}, instruction sets {info['instruction_sets']}"
    )
    if info["torch"] != torch.__version__.split("+")[0]:
        text += f", but torch {torch.__version__} runs"
        return Finding("CPU kernels", "fault", text, rebuild_command())
    absent = sorted(name for name, reason in _library.kernels().items() if name.endswith("_cpu") and reason)
    if absent:
        text += f", but it is older than the Python part and lacks {', '.join(absent)}"
        return Finding("CPU kernels", "fault", text, rebuild_command())
    return Finding("CPU kernels", "good", text)


def _why_not_built(reason: str) -> str:
    """The library's own reason without its command, and what this machine adds to it."""
    text = reason.split(";")[0] + "; every operation runs on PyTorch's own kernels instead"
    strangers = [path.name for path in _extensions(PACKAGE)]
    if "not built" in reason and strangers:
        text = f"built for another Python ({', '.join(strangers)}); every operation runs on PyTorch's own kernels"
    elif "not built" in reason and not _compiler():
        text += ". No C++ compiler is here: install one that knows C++20 first (Debian, Ubuntu: apt-get install g++)"
    elif "not built" in reason:
        text += ". A plain `pip install .` builds in a place without torch and leaves the kernels out"
    return text


def _hidden_by_source() -> Path | None:
    """Where pip has put a package with kernels, before which Python finds a checkout in the working directory."""
    found = (Path(str(each.locate_file("tfm_kernels"))) for each in metadata.distributions(name="tfm_kernels"))
    return next((place for place in found if place.resolve() != PACKAGE and _extensions(place)), None)


def _way_past_the_source() -> str:
    """What takes a checkout off the path that Python searches, whose first entry is where it was started."""
    found = [place for place, entry in enumerate(sys.path) if Path(entry or ".").resolve() == PACKAGE.parent]
    ways = ["unset PYTHONPATH"] if any(found) else []
    if 0 in found and PACKAGE.parent == Path.cwd().resolve():
        ways.append("cd /")
    return " && ".join(ways) or f"move the script out of {PACKAGE.parent}"


def _extensions(package: Path) -> list[Path]:
    """The C++ extensions in a package's folder, for whichever Python."""
    return sorted(path for path in package.glob("_C*") if path.suffix in (".so", ".pyd"))


def _cuda_kernels() -> Finding:
    """Their build needs nvcc and no GPU; only a GPU needs them."""
    extension, wanted = _library.cuda_extension, torch.cuda.is_available()
    if extension is None:
        text = _library.cuda_missing.split(";")[0]
        if "not built" in text:
            text += ", and nvcc, which it needs, is not here" if nvcc() is None else ", although nvcc is here"
        if not wanted:
            return Finding("CUDA kernels", "note" if nvcc() else "good", f"{text}; only a GPU needs it")
        before = "" if nvcc() else "   (after CUDA's toolkit is installed)"
        return Finding("CUDA kernels", "fault", text, rebuild_command() + before)
    info = extension.build_info()
    archs = " ".join(f"sm_{arch}" for arch in info["architectures"].split())
    text = f"built for {archs} by CUDA {info['cuda']} with {info['flags']}"
    absent = sorted(name for name, reason in _library.kernels().items() if name.endswith("_cuda") and reason)
    if absent:
        text += f", but older than the Python part: it lacks {', '.join(absent)}"
        return Finding("CUDA kernels", "fault", text, rebuild_command())
    return Finding("CUDA kernels", "good", text)


def nvcc() -> str | None:
    """Where CUDA's compiler is, found as setup.py finds it."""
    return shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


def _compiler() -> str | None:
    return next((path for path in map(shutil.which, ("c++", "g++", "clang++")) if path), None)


def rebuild_command() -> str:
    """The one command that builds the kernels of this very installation anew."""
    absent = [tool for tool in BUILD_TOOLS if find_spec(tool) is None]
    before = f"pip install {' '.join(absent)} && " if absent else ""
    if (PACKAGE.parent / "setup.py").exists():
        return f"{before}pip install --no-build-isolation -e {PACKAGE.parent}"
    source = _installed_from()
    place = str(source) if source else "."
    where = "" if source else "   (in the folder of tfm_kernels' source)"
    return f"{before}pip install --no-build-isolation --force-reinstall --no-deps {place}{where}"


def _installed_from() -> Path | None:
    """The folder that pip installed from, where it is still there."""
    try:
        record = metadata.distribution("tfm_kernels").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return None
    url = urlparse(json.loads(record)["url"]) if record else None
    folder = Path(unquote(url.path)) if url and url.scheme == "file" else None
    return folder if folder and (folder / "setup.py").exists() else None


def _cpu_capability() -> Finding:
    running, best = torch.backends.cpu.get_cpu_capability(), _best_capability()
    tiles = ""
    if _library.cpu_extension is not None:
        info = _library.cpu_extension.build_info()
        # an older extension does not say
        integers = "hardware tiles" if info.get("int8_tiles") else "VNNI" if info.get("vnni") else "16-bit pairs"
        floats = "hardware tiles" if _library.bf16_tiles else "float32 tiles"
        tiles = f"; bfloat16 products in {floats}, 8-bit products in {integers}"
    if best is not None and best != running:
        text = f"lowered: torch runs {running}, this processor has {best}{tiles}"
        return Finding("processor", "note", text, "unset ATEN_CPU_CAPABILITY")
    return Finding("processor", "good", f"torch runs {running}{tiles}")


def _best_capability() -> str | None:
    """The instruction set that torch takes unless told otherwise; None where torch cannot be asked."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return None
    for name, ask in (("AVX512", "_is_avx512_supported"), ("AVX2", "_is_avx2_supported")):
        if getattr(torch.cpu, ask, lambda: False)():
            return name
    return None


def _threads() -> Finding:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    threads = torch.get_num_threads()
    text = f"{threads} of {allowed} logical processor{'s' * (allowed > 1)}"
    if threads > allowed:
        return Finding("threads", "note", f"{text}: more threads than processors slow each other down")
    return Finding("threads", "good", text)


def _gpu() -> Finding:
    built = torch.version.cuda
    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
        return Finding("GPU", "good", f"{names}, CUDA {built}")
    if built is None:
        return Finding("GPU", "good", "none wanted: this torch is a CPU build")
    text = f"torch is built for CUDA {built}, but sees no GPU; `nvidia-smi` shows whether the driver does"
    return Finding("GPU", "note", text)


def _triton() -> Finding:
    if find_spec("triton") is not None:
        try:
            version = metadata.version("triton")
        except metadata.PackageNotFoundError:  # a distribution of another name brought it, such as pytorch-triton-rocm
            version = "of an unknown version"
        return Finding("Triton", "good", f"triton {version}")
    if torch.cuda.is_available():
        return Finding("Triton", "fault", "not installed, and the GPU kernels need it", "pip install triton")
    return Finding("Triton", "good", "not installed; only a GPU needs it")


def _tuned() -> Finding:
    counts = {device: len(_measured.choices(device)) for device in ("cpu", "cuda")}
    found = ", ".join(f"{count} buckets of calls on {device}" for device, count in counts.items() if count)
    if found:
        return Finding("tuned", "good", f"{found}, in {_measured.file()}")
    return Finding("tuned", "good", "nothing measured by tune(): automatic choice goes by what was measured elsewhere")
