"""Attention at the edges of its arguments: values that are not there, scales, sums of biases, shapes that broadcast."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.func import functionalize, vmap

import tfm_kernels as tfk
from tfm_kernels import Mask
from tfm_kernels.testing import assert_contract
from tfm_kernels.testing.float64 import assert_same_in_float64

BACKENDS = ["reference", "cpu"]
ops = tfk.ops


def randn(*shape, seed=0, **options):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), **options)


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_of_one_query_and_one_head_hold_the_rows_asked_for(backend):
    q, k = randn(2, 4, 1, 8), randn(2, 4, 7, 8, seed=1)
    _, lse = ops.attention(q, k, k, return_lse=True, backend=backend)
    weights = ops.attention_weights(q, k, lse)
    assert weights.shape == (2, 4, 1, 7)
    for rows in ([], [0], [0, 0, 0]):
        assert torch.equal(ops.attention_weights(q, k, lse, rows=rows), weights[:, :, rows])
    one = ops.attention_weights(q[:, :1], k[:, :1], lse[:, :1], bias=torch.zeros(1, 1, 1, 7), heads=[0, 0])
    torch.testing.assert_close(one, weights[:, [0, 0]])
    assert torch.equal(ops.attention_weights(q, k, lse, heads=3, rows=0), weights[:, 3:])
    with pytest.raises(TypeError, match="heads must be an int, a tensor or a sequence of ints or None, got bool"):
        ops.attention_weights(q, k, lse, heads=True)


@pytest.mark.parametrize("backend", [*BACKENDS, "aten"])
@pytest.mark.parametrize("enable_gqa", [False, True])
def test_scaled_dot_product_attention_takes_values_that_broadcast(backend, enable_gqa):
    """As torch's own does, each of the three by itself."""
    q, heads = randn(2, 4, 5, 8), 2 if enable_gqa else 4
    k, v = randn(2, heads, 6, 8, seed=1), randn(2, heads, 6, 3, seed=2)
    cases = [(q, k, v[:1]), (q[:1], k[:1], v), (q[:1], k, v), (q, k[:1], v)]
    if not enable_gqa:
        cases += [(q, k, v[:, :1]), (q, k[:, :1], v)]
    for given in cases:
        ours = ops.scaled_dot_product_attention(*given, enable_gqa=enable_gqa, backend=backend)
        torch.testing.assert_close(ours, F.scaled_dot_product_attention(*given, enable_gqa=enable_gqa))


def no_values():
    """What holds no values, as (tensors) -> tensors, within which ``call`` runs."""

    def fake(call, *tensors):
        with FakeTensorMode() as mode:
            return call(*map(mode.from_tensor, tensors))

    return {
        "fake": fake,
        "meta": lambda call, *tensors: call(*(t.to("meta") for t in tensors)),
        "functionalized": lambda call, *tensors: functionalize(call)(*tensors),
        "vmapped": lambda call, *tensors: vmap(call)(*(t[None] for t in tensors))[0],
    }


@pytest.mark.parametrize("kind", no_values())
@pytest.mark.parametrize("packed", [False, True])
def test_lengths_need_not_have_values(kind, packed):
    if packed:
        call = lambda q, ends: ops.attention_varlen(q, q, q, ends, ends, 4, 4)
        given = randn(6, 2, 8), torch.tensor([0, 2, 6])
    else:
        call = lambda q, lengths: ops.attention(q, q, q, Mask.lengths(lengths))
        given = randn(2, 4, 10, 8), torch.tensor([3, 10])
    out, expected = no_values()[kind](call, *given), call(*given)
    assert out.shape == expected.shape and out.dtype == expected.dtype
    if kind not in ("fake", "meta"):
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_biases_of_float64_scores_are_summed_in_float64(backend):
    q, k, v = (randn(1, 2, 5, 8, seed=seed, dtype=torch.float64) for seed in range(3))
    a, b = randn(5, 5, seed=3), randn(5, 5, seed=4)
    exact = ((q @ k.mT) * 8**-0.5 + a.double() + b.double()).softmax(-1) @ v
    assert_same_in_float64(ops.attention(q, k, v, a, bias=b, backend=backend), exact)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", [0.0, 1e-50, -1e-50, 1e-46, 1e-40, -1e-40])
