"""These tests run GPU kernels as they are compiled, PTX of Triton and of nvcc, on the CPU (tests/ptx/machine)."""

import zlib
from pathlib import Path

import pytest

from tests.compiled import pytest_pycollect_makemodule  # noqa: F401
from tests.cuda_on_cpu import cpu_tensors_taken

WHO_SEES_WHOM = {  # in every run; a kernel of Triton's takes seconds to compile
    *(f"cuda-{mask}-{p}" for mask in ("causal", "lengths", "window", "keep", "all") for p in (0.0, 0.3)),
    "triton-causal-0.0", "triton-window-0.3", "triton-keep-0.0",
}  # fmt: skip
SLOW = {  # not in every run: their kernels are those of others, or like them
    "test_wide_heads": {f"triton-{widths}-torch.float32" for widths in ((96, 96), (200, 200))},
    "test_many_tiles": {"triton-torch.float32"},
    "test_views_give_the_bits_of_contiguous_tensors": {"triton-torch.float16"},
    "test_dropout_masks_are_those_of_the_other_backends": {f"triton-64-{p}" for p in (2.0**-33, 0.1, 0.5, 0.9999, 1.0)},
}


def pytest_collection_modifyitems(items):
    """Marks parameters of tests that other backends share with these slow."""
    of: dict[str, list] = {}
    for item in items:
        if item.path == Path(__file__).with_name("test_attention.py"):
            of.setdefault(item.originalname, []).append(item)
    every = {item.callspec.id for item in of.get("test_who_sees_whom", ())}
    for name, slow in {**SLOW, "test_who_sees_whom": every - WHO_SEES_WHOM}.items():
        found = {item.callspec.id: item for item in of.get(name, ())}
        for item in (found[each] for each in slow & set(found)):
            item.add_marker(pytest.mark.slow)
        lost = (slow | (WHO_SEES_WHOM if every and name == "test_who_sees_whom" else set())) - set(found)
        if lost and len(found) > len(slow):  # whoever asks for a parameter alone collects no other
            raise pytest.UsageError(f"{name} has no parameters {lost}")


@pytest.fixture(scope="session")
def machine_of_session():
    from .build import build
    from .driver import Machine

    return Machine(build())


@pytest.fixture(scope="session")
def cuda_of_session(machine_of_session):
    from .build import build_cuda
    from .cuda import Cuda

    path = build_cuda()
    return path and Cuda(path, machine_of_session)


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


@pytest.fixture
def cuda(machine, cuda_of_session):
    """csrc/cuda; backend="cuda" runs on it."""
    if cuda_of_session is None:
        pytest.skip("nvcc is not here")
    cuda_of_session.begin(multiprocessors=1 + machine.seed % 4)
    with cpu_tensors_taken():
        yield cuda_of_session


@pytest.fixture(params=["triton", "cuda"])
def backend(request):
    """Each backend whose kernels the machine runs."""
    request.getfixturevalue("gpu" if request.param == "triton" else "cuda")
    return request.param
