"""These tests run csrc/cuda's kernels and bindings on CPU tensors: compiled by the host compiler, threads as fibers."""

import pytest

from tfm_kernels._backend import Choices

from .build import build
from .library import Simt, answer_for_cpu_tensors


@pytest.fixture(scope="session")
def library():
    return Simt(build())


@pytest.fixture(autouse=True)
def simt(library, monkeypatch):
    """Inside, backend="cuda" runs on CPU tensors; a test that starts no kernel by it says so."""
    answer_for_cpu_tensors(monkeypatch.setitem)
    library.configure()
    yield library
    monkeypatch.undo()
    Choices.forget()
