"""Attention's backward on the CPU: rows that see nothing, scores beyond float32's digits, wide heads, tiles of keys."""

import pytest
import torch

import tfm_kernels as tfk
from tests.threads import on_threads
from tfm_kernels import Mask
from tfm_kernels.testing import assert_contract
from tfm_kernels.testing.float64 import assert_same_in_float64

SEED = torch.tensor(20261121)


def qkv(queries, keys, width=16, value_width=16, heads=2, key_heads=2, batch=2, dtype=torch.float32):
    make = torch.Generator().manual_seed(3)
    rows = lambda count, length, last: torch.randn(batch, count, length, last, generator=make).to(dtype)
    shapes = {
        "query": (heads, queries, width),
        "key": (key_heads, keys, width),
        "value": (key_heads, keys, value_width),
    }
    return {name: rows(*shape) for name, shape in shapes.items()}


def hides_rows(kind):
    """What hides every one of 7 keys from rows 0 and 1 of 9."""
    keep = (torch.arange(9) > 1).view(1, 1, 9, 1)
    pairs = keep.expand(1, 1, 9, 7)
    return {
        "band": {"mask": Mask.causal("bottom_right")},
        "keep of rows": {"mask": Mask.keep(keep)},
        "keep": {"mask": Mask.keep(pairs)},
        "bias": {"bias": torch.zeros(1, 1, 9, 7).masked_fill(~pairs, -torch.inf)},
        "bias and dropout": {"bias": torch.zeros(1, 1, 9, 7).masked_fill(~pairs, -torch.inf), "dropout_p": 0.3},
    }[kind]


