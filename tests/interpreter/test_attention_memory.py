"""No byte outside of a tensor is touched, and offsets beyond 2**31 elements arrive."""

import pytest
import torch

from tfm_kernels.ops.attention import _backward, _forward
from tfm_kernels.triton import _attention_call

from ..fences import fenced, huge

SEED = torch.tensor(77)
FAR = 2**31 + 4096  # elements between two sequences
ANYWHERE = [-(1 << 40), 1 << 40, -(1 << 40), 1 << 40]


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def both(backend, tensors, bias, keep, lengths, ends, longest, window, p, seed, dout, dlse):
    """(out, lse, dq, dk, dv, dbias)."""
    rest = (bias, keep, lengths, *ends, *longest, window, 0.3, p, seed, True)
    out, lse = _forward[backend](*tensors, *rest)
    return out, lse, *_backward[backend](dout, dlse, *tensors, out, lse, *rest, bias is not None)


def close(found, expected, dtype):
    """To some roundings of the largest number: sums have other orders. What is right is judged in test_attention.py."""
    for a, b in zip(found, expected, strict=True):
        size = max(1.0, float(b.abs().max())) if b.numel() else 1.0
        torch.testing.assert_close(a, b, rtol=0, atol=64 * torch.finfo(dtype).eps * size)


def between_fences(monkeypatch, call):
    """Runs ``call`` where every new tensor ends at a protected page."""
    empty, zeros = torch.empty, torch.zeros
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: fenced(empty(*args, **kwargs)))
    monkeypatch.setattr(torch, "zeros", lambda *args, **kwargs: fenced(zeros(*args, **kwargs)))
    found = call()
    monkeypatch.undo()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (33, 66, 24, 8), (65, 17, 7, 40)], ids=str)
@pytest.mark.parametrize("bias_shape", ["bhqk", "11qk", "1h1k"])
def test_no_byte_outside(bias_shape, sizes, dtype, monkeypatch):
    """Every argument and every result ends at a protected page."""
    queries, keys, width, value_width = sizes
    shapes = (2, 2, queries, width), (2, 1, keys, width), (2, 1, keys, value_width)
    tensors = [fenced(randn(*shape, dtype=dtype, seed=seed)) for seed, shape in enumerate(shapes)]
    axes = {"b": 2, "h": 2, "q": queries, "k": keys, "1": 1}
    bias = fenced(randn(*(axes[axis] for axis in bias_shape), dtype=dtype, seed=4))
    keep = fenced(torch.rand(2, 1, queries, keys, generator=torch.Generator().manual_seed(5)) < 0.8)
    lengths = fenced(torch.tensor([keys, keys // 2], dtype=torch.int32))
    dout = fenced(randn(2, 2, queries, value_width, dtype=dtype, seed=6))
    dlse = fenced(torch.zeros(2, 2, queries))
    options = ((None, None), (queries, keys), [-50, 3, *ANYWHERE[2:]], 0.3, fenced(SEED), dout, dlse)
    expected = both("cpu", tensors, bias, keep, lengths, *options)
    found = between_fences(monkeypatch, lambda: both("triton", tensors, bias, keep, lengths, *options))
    close(found, expected, dtype)


def test_no_byte_outside_of_packed_tensors(monkeypatch):
    ends = fenced(torch.tensor([0, 3, 3, 70], dtype=torch.int32)), fenced(torch.tensor([0, 33, 40, 42]))
    shapes = (70, 2, 16), (42, 1, 16), (42, 1, 9)
    tensors = [fenced(randn(*shape, seed=seed)) for seed, shape in enumerate(shapes)]
    dout = fenced(randn(70, 2, 9, seed=3))
    options = (None, None, None, ends, (67, 33), ANYWHERE, 0.0, None, dout, None)
    expected = both("cpu", tensors, *options)
    close(between_fences(monkeypatch, lambda: both("triton", tensors, *options)), expected, torch.float32)


@pytest.fixture(scope="module")
def space():
    """Room for a tensor of more than 2**31 elements, taken up only where it is written."""
    return huge(FAR + 2**17, torch.float16)


def apart(space, t):
    """``t``, two sequences, laid so that they are FAR elements from one another."""
    far = space.view(t.dtype) if t.element_size() == 2 else space.view(torch.uint8).view(t.dtype)
    strides = (FAR, *t[0].contiguous().stride())
    return far.as_strided(t.shape, strides).copy_(t)


NAMES = ("query", "key", "value", "bias", "keep", "dout", "dq", "dk", "dv", "out")


@pytest.mark.parametrize("name", NAMES)
def test_sequences_far_apart(name, space, monkeypatch):
    """Each argument and result in turn has more than 2**31 elements between its two sequences."""
    given = {
        "query": randn(2, 2, 9, 16, dtype=torch.float16), "key": randn(2, 2, 20, 16, dtype=torch.float16, seed=1),
        "value": randn(2, 2, 20, 16, dtype=torch.float16, seed=2),
        "dout": randn(2, 2, 9, 16, dtype=torch.float16, seed=3),
        "bias": randn(2, 2, 9, 20, dtype=torch.float16, seed=4),
        "keep": torch.rand(2, 1, 9, 20, generator=torch.Generator().manual_seed(5)) < 0.8,
    }  # fmt: skip

    def run():
        tensors = [given[which] for which in ("query", "key", "value")]
        options = ((None, None), (9, 20), ANYWHERE, 0.3, SEED, given["dout"], None)
        return [t.clone() for t in both("triton", tensors, given["bias"], given["keep"], None, *options)]

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
