"""These tests run csrc/cuda's kernels and bindings on CPU tensors: compiled by the host compiler, threads as fibers."""

import zlib

import pytest

from tests.cuda_on_cpu import cpu_tensors_taken

from .build import build
from .library import Simt


@pytest.fixture(scope="session")
def library():
    return Simt(build())


@pytest.fixture(autouse=True)
def simt(request, library):
    """Inside, backend="cuda" runs on CPU tensors, under a schedule of the test's own."""
    seed = zlib.crc32(request.node.name.encode())
    library.configure(seed, multiprocessors=1 + seed % 4, resident=1 + seed % 3)
    with cpu_tensors_taken():
        yield library