@pytest.mark.parametrize("kind", ["band", "keep of rows", "keep", "bias", "bias and dropout"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["query", "dout", "dlse"])
def test_what_a_row_that_sees_no_key_is_given_changes_no_bit(kind, bad, name):
    found = []
    for filling in (0.0, bad):
        given = qkv(9, 7)
        given |= {"dout": torch.ones(2, 2, 9, 16), "dlse": torch.ones(2, 2, 9)}
        given[name][:, :, :2] = filling
        leaves = [given[n].requires_grad_() for n in ("query", "key", "value")]
        options = hides_rows(kind) | {"seed": SEED, "return_lse": True}
        outs = tfk.ops.attention(*leaves, **options, backend="cpu")
        found.append(torch.autograd.grad(outs, leaves, (given["dout"], given["dlse"])))
    assert all(torch.equal(clean, dirty) and clean.isfinite().all() for clean, dirty in zip(*found, strict=True))
    assert (found[1][0][:, :, :2] == 0).all()


@pytest.mark.parametrize("kind", ["band", "keep of rows", "keep", "bias"])
@pytest.mark.parametrize("name", ["key", "value"])
def test_a_row_that_sees_no_key_has_gradient_0_whatever_others_see(kind, name):
    given = qkv(9, 7)
    given[name][:, :, 0] = torch.nan
    query = given["query"].requires_grad_()
    out = tfk.ops.attention(**given, **hides_rows(kind), backend="cpu")
    (dquery,) = torch.autograd.grad(out.sum(), query)
    assert (out[:, :, :2] == 0).all() and (dquery[:, :, :2] == 0).all() and dquery[:, :, 8].isnan().all()


BANDS = {
    "of no pair": Mask.window(0, None) & Mask.causal("bottom_right"),
    "at the end": Mask.window(3, 0, "bottom_right"),
    "at the front": Mask.causal(),
}


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("queries, keys", [(9, 5), (8, 9), (70, 200)])
def test_keys_that_a_band_leaves_to_no_row(band, queries, keys):
    """All keys, the first ones or the last, be it a single one: their gradients are zeros."""
    assert_contract("attention", qkv(queries, keys) | {"mask": BANDS[band]}, "cpu")


@pytest.mark.parametrize("far", [2.0**22, -(2.0**30)])
@pytest.mark.parametrize("rows", ["all", "first", "last"])
@pytest.mark.parametrize("kind", ["scores", "bias", "dropout", "window"])
def test_scores_beside_which_float32_loses_the_sum(far, rows, kind):
    """Rows of equal scores, of more than a tile, weigh 1 / n, though their lse may be the score and no more."""
    given = qkv(70, 300, batch=1)
    given["key"] = torch.full_like(given["key"], 0.25)
    given["query"] = torch.zeros_like(given["query"])
    seen = {"all": slice(None), "first": slice(0, 1), "last": slice(69, 70)}[rows]
    options, counts = {"scale": far}, torch.full((70, 1), 300)
    if kind == "bias":
        options = {"bias": torch.zeros(1, 2, 70, 1)}
        options["bias"][:, :, seen] = far
    else:
        given["query"][:, :, seen] = 0.25
    if kind == "dropout":
        options |= {"dropout_p": 0.5, "seed": SEED}
    elif kind == "window":
        options["mask"], counts = Mask.window(None, 3), (torch.arange(70) + 4)[:, None]
    value = given["value"].requires_grad_()
    out = tfk.ops.attention(**given, **options, backend="cpu")
    weights = (torch.arange(300) < counts) / counts
    if kind == "dropout":
        weights = weights * tfk.dropout.keep_mask(SEED, 0.5, tfk.dropout.attention_rows(1, 2, 70, "cpu"), 300) / 0.5
    torch.testing.assert_close(out, weights.float() @ value)
    (dvalue,) = torch.autograd.grad(out, value, torch.ones_like(out))
    torch.testing.assert_close(dvalue, (weights.float().mT @ torch.ones_like(out)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("width, value_width", [(130, 200), (260, 8), (24, 1060)])
def test_heads_wider_than_several_blocks(dtype, width, value_width):
    assert_contract("attention", qkv(20, 70, width, value_width, batch=1, dtype=dtype), "cpu")


@pytest.mark.parametrize("kind", ["dropout", "bias"])
def test_heads_without_holes_behind_heads_with_them(kind):
    """A key that few others lie between stays in its head's matrix, hidden; the next head has none such."""
    keep = torch.ones(2, 2, 1, 70, dtype=torch.bool)
    keep[0, :, :, 30:33] = keep[1, 0, :, 40] = False
    options = {"mask": Mask.keep(keep)}
    if kind == "dropout":
        options |= {"dropout_p": 0.2, "seed": SEED}
    else:
        options["bias"] = torch.zeros(2, 1, 40, 70)
    assert_contract("attention", qkv(40, 70) | options, "cpu")


@pytest.mark.parametrize("shape", [(1, 2, 20, 700), (2, 1, 1, 700), (1, 1, 20, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_learned_bias_beside_keys_that_are_left_out(shape, dtype):
    """What is left of 700 keys fills more than one tile, and columns are no longer keys."""
    make = torch.Generator().manual_seed(4)
    keep = torch.rand(2, 1, 1, 700, generator=make) < 0.6
    bias = torch.randn(shape, generator=make).to(dtype)
    assert_contract("attention", qkv(20, 700, dtype=dtype) | {"mask": Mask.keep(keep), "bias": bias}, "cpu")


@pytest.mark.parametrize("key_heads", [2, 1])
@pytest.mark.parametrize("mask", [None, Mask.window(300, None, "bottom_right"), Mask.causal("bottom_right")])
def test_threads_that_share_more_tiles_of_keys_than_they_take_at_once(key_heads, mask):
    """Of few wide heads: then a thread has every n-th tile, of the keys that some row sees."""
    leaves = [t.requires_grad_() for t in qkv(20, 400, 136, 136, 2, key_heads, batch=1, dtype=torch.float64).values()]
    out = tfk.ops.attention(*leaves, mask, backend="cpu")
    alone = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    with on_threads(2):
        shared = torch.autograd.grad(out.sum(), leaves)
    for got, wanted in zip(shared, alone, strict=True):
        assert_same_in_float64(got, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_operators_gradient_of_a_bias_has_its_dtype(dtype):
    q, bias = torch.ones(1, 1, 3, 4, dtype=torch.bfloat16), torch.zeros(1, 1, 3, 3, dtype=dtype)
    given = (bias, None, None, None, None, 3, 3, [-9, 9, -9, 9], 1.0, 0.0, None, True)
    out, lse = torch.ops.tfm_kernels.attention_fwd_cpu(q, q, q, *given)
    *_, dbias = torch.ops.tfm_kernels.attention_bwd_cpu(q, None, q, q, q, out, lse, *given, True)
    assert dbias.dtype == dtype


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("size", [1e4, 1e7])
def test_scores_that_round_to_other_numbers_in_the_backward_have_finite_gradients(queries, size):
    """A row alone is multiplied in another order: then its score may lie far above its lse, and weighs 1 at most."""
    given = qkv(queries, 70, batch=8)
    leaves = [given["query"] * size, given["key"] * size, given["value"]]
    leaves = [t.requires_grad_() for t in leaves]
    out = tfk.ops.attention(*leaves, backend="cpu")
    found = torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert all(t.isfinite().all() for t in found) and found[2].abs().max() <= queries * 1.001


@pytest.mark.parametrize("backend", ["aten", "cpu"])
@pytest.mark.parametrize("queries", [1, 5])
def test_scores_below_the_range_of_float32_are_hidden(backend, queries):
    q, k, v = torch.full((1, 1, queries, 8), -1e25), torch.full((1, 1, 70, 8), 1e25), torch.ones(1, 1, 70, 8)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = tfk.ops.attention(*leaves, backend=backend)
    assert (out == 0).all() and all((t == 0).all() for t in torch.autograd.grad(out.sum(), leaves))
