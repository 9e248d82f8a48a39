"""What every test gets: poisoned memory, and the backends and the device that the command line asks for."""

import pytest
import torch

from tfm_kernels import _measured, tuning
from tfm_kernels._backend import BACKENDS, Choices
from tfm_kernels.testing.judge import COMPOSED

COMPOSED_EVERY = 9  # reference and aten are no kernels of ours: a sample shows that they compute the same function


def pytest_addoption(parser):
    group = parser.getgroup("tfm_kernels")
    group.addoption(
        "--backend",
        default="cpu,aten,reference",
        help=f"comma-separated backends that the contract is held against, of {', '.join(BACKENDS)}",
    )
    group.addoption("--every", type=int, default=1, help="run every n-th test alone; a prime sees all parameters")
    group.addoption("--device", default="cpu", help="the device that the contract's tensors are on")


def pytest_generate_tests(metafunc):
    """``case, judged_backend``: every case for kernels, a sample for compositions; ``any_backend``: all named ones."""
    named = metafunc.config.getoption("--backend").split(",")
    if "judged_backend" in metafunc.fixturenames:
        from tests.cases import CASES  # here, because making the list takes seconds that other tests need not wait for

        pairs = [(case, name) for name in named for case in (CASES[::COMPOSED_EVERY] if name in COMPOSED else CASES)]
        metafunc.parametrize("case, judged_backend", pairs, ids=[f"{name}-{case.id}" for case, name in pairs])
    if "any_backend" in metafunc.fixturenames:
        metafunc.parametrize("any_backend", named)


def pytest_collection_modifyitems(config, items):
    every = config.getoption("--every")
    config.hook.pytest_deselected(items=[item for index, item in enumerate(items) if index % every])
    items[:] = items[::every]


@pytest.fixture(scope="session")
def device(request):
    return torch.device(request.config.getoption("--device"))


@pytest.fixture(autouse=True, scope="session")
def untuned(tmp_path_factory):
    """The choices that tune() kept for whoever runs the tests neither count in them nor are touched."""
    with pytest.MonkeyPatch.context() as patch:
        file = tmp_path_factory.mktemp("cache") / "tuned.json"
        patch.setattr(_measured, "file", lambda: file)
        _measured.ignore()
        yield


@pytest.fixture
def quick_tuning(tmp_path, monkeypatch):
    """tune() measures for a moment, and keeps what it finds in a file of the test's own."""
    monkeypatch.setattr(tuning, "SECONDS", 0.0)
    monkeypatch.setattr(tuning, "LEAST", 0.0)
    monkeypatch.setattr(_measured, "file", lambda: tmp_path / "cache" / "tuned.json")
    yield
    _measured.ignore()
    Choices.forget()


@pytest.fixture(autouse=True)
def poisoned_empty():
    """torch.empty (also from C++) is NaN, or the largest integer: an element that a kernel forgets to write shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    torch.utils.deterministic.fill_uninitialized_memory = fill
