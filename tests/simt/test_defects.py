"""Every planted defect of the CUDA kernels is caught, each in a process of its own, since some of them end it."""

import subprocess
import sys

import pytest

from tests.simt.build import ROOT
from tests.simt.planted import DEFECTS, TRIALS


def tried(*words):
    command = [sys.executable, "-m", "tests.simt.planted", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("stem", TRIALS)
def test_the_kernels_as_they_are_pass(stem):
    done = tried("clean", stem)
    assert done.returncode == 0 and done.stdout.split() == ["begins", "passed"], done.stderr


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if defect.quick else pytest.mark.slow) for name, defect in DEFECTS.items()]
)
def test_caught(name):
    done = tried(name)
    # "begins": it was built and loaded, so it is the kernels that fail
    assert done.stdout.split() == ["begins"] and done.returncode != 0, done.stdout + done.stderr


def test_every_defect_can_still_be_planted():
    for defect in DEFECTS.values():
        assert defect.text()
    assert len(DEFECTS) >= 110
