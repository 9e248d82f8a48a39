"""No byte outside of a tensor is touched, and offsets beyond 2**31 elements arrive."""

import pytest
import torch

from tests.attention_memory import (
    BIASES,
    FAR,
    SIZES,
    apart,
    assert_no_byte_outside,
    assert_no_byte_outside_of_packed_tensors,
    both_of,
    two_sequences,
)
from tests.fences import fenced, huge
from tfm_kernels.triton import _attention_call


def between_fences(monkeypatch, call):
    """Runs ``call`` where every new tensor ends at a protected page."""
    empty, zeros = torch.empty, torch.zeros
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: fenced(empty(*args, **kwargs)))
    monkeypatch.setattr(torch, "zeros", lambda *args, **kwargs: fenced(zeros(*args, **kwargs)))
    found = call()
    monkeypatch.undo()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("bias_shape", BIASES)
def test_no_byte_outside(bias_shape, sizes, dtype, monkeypatch):
    assert_no_byte_outside("triton", bias_shape, sizes, dtype, lambda call: between_fences(monkeypatch, call))


def test_no_byte_outside_of_packed_tensors(monkeypatch):
    assert_no_byte_outside_of_packed_tensors("triton", lambda call: between_fences(monkeypatch, call))


@pytest.fixture(scope="module")
def space():
    """Room for a tensor of more than 2**31 elements, taken up only where it is written."""
    return huge(FAR + 2**17, torch.float16)


NAMES = ("query", "key", "value", "bias", "keep", "dout", "dq", "dk", "dv", "out")


@pytest.mark.parametrize("name", NAMES)
def test_sequences_far_apart(name, space, monkeypatch):
    """Each argument and result in turn has more than 2**31 elements between its two sequences."""
    given = two_sequences()

    def run():
        return both_of("triton", given)

    expected = run()
    if name in given:
        given[name] = apart(space, given[name])
    else:
        like, place = (
            _attention_call.Call.like,
            {"out": ("fwd", 0), "dq": ("bwd", 0), "dk": ("bwd", 1), "dv": ("bwd", 2)},
        )
        made = []

        def far_like(call, t, width, dtype=None):
            found = like(call, t, width, dtype)
            made.append(call.op)
            here = made.count(call.op) - 1
            return apart(space, found) if (call.op[10:13], here) == place[name] else found

        monkeypatch.setattr(_attention_call.Call, "like", far_like)
    for a, b in zip(run(), expected, strict=True):
        assert torch.equal(a, b)
