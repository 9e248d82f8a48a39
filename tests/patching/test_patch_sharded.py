"""Patched decoders of transformers under DDP and FSDP2, in two processes on the CPU with gloo (sharded.py)."""

import subprocess
import sys

import pytest

from tests.patching.models import transformers
from tests.patching.sharded import FAMILIES, UNITS
from tests.training.test_distributed import ROOT, free_port


# two processes take most of a minute
@pytest.mark.parametrize("family", [f if f == "llama" else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES])
def test_two_processes_have_the_losses_of_one(family):
    """Patched before and after the model is given to them, and given back while they have it."""
    transformers()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    command = [*torchrun, "--master-port", str(free_port()), "-m", "tests.patching.sharded", family]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("right") == 2 * (1 + len(UNITS)), done.stdout
