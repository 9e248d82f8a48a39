"""The memory of one run: what is alive at once, told without a word of the profiler."""

import subprocess
import sys

import torch

from tfm_kernels.bench import memory


def test_peak_memory_counts_what_is_alive_at_once_and_the_profiler_is_silent():
    def run():
        a = torch.ones(1 << 18)  # 1 MiB
        del a
        b = torch.ones(1 << 19)
        return b + 1

    kept = torch.ones(1 << 22)
    assert 0 <= memory.peak(run) - (4 << 20) < 1024  # a few numbers of torch's own
    del kept
    code = "import torch; from tfm_kernels.bench import memory; print(memory.peak(lambda: torch.empty(256)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1024\n", "")
