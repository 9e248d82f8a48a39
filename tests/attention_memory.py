"""Calls of attention's GPU kernels between protected pages, and with sequences far apart; for each backend's tests."""

import torch

from tests.fences import fenced
from tfm_kernels.ops.attention import _backward, _forward

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


SIZES = [(1, 1, 1, 1), (33, 66, 24, 8), (65, 17, 7, 40)]
BIASES = ["bhqk", "11qk", "1h1k"]


def assert_no_byte_outside(backend, bias_shape, sizes, dtype, around=lambda call: call()):
    """Every argument ends at a protected page; ``around`` runs a call so that every result does, too."""
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
    found = around(lambda: both(backend, tensors, bias, keep, lengths, *options))
    close(found, expected, dtype)


def assert_no_byte_outside_of_packed_tensors(backend, around=lambda call: call()):
    ends = fenced(torch.tensor([0, 3, 3, 70], dtype=torch.int32)), fenced(torch.tensor([0, 33, 40, 42]))
    shapes = (70, 2, 16), (42, 1, 16), (42, 1, 9)
    tensors = [fenced(randn(*shape, seed=seed)) for seed, shape in enumerate(shapes)]
    dout = fenced(randn(70, 2, 9, seed=3))
    options = (None, None, None, ends, (67, 33), ANYWHERE, 0.0, None, dout, None)
    expected = both("cpu", tensors, *options)
    close(around(lambda: both(backend, tensors, *options)), expected, torch.float32)


def apart(space, t, step=FAR):
    """``t``, two sequences, laid so that they are ``step`` elements from one another."""
    far = space.view(t.dtype) if t.element_size() == 2 else space.view(torch.uint8).view(t.dtype)
    strides = (step, *t[0].contiguous().stride())
    return far.as_strided(t.shape, strides).copy_(t)


def two_sequences():
    """Arguments by name."""
    return {
        "query": randn(2, 2, 9, 16, dtype=torch.float16), "key": randn(2, 2, 20, 16, dtype=torch.float16, seed=1),
        "value": randn(2, 2, 20, 16, dtype=torch.float16, seed=2),
        "dout": randn(2, 2, 9, 16, dtype=torch.float16, seed=3),
        "bias": randn(2, 2, 9, 20, dtype=torch.float16, seed=4),
        "keep": torch.rand(2, 1, 9, 20, generator=torch.Generator().manual_seed(5)) < 0.8,
    }  # fmt: skip


def both_of(backend, given):
    """What both directions give for these arguments; dlse is 0 where none is given."""
    tensors = [given[which] for which in ("query", "key", "value")]
    options = ((None, None), (9, 20), ANYWHERE, 0.3, SEED, given["dout"], given.get("dlse"))
    return [t.clone() for t in both(backend, tensors, given["bias"], given["keep"], None, *options)]
