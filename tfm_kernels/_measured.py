"""The table of measured choices: what tune() found fastest on this machine, in a file of the user's cache folder.

    {"format": 1, "settings": {<machine and versions>: {<op and bucket>: {"backend": ..., "seconds": {...}}}}}

Only tune() writes it. The first choice of a process reads it; a file that cannot be read is left as it is and counts as
empty, with one warning.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ._version import __version__

FORMAT = 1
Table = dict[str, dict[str, dict[str, Any]]]  # setting -> op and bucket -> {"backend", "seconds"}

_table: Table | None = None  # None until a choice asks for it


def file() -> Path:
    """Where the table is kept; OSError where the user has no home folder."""
    try:
        return Path.home() / ".cache" / "tfm_kernels" / "tuned.json"
    except RuntimeError as error:
        raise OSError(str(error)) from error


def known() -> bool:
    """Whether anything was measured, on whatever machine."""
    return bool(_loaded())


def choice(device: str, key: str) -> str | None:
    """The backend that was measured fastest for calls of this bucket, here and with these versions; or None.

    Args:
        device: type of the call's device, such as "cpu".
        key: op and bucket, as ``keep`` got it.
    """
    found = choices(device).get(key)
    return None if found is None else found["backend"]


def setting(device: str) -> str:
    """What a measurement is valid for: the device, its threads and the versions."""
    return _setting(device, torch.get_num_threads() if device == "cpu" else 0)


def choices(device: str) -> Mapping[str, Mapping[str, Any]]:
    """Everything that is known for this setting: op and bucket -> {"backend", "seconds"}."""
    return _loaded().get(setting(device), {})


def keep(device: str, found: Mapping[str, Mapping[str, Any]]) -> None:
    """Adds measurements to the table; they count at once, also where the file cannot be written.

    Raises:
        OSError: the file cannot be written, or what is there is no such table and would be lost.
    """
    new = {key: dict(entry) for key, entry in found.items()}
    _loaded().setdefault(setting(device), {}).update(new)
    path = file()
    table = _read(path)  # another process may have written since
    table.setdefault(setting(device), {}).update(new)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, written = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "w") as text:
            json.dump({"format": FORMAT, "settings": table}, text, indent=1)
        os.replace(written, path)
    except OSError:
        Path(written).unlink(missing_ok=True)
        raise


def forget() -> bool:
    """Deletes the table; returns whether there was one.

    Raises:
        OSError: the file cannot be deleted.
    """
    ignore()
    found = file().exists()
    file().unlink(missing_ok=True)
    return found


def ignore() -> None:
    """This process goes without what was measured before: for benchmarks and tests of the choice that ships."""
    global _table
    _table = {}


def bucket(dtype: torch.dtype, **what: Any) -> str:
    """Calls that one measurement stands for, in words: "float32 rows=4096 features=384 training".

    Args:
        dtype: of the call.
        **what: a number is told as name=number, True as its name; None and False are left out.
    """
    words = [str(dtype).removeprefix("torch.")]
    for name, value in what.items():
        if value is True:
            words.append(name)
        elif value is not None and value is not False:
            words.append(f"{name}={value}")
    return " ".join(words)


def rounded(count: int) -> int | None:
    """The power of two nearest to ``count`` by ratio, 0 for 0; None where it is no number yet (a symbolic size)."""
    if not isinstance(count, int):
        return None
    if count <= 0:
        return 0
    low = 1 << (count.bit_length() - 1)
    return low if count * count < 2 * low * low else 2 * low


def _loaded() -> Table:
    global _table
    if _table is None:
        try:
            _table = _read(file())
        except OSError as error:
            warnings.warn(f"tfm_kernels: automatic choice goes without what tune() measured: {error}", stacklevel=2)
            _table = {}
    return _table


def _read(path: Path) -> Table:
    try:
        table = json.loads(path.read_text())
        if table["format"] != FORMAT:
            raise ValueError(f"format {table['format']}")
        for entries in table["settings"].values():
            for entry in entries.values():
                if not (isinstance(entry["backend"], str) and isinstance(entry["seconds"], dict)):
                    raise ValueError("an entry without a backend")
        return table["settings"]
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise OSError(
            f"{path} is not a table that this version wrote; `python -m tfm_kernels tune --forget` deletes it"
        ) from error


@functools.lru_cache
def _setting(device: str, threads: int) -> str:
    versions = f"torch {torch.__version__}, tfm_kernels {__version__}"
    if device == "cpu":
        return f"{processor()}, {torch.backends.cpu.get_cpu_capability()}, {threads} threads, {versions}"
    gpus = range(torch.cuda.device_count() if device == "cuda" else 0)
    name = " and ".join(dict.fromkeys(map(torch.cuda.get_device_name, gpus))) or device
    return f"{name}, CUDA {torch.version.cuda}, {versions}"


def processor() -> str:
    """The processor's name, as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
