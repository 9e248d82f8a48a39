"""Every planted defect of the CUDA kernels is caught, each in a process of its own, since some of them end it."""

import subprocess
import sys

import pytest

from tests.simt import defects, ffn_defects
from tests.simt.build import ROOT

FAMILIES = {module.__name__: module.DEFECTS for module in (defects, ffn_defects)}
NAMED = [(family, name, found[name].quick) for family, found in FAMILIES.items() for name in found]


def tried(family, name):
    command = [sys.executable, "-m", family, name]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_kernels_as_they_are_pass(family):
    done = tried(family, "clean")
    assert done.returncode == 0 and done.stdout.split() == ["begins", "passed"], done.stderr


@pytest.mark.parametrize(
    "family, name", [pytest.param(*named, marks=() if quick else pytest.mark.slow) for *named, quick in NAMED]
)
def test_caught(family, name):
    done = tried(family, name)
    # "begins": it was built and loaded, so it is the kernels that fail
    assert done.stdout.split() == ["begins"] and done.returncode != 0, done.stdout + done.stderr


def test_every_defect_can_still_be_planted():
    for found in FAMILIES.values():
        for defect in found.values():
            assert defect.text()
    assert len(defects.DEFECTS) >= 35 and len(ffn_defects.DEFECTS) >= 30
