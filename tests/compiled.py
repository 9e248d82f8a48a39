"""Tests that compile Triton's kernels need Triton, not interpreting: without, their files are skipped unread."""

import os
from importlib.util import find_spec

import pytest

REASON = None
if find_spec("triton") is None:
    REASON = "triton is not installed: pip install triton"
elif os.environ.get("TRITON_INTERPRET") == "1":
    REASON = "compiles kernels: run it without TRITON_INTERPRET"


class Skipped(pytest.Module):
    """A file that is not even imported."""

    def collect(self):
        pytest.skip(REASON, allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    """A hook, for a conftest.py to import."""
    return Skipped.from_parent(parent, path=module_path) if REASON else None
