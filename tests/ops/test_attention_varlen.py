"""Packed calls on every backend that runs here: each segment is a dense call of its own, in its own corner."""

import math

import pytest
import torch

import tfm_kernels as tfk
from tfm_kernels import Mask
from tfm_kernels.testing import assert_contract

BACKENDS = ["reference", "aten", "cpu"]
SEED = torch.tensor(20261121)
QUERIES, KEYS = (3, 0, 5, 1, 70, 4), (5, 2, 3, 0, 66, 4)  # more, fewer, as many keys as queries, and none of either
HEADS, KEY_HEADS = 4, 2

# mask -> who sees whom, written out: i and j count within a segment, c is Tk - Tq of it
MASKS = {
    "all": (Mask(), lambda i, j, c: j >= 0),
    "causal": (Mask.causal(), lambda i, j, c: j <= i),
    "bottom-right": (Mask.causal("bottom_right"), lambda i, j, c: j <= i + c),
    "window": (Mask.window(2, 1), lambda i, j, c: (i - 2 <= j) & (j <= i + 1)),
    "its bottom-right": (Mask.window(2, 0, "bottom_right"), lambda i, j, c: (i + c - 2 <= j) & (j <= i + c)),
    "both": (Mask.causal() & Mask.window(4, None, "bottom_right"), lambda i, j, c: (j <= i) & (i + c - 4 <= j)),
}


def ends(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])


def packed(queries=QUERIES, keys=KEYS, dtype=torch.float64):
    make = torch.Generator().manual_seed(3)
    new = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=make).to(dtype).requires_grad_()
    q, k, v = new(sum(queries), HEADS, 8), new(sum(keys), KEY_HEADS, 8), new(sum(keys), KEY_HEADS, 6)
    options = {"cu_seqlens_q": ends(queries), "cu_seqlens_k": ends(keys)}
    return (q, k, v), options | {"max_seqlen_q": max(queries) + 2, "max_seqlen_k": max(keys)}


def segments(tensors):
    """The queries, keys and values of every segment, as (T, H, D)."""
    q, k, v = tensors
    return list(zip(q.split(QUERIES), k.split(KEYS), v.split(KEYS), strict=True))


def written_out(q, k, v, sees, scale):
    """(out, lse) of one segment: scale q k^T over the keys that are seen, softmax, times v."""
    k, v = (t.repeat_interleave(HEADS // KEY_HEADS, 1) for t in (k, v))
    i, j = torch.arange(q.shape[0])[:, None], torch.arange(k.shape[0])[None]
    x = torch.einsum("ihd,jhd->hij", q, k) * scale
    x = x.masked_fill(~sees(i, j, k.shape[0] - q.shape[0]), -math.inf)
    lse = x.logsumexp(-1)
    p = (x - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1)).exp()
    return torch.einsum("hij,jhd->ihd", p, v), lse


def assert_same(found, expected, inputs):
    """Values and gradients of two tuples of results, up to the roundings of float64."""
    make, gradients = torch.Generator(), []
    for results in (found, expected):
        # the lse of a row that sees nothing is -inf, whatever its query
        finite = torch.cat([t.masked_fill(t == -math.inf, 0.0).flatten() for t in results])
        dout = torch.randn(finite.shape, dtype=finite.dtype, generator=make.manual_seed(4))
        gradients.append(torch.autograd.grad(finite, inputs, dout))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("scale", [None, 0.7])
def test_is_the_written_out_formula_of_each_segment(backend, mask, scale):
    tensors, options = packed()
    mask, sees = MASKS[mask]
    lse = backend != "aten"  # F.scaled_dot_product_attention returns none
    result = tfk.ops.attention_varlen(*tensors, **options, mask=mask, scale=scale, return_lse=lse, backend=backend)
    found = result if lse else (result,)
    parts = [written_out(*part, sees, 8**-0.5 if scale is None else scale) for part in segments(tensors)]
    expected = torch.cat([out for out, _ in parts]), torch.cat([level for _, level in parts], 1)
    assert_same(found, expected[: len(found)], tensors)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_is_a_dense_call_of_each_segment(backend, mask, p):
    """Dropout's row numbers go by max_seqlen_q: as queries that are padded so far, behind as many other sequences."""
    if p > 0.0 and backend == "aten":
        pytest.skip("F.scaled_dot_product_attention draws dropout by its own rule")
    tensors, options = packed()
    mask, longest = MASKS[mask][0], options["max_seqlen_q"]
    random = {"dropout_p": p, "seed": SEED, "scale": 0.3, "backend": backend}
    found = tfk.ops.attention_varlen(*tensors, **options, mask=mask, **random)
    parts = []
    for b, (q, k, v) in enumerate(segments(tensors)):
        rows, keys = q.shape[0], k.shape[0]
        keep = torch.zeros(longest, keys, dtype=torch.bool)
        keep[:rows] = mask.dense(1, 1, rows, keys, "cpu")[0, 0]
        dense = [t.transpose(0, 1).unsqueeze(0).expand(b + 1, -1, -1, -1) for t in (q, k, v)]
        dense[0] = torch.nn.functional.pad(dense[0], (0, 0, 0, longest - rows))
        parts.append(tfk.ops.attention(*dense, Mask.keep(keep), **random)[b, :, :rows].transpose(0, 1))
    assert_same((found,), (torch.cat(parts),), tensors)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_where_they_need_not_repeat(backend):
    """deterministic=False may change the order of sums, nothing else."""
    tensors, options = packed(dtype=torch.float32)
    inputs = {name: t.detach() for name, t in zip(("query", "key", "value"), tensors, strict=True)}
    inputs |= {"mask": Mask.causal(), "scale": 0.3, "deterministic": False}
    assert_contract("attention_varlen", inputs | options, backend)
    dense = {name: inputs[name].transpose(0, 1).unsqueeze(0) for name in ("query", "key", "value")}
    assert_contract("attention", inputs | dense, backend)
