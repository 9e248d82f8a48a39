"""These tests run Triton's kernels as they are compiled for a GPU, PTX, on the CPU (tests/ptx/machine)."""

import zlib

import pytest

from tests.compiled import pytest_pycollect_makemodule  # noqa: F401


@pytest.fixture(scope="session")
def machine_of_session():
    from .build import build
    from .driver import Machine

    return Machine(build())


@pytest.fixture
def machine(request, machine_of_session):
    """The machine, with an order of blocks and warps of the test's own."""
    machine_of_session.begin(seed=zlib.crc32(request.node.name.encode()))
    return machine_of_session


@pytest.fixture
def arch():
    """What kernels are compiled for; a test may have its own."""
    return 90


@pytest.fixture
def gpu(machine, arch):
    """The machine; backend="triton" runs on it."""
    from .driver import gpu_of

    with gpu_of(machine, arch):
        yield machine
