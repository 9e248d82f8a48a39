"""These tests run Triton's kernels in its interpreter, in a process of their own.

TRITON_INTERPRET=1 python -m pytest tests/interpreter

Triton reads the variable when a kernel is defined, so a process has interpreted kernels or compiled ones, never both.
"""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.quick import mark_others_slow

QUICK = {  # tests/ptx runs most of them too, as they are compiled
    "test_attention.py": {
        "test_what_lies_in_padding_changes_no_bit": lambda name: "nan" in name,
        "test_what_lies_beyond_the_last_querys_reach_changes_no_bit": lambda name: name.endswith("nan-torch.bfloat16"),
        "test_wide_heads": lambda name: "bfloat16" in name,
        "test_backward_of_another_backend": ["(True, False)", "(False, True)"],
        "test_who_sees_whom": ["causal-0.0", "all-0.3"],
        "test_many_tiles": [],
        "test_dropout_masks_are_those_of_the_other_backends": ["7-0.1", "130-0.1"],
        "test_views_give_the_bits_of_contiguous_tensors": ["torch.bfloat16"],
    },
    "test_attention_few.py": {
        "test_what_lies_in_padding_changes_no_bit": lambda name: "nan" in name,
        "test_who_sees_whom_in_parts": ["keep", "all"],
        "test_views_give_the_bits_of_contiguous_tensors": ["torch.bfloat16"],
        "test_backward_of_another_backend": ["(True, False)", "(False, True)"],
    },
    "test_attention_memory.py": {
        "test_no_byte_outside": lambda name: "bfloat16" in name or "bhqk" in name,
        "test_no_byte_outside_with_few_queries": lambda name: "bfloat16" in name or "(33" not in name,
    },
}
REASON = None
if find_spec("triton") is None:
    REASON = "triton is not installed: pip install triton"
elif os.environ.get("TRITON_INTERPRET") != "1":
    REASON = "needs a process of its own: TRITON_INTERPRET=1 python -m pytest tests/interpreter"
else:
    from .mended import mend

    mend()


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


def pytest_collection_modifyitems(items):
    mark_others_slow(items, Path(__file__).parent, QUICK)
