"""The GPU and the tools beside it, as they are found; nothing is set."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from tfm_kernels import _library
from tfm_kernels.bench import record

PROTOCOL = 1  # raised whenever what is judged or timed, or how, changes
SOURCES = (("tfm_kernels", "*.py"), ("csrc", "*.*"), ("bench", "*.py"), ("tests", "case*.py"))
NO_TRITON = "needs triton, which is not installed: pip install triton"
_CLOCKS = ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw")


def refusal() -> str | None:
    """None where kernels can be compiled and run, else one sentence why not."""
    if not torch.cuda.is_available():
        return f"needs a CUDA device, and torch {torch.__version__} sees none"
    if package("triton") is None:
        return NO_TRITON
    return None


def read() -> dict[str, Any]:
    """Everything that a result depends on, or {"refusal": one sentence}; makes a CUDA context."""
    why = refusal()
    if why is not None:
        return {"refusal": why}
    properties = torch.cuda.get_device_properties(0)
    return {
        "protocol": PROTOCOL,
        "device": slug(properties.name),
        "gpu": properties.name,
        "capability": [properties.major, properties.minor],
        "multiprocessors": properties.multi_processor_count,
        "memory": properties.total_memory,
        "l2": properties.L2_cache_size,
        "driver": query("driver_version")["driver_version"],
        "cuda": torch.version.cuda,
        "nvcc": nvcc(),
        "torch": torch.__version__,
        "triton": package("triton"),
        "calls": _library.cpu_extension is not None,  # without it, no call is repeated as it was planned
        "python": platform.python_version(),
        "commit": record.git("rev-parse", "--short=12", "HEAD"),
        "sources": record.sources(SOURCES),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def slug(name: str) -> str:
    """The folder of a device's results: "NVIDIA H200" -> "h200"."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower().removeprefix("nvidia")).strip("-") or "gpu"


def package(name: str) -> str | None:
    """A package's version, None where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def clocks() -> dict[str, str]:
    """Clocks, temperature and power at this moment."""
    return query(*_CLOCKS)


def query(*names: str) -> dict[str, str]:
    """What nvidia-smi says of the first GPU; "unknown" where it says nothing."""
    words = output("nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader")
    values = words.splitlines()[0].split(", ") if words else []
    return dict(zip(names, values, strict=True)) if len(values) == len(names) else dict.fromkeys(names, "unknown")


def nvcc() -> str:
    """The release of nvcc."""
    found = re.search(r"release ([\d.]+)", output("nvcc", "--version"))
    return found[1] if found else "not found"


def output(*command: str, seconds: float = 20) -> str:
    """What a program prints; "" where there is none or it fails."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