def test_scales_that_float32_does_not_hold_are_0(backend, scale):
    q, k, v = (randn(1, 1, 5, 8, seed=seed) for seed in range(3))
    means = v.cumsum(2) / torch.arange(1, 6)[:, None]
    torch.testing.assert_close(ops.attention(q, k, v, Mask.causal(), scale=scale, backend=backend), means)


def test_scales_whose_scores_are_infinite_are_refused():
    q = randn(1, 1, 5, 8)
    for _ in range(2):
        for scale in (2.0**127, -(2.0**127), 1e39):
            with pytest.raises(ValueError, match=r"attention: scale must be below 2\*\*127, as scores are float32"):
                ops.attention(q, q, q, scale=scale)
        ops.attention(q, q, q, scale=2.0**126)
    assert ops.attention(q.double(), q.double(), q.double(), scale=1e39).isfinite().all()


@pytest.mark.parametrize("backend", [*BACKENDS, "aten"])
def test_a_bias_beside_a_mask_of_the_least_number_learns(backend):
    """In rows where it hides every key too: they weigh all alike, as in the formula."""
    q, k, v = (randn(2, 2, 5, 8, seed=seed, dtype=torch.float64) for seed in range(3))
    bias, dout = randn(2, 2, 1, 5, seed=3, dtype=torch.float64).requires_grad_(), randn(2, 2, 5, 8, seed=4).double()
    mask = torch.zeros(2, 1, 5, 5, dtype=torch.float64)
    mask[0, 0, :2] = mask[0, 0, 2:, 0] = torch.finfo(mask.dtype).min
    (wanted,) = torch.autograd.grad(((q @ k.mT * 8**-0.5 + bias + mask).softmax(-1) @ v), bias, dout)
    (got,) = torch.autograd.grad(ops.attention(q, k, v, mask, bias=bias, backend=backend), bias, dout)
    assert_same_in_float64(got, wanted)


@pytest.mark.parametrize("backend", [*BACKENDS, "aten"])
def test_a_window_of_any_length(backend):
    q = randn(1, 1, 3, 8)
    out = ops.attention(q, q, q, Mask.window(2**70, 0), backend=backend)
    assert torch.equal(out, ops.attention(q, q, q, Mask.causal(), backend=backend))


@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
@pytest.mark.parametrize("queries, keys", [(1, 1), (9, 9), (9, 70), (70, 9), (130, 200)])
def test_a_window_of_one_key(align, queries, keys):
    """Every row sees one key at most, whose weight is 1: the output is its value, bit for bit."""
    q, k, v = (randn(2, 3, length, 16, seed=i) for i, length in enumerate((queries, keys, keys)))
    given = {"query": q, "key": k, "value": v, "mask": Mask.window(0, 0, align)}
    assert_contract("attention", given, "cpu")
    seen = torch.arange(queries) + (keys - queries if align == "bottom_right" else 0)
    there = (seen >= 0) & (seen < keys)
    out = tfk.ops.attention(**given, backend="cpu")
    assert torch.equal(out[:, :, there], v[:, :, seen[there]]) and (out[:, :, ~there] == 0).all()


@pytest.mark.parametrize("left, right", [(0, None), (1, None), (2, None), (None, 0), (None, 62), (None, 63)])
@pytest.mark.parametrize("queries", [65, 66, 67, 130])
def test_a_window_that_is_open_to_a_side(left, right, queries):
    """Also where it begins or ends with the second key of a block, or with the last but one."""
    q, k, v = (randn(1, 2, length, 16, seed=i) for i, length in enumerate((queries, 208, 208)))
    assert_contract("attention", {"query": q, "key": k, "value": v, "mask": Mask.window(left, right)}, "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("queries", [1, 5, 70])
@pytest.mark.parametrize("keys", [520, 576, 1100])
def test_more_keys_than_a_tile_meets_at_once(dtype, queries, keys):
    """512 of them; what is left may be less than a block."""
    q, k, v = (randn(1, 2, length, 16, seed=i).to(dtype) for i, length in enumerate((queries, keys, keys)))
    assert_contract("attention", {"query": q, "key": k, "value": v}, "cpu")
