"""How far a call raises the most memory that a process has held, measured in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

# resource.getrusage() is no measure on Linux: its ru_maxrss begins with what the process that started this one held.
_MEASURED = """
import torch, tfm_kernels as tfk
def held():
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(status["VmHWM"].split()[0]) // 1024
torch.set_num_threads(2)
{before}
first = held()
{call}
print(held() - first)
"""


def growth(before, call):
    """MiB by which the statements ``call`` raise it, ``before`` having run; they know torch and tfk."""
    if not sys.platform.startswith("linux"):
        pytest.skip("reads a process's peak where Linux has it")
    code = _MEASURED.format(before=before, call=call)
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)
