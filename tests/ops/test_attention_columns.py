"""Keep matrices that leave one run of keys, or several, in each head: what lies outside is not touched."""

import pytest
import torch

import tfm_kernels as tfk
from tests.threads import on_threads
from tfm_kernels.testing import assert_contract

RUNS = {  # (first, end) of the keys that each of four heads sees
    "front": [(0, 9), (0, 17), (0, 40), (0, 70)],
    "back": [(61, 70), (33, 70), (1, 70), (0, 70)],
    "middle": [(5, 6), (20, 50), (3, 69), (64, 66)],
    "none": [(0, 0), (10, 20), (70, 70), (0, 70)],
}


@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("queries", [1, 5, 40])
@pytest.mark.parametrize("runs", RUNS, ids=str)
def test_runs_of_keys_that_differ_from_head_to_head(runs, queries, key_heads):
    make = torch.Generator().manual_seed(3)
    query = torch.randn(2, 4, queries, 24, generator=make)
    key, value = (torch.randn(2, key_heads, 70, 24, generator=make) for _ in range(2))
    keep = torch.zeros(2, 4, 1, 70, dtype=torch.bool)
    for head, (first, end) in enumerate(RUNS[runs]):
        keep[0, head, :, first:end] = True
        keep[1, 3 - head, :, first:end] = True
    given = {"query": query, "key": key, "value": value}
    assert_contract("attention", given | {"mask": tfk.Mask.keep(keep)}, "cpu")
    hidden = torch.zeros(2, 4, 1, 70).masked_fill(~keep, -torch.inf)
    assert_contract("attention", given | {"bias": hidden}, "cpu")
    by_pair = keep.expand(2, 4, queries, 70).clone()
    by_pair[:, :, queries // 2, ::2] = False
    assert_contract("attention", given | {"mask": tfk.Mask.keep(by_pair)}, "cpu")


def hidden_by_bias(queries, keys, kind):
    """A bias that hides some keys from all rows, (rows, keys), and which ones."""
    hidden = torch.zeros(keys, dtype=torch.bool)
    hidden[{"end": slice(keys - 6, keys), "hole": slice(10, 18), "most": slice(3, keys - 9)}[kind]] = True
    bias = torch.zeros(queries, keys).masked_fill(hidden, -torch.inf)
    bias[0, :2] = -torch.inf  # of a single row where there are several
    return bias, hidden if queries > 1 else hidden | (torch.arange(keys) < 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("queries", [1, 4, 40])
@pytest.mark.parametrize("kind", ["end", "hole", "most"])
@pytest.mark.parametrize("with_keep", [False, True])
@pytest.mark.parametrize("width", [33, 64])
def test_what_keys_hidden_by_a_bias_hold_changes_no_bit(dtype, queries, kind, with_keep, width):
    """As keys hidden by keep: NaN in them alters neither the output nor a gradient, in any bit."""
    make = torch.Generator().manual_seed(3)
    query = torch.randn(1, 4, queries, width, generator=make).to(dtype)
    key, value = (torch.randn(1, 2, 256, width, generator=make).to(dtype) for _ in range(2))
    bias, hidden = hidden_by_bias(queries, 256, kind)
    mask = None
    if with_keep:
        mask = tfk.Mask.keep((torch.arange(256) != 100).view(1, 1, 1, 256))
        hidden = hidden.clone()
        hidden[100] = True
    found = []
    for filling in (0.0, torch.nan, torch.inf):
        given = [query.clone(), *(t.masked_fill(hidden[:, None], filling) for t in (key, value))]
        given = [t.requires_grad_() for t in given]
        given_bias = bias.to(dtype if dtype == torch.float64 else torch.float32).requires_grad_()
        out, lse = tfk.ops.attention(*given, mask, bias=given_bias, return_lse=True, backend="cpu")
        with torch.no_grad():
            alone = tfk.ops.attention(*given, mask, bias=given_bias, backend="cpu")
        seed = torch.arange(out.numel(), dtype=torch.float64).sin().view(out.shape).to(dtype)
        found.append([out, lse, alone, *torch.autograd.grad(out, [*given, given_bias], seed)])
    assert all(torch.isfinite(t).all() for t in found[0])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("kind", ["end", "hole", "most"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_contract_of_keys_hidden_by_a_bias(dtype, queries, kind):
    make = torch.Generator().manual_seed(3)
    query = torch.randn(2, 4, queries, 24, generator=make).to(dtype)
    key, value = (torch.randn(2, 2, 70, 24, generator=make).to(dtype) for _ in range(2))
    bias, _ = hidden_by_bias(queries, 70, kind)
    options = {"bias": bias.to(dtype).expand(2, 1, queries, 70), "mask": tfk.Mask.causal(align="bottom_right")}
    assert_contract("attention", {"query": query, "key": key, "value": value, **options}, "cpu")


SHAPES = [(1, 1, 1, 70), (1, 1, 9, 1), (2, 1, 9, 70), (1, 4, 9, 70), (2, 4, 1, 70)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["keep", "bias", "both"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_keep_and_bias_may_lie_apart(shape, kind, dtype):
    """Views of any strides give the bits of contiguous ones, and hide the same keys, which hold NaN."""
    make = torch.Generator().manual_seed(3)
    query = torch.randn(2, 4, 9, 24, generator=make).to(dtype)
    key, value = (torch.randn(2, 2, 70, 24, generator=make).to(dtype) for _ in range(2))
    keep = torch.rand(shape, generator=make) < 0.6
    if shape[3] > 1:
        keep[..., 20:31] = False
        key[:, :, 20:31] = value[:, :, 20:31] = torch.nan
    bias = torch.randn(shape, generator=make).masked_fill(~keep, -torch.inf).to(dtype)
    layouts = {
        "contiguous": lambda t: t,
        "every third": lambda t: t.repeat_interleave(3, 3)[..., ::3],
        "rows apart": lambda t: torch.cat([t, ~t if t.dtype == torch.bool else -t], 3)[..., : t.shape[3]],
        "transposed": lambda t: t.transpose(1, 3).contiguous().transpose(1, 3),
    }
    found = []
    for lay in layouts.values():
        leaves = [t.clone().requires_grad_() for t in (query, key, value)]
        options = {"mask": None if kind == "bias" else tfk.Mask.keep(lay(keep))}
        if kind != "keep":
            leaves.append(lay(bias).requires_grad_())
            options["bias"] = leaves[-1]
        if not found:
            assert_contract("attention", {"query": query, "key": key, "value": value, **options}, "cpu")
        out = tfk.ops.attention(*leaves[:3], **options, backend="cpu")
        found.append((out, *torch.autograd.grad(out, leaves, torch.ones_like(out))))
    assert all(t.isfinite().all() for t in found[0])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("kind", ["plain", "keep", "bias", "bias of rows"])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_threads_that_share_the_keys_of_a_head(kind, key_heads):
    """Of fewer heads than threads the backward parts the keys, unless those of a group's heads differ."""
    make = torch.Generator().manual_seed(3)
    query = torch.randn(1, 4, 40, 16, generator=make)
    key, value = (torch.randn(1, key_heads, 600, 16, generator=make) for _ in range(2))
    given = {"query": query, "key": key, "value": value, "mask": tfk.Mask.window(None, 520)}
    keep = torch.rand(1, 4, 1, 600, generator=make) < torch.tensor([0.3, 0.5, 0.9, 0.6]).view(4, 1, 1)
    if kind == "keep":
        given["mask"] = tfk.Mask.keep(keep)
    elif kind == "bias":
        given["bias"] = torch.zeros(1, 4, 1, 600).masked_fill(~keep, -torch.inf)
    elif kind == "bias of rows":
        given["bias"] = torch.randn(1, 4, 40, 1, generator=make)
    with on_threads(4):
        assert_contract("attention", given, "cpu")


def test_a_bias_of_float64_below_the_range_of_float32_hides_nothing():
    make = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 1, length, 8, generator=make, dtype=torch.float64) for length in (3, 9, 9))
    out = tfk.ops.attention(q, k, v, bias=torch.full((3, 9), -1e300, dtype=torch.float64), backend="cpu")
    torch.testing.assert_close(out, v.mean(2, keepdim=True).expand_as(out))
