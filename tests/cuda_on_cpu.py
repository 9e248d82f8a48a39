"""Tests that run csrc/cuda without a GPU register its operators for CPU tensors; this lets backend "cuda" take them."""

from contextlib import contextmanager
from importlib import import_module

import pytest

from tfm_kernels._backend import Choices

# modules of ops whose csrc/cuda kernels run here -> what they cannot, device aside
OPS = {"layer_norm_call": "_gpu_support", "attention": "_gpu_cannot", "ffn": "_gpu_support"}


def answer_for_cpu_tensors(set_item):
    """Lets SUPPORT of the ops say that backend "cuda" can run on CPU tensors; set_item(mapping, key, value) does it."""
    for stem, reason in OPS.items():
        module = import_module(f"tfm_kernels.ops.{stem}")
        set_item(module.SUPPORT, "cuda", getattr(module, reason))
    Choices.forget()


@contextmanager
def cpu_tensors_taken():
    """Inside, they do."""
    with pytest.MonkeyPatch.context() as patch:
        answer_for_cpu_tensors(patch.setitem)
        yield
    Choices.forget()
