"""These tests run Triton's kernels in its interpreter, in a process of their own.

TRITON_INTERPRET=1 python -m pytest tests/interpreter

Triton reads the variable when a kernel is defined, so a process has interpreted kernels or compiled ones, never both.
"""

import os
from importlib.util import find_spec

import pytest

REASON = None
if find_spec("triton") is None:
    REASON = "triton is not installed: pip install triton"
elif os.environ.get("TRITON_INTERPRET") != "1":
    REASON = "needs a process of its own: TRITON_INTERPRET=1 python -m pytest tests/interpreter"
else:
    from .mended import mend
    from .quickened import quicken

    mend()
    quicken()


class Skipped(pytest.Module):
    """A file that is not even imported."""

    def collect(self):
        pytest.skip(REASON, allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    return Skipped.from_parent(parent, path=module_path) if REASON else None


@pytest.fixture(scope="session", autouse=True)
def interpreted():
    import triton

    assert triton.knobs.runtime.interpret, "triton was imported before it could be told to interpret"
