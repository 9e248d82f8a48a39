"""Tests that run csrc/cuda without a GPU register its operators for CPU tensors; this lets backend "cuda" take them."""

from contextlib import contextmanager
from importlib import import_module

import pytest

from tfm_kernels._backend import Choices

OPS = ("layer_norm_call", "attention", "ffn")  # the modules of ops whose csrc/cuda kernels run here


def answer_for_cpu_tensors(set_item):
    """Lets SUPPORT of the ops say that backend "cuda" can run on CPU tensors; set_item(mapping, key, value) does it."""
    for stem in OPS:
        module = import_module(f"tfm_kernels.ops.{stem}")
        set_item(module.SUPPORT, "cuda", module.KERNELS["cuda"])
    Choices.forget()


@contextmanager
def cpu_tensors_taken():
    """Inside, they do."""
    with pytest.MonkeyPatch.context() as patch:
        answer_for_cpu_tensors(patch.setitem)
        yield
    Choices.forget()
