"""Attention: every line of its semantics, on every backend that runs here. Numbers are judged in test_contract.py."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradgradcheck
from torch.nn.attention import SDPBackend, sdpa_kernel

import tfm_kernels as tfk
from tests.attention_semantics import assert_segments_are_alone
from tests.peak import growth
from tests.threads import on_threads
from tfm_kernels import Mask

BACKENDS = ["reference", "aten", "cpu"]
WITH_LSE = ["reference", "cpu"]  # aten cannot: F.scaled_dot_product_attention returns no lse
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SEED = torch.tensor(20261121)
NAN = float("nan")


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(batch=2, heads=4, key_heads=4, queries=5, keys=7, width=8, value_width=8, dtype=torch.float32):
    shapes = (batch, heads, queries, width), (batch, key_heads, keys, width), (batch, key_heads, keys, value_width)
    return [randn(*shape, dtype=dtype, seed=i).requires_grad_() for i, shape in enumerate(shapes)]


def run(backend, q, k, v, mask=None, **options):
    """out and the gradients of q, k, v for a fixed random dout."""
    out = tfk.ops.attention(q, k, v, mask, backend=backend, **options)
    out = out[0] if isinstance(out, tuple) else out
    return out, *torch.autograd.grad(out, (q, k, v), randn(*out.shape, dtype=out.dtype, seed=9))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_meaning(backend, dtype):
    q, k, v = qkv(dtype=dtype)
    out = tfk.ops.attention(q, k, v, backend=backend)
    expected = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    assert out.dtype == dtype and (out.transpose(1, 2).is_contiguous() or backend == "aten")
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", [None, 0.0, 0.3, -1.0])
def test_scale(backend, scale):
    q, k, v = qkv(dtype=torch.float64)
    factor = 1 / math.sqrt(8) if scale is None else scale
    expected = (q @ k.transpose(-1, -2) * factor).softmax(-1) @ v
    torch.testing.assert_close(tfk.ops.attention(q, k, v, scale=scale, backend=backend), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_that_sees_no_key_is_zero_with_zero_gradients(backend, dtype):
    q, k, v = qkv(dtype=dtype)
    keep = torch.ones(5, 7, dtype=torch.bool)
    keep[2] = False
    out, dq, dk, dv = run(backend, q, k, v, Mask.keep(keep))
    assert (out[:, :, 2] == 0).all() and (dq[:, :, 2] == 0).all()
    assert all(t.isfinite().all() for t in (out, dq, dk, dv))
    lengths = Mask.lengths(torch.tensor([0, 7]))
    out, dq, dk, dv = run(backend, q, k, v, lengths)
    assert all((t[0] == 0).all() and t.isfinite().all() for t in (out, dq, dk, dv))


@pytest.mark.parametrize("backend", WITH_LSE)
def test_lse(backend):
    q, k, v = qkv(dtype=torch.float64)
    keep = torch.ones(5, 7, dtype=torch.bool)
    keep[2] = False
    _, lse = tfk.ops.attention(q, k, v, Mask.keep(keep), return_lse=True, backend=backend)
    expected = (q @ k.transpose(-1, -2) / math.sqrt(8)).masked_fill(~keep, -torch.inf).logsumexp(-1)
    torch.testing.assert_close(lse, expected)
    assert (lse[:, :, 2] == -torch.inf).all()
    kept = lse[:, :, [0, 1, 3, 4]].sum()
    want = expected[:, :, [0, 1, 3, 4]].sum()
    for a, b in zip(torch.autograd.grad(kept, (q, k)), torch.autograd.grad(want, (q, k)), strict=True):
        torch.testing.assert_close(a, b)
    low = [t.bfloat16() for t in (q, k, v)]
    assert tfk.ops.attention(*low, return_lse=True, backend=backend)[1].dtype == torch.float32


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_least_finite_bias_gives_the_mean_and_minus_infinity_hides(backend, dtype):
    q, k, v = (t.detach() for t in qkv(dtype=dtype))
    bias = torch.full((5, 7), torch.finfo(torch.float32).min)
    if backend != "aten":  # PyTorch adds the bias in the dtype of query
        out = tfk.ops.attention(q, k, v, bias=bias, backend=backend)
        mean = v.double().mean(2, keepdim=True).expand_as(out)
        torch.testing.assert_close(out.double(), mean, rtol=0, atol=2 * torch.finfo(dtype).eps)
    hidden = torch.zeros(5, 7)
    hidden[:, 3:] = -torch.inf
    out = tfk.ops.attention(q, k, v, bias=hidden.to(dtype), backend=backend)
    torch.testing.assert_close(
        out, tfk.ops.attention(q, k[:, :, :3], v[:, :, :3], backend=backend), rtol=0, atol=2 * torch.finfo(dtype).eps
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("again", [False, True])
def test_a_mask_and_a_bias_are_summed_as_scores_are(backend, dtype, again):
    """In float32 at least, for both that are narrower; a call like one before takes a shorter way."""
    q, k = torch.zeros(1, 2, 3, 8, dtype=dtype), torch.zeros(1, 2, 2, 8, dtype=dtype)
    v = torch.zeros(1, 2, 2, 8, dtype=dtype)
    v[:, :, 1] = 1.0  # the output is the weight of key 1

    def weight(mask, bias):
        for _ in range(1 + again):
            out = tfk.ops.attention(q, k, v, mask, bias=bias, backend=backend)
        return out

    narrow = torch.finfo(dtype).bits == 16
    large = torch.full((3, 2), 2 / torch.finfo(dtype).eps if narrow else 2.0, dtype=dtype)  # + 1 needs 17 bits
    bias = torch.tensor([0.0, 1.0], dtype=dtype).expand(1, 2, 3, 2).clone().requires_grad_()
    out, tolerance = weight(large, bias), {"rtol": 0, "atol": 2 * torch.finfo(dtype).eps}
    torch.testing.assert_close(out, torch.full_like(out, 1 / (1 + math.exp(-1))), **tolerance)
    (dbias,) = torch.autograd.grad(out[..., 0].sum(), bias)
    slope = math.exp(-1) / (1 + math.exp(-1)) ** 2
    torch.testing.assert_close(dbias, torch.tensor([-slope, slope], dtype=dtype).expand_as(bias), **tolerance)

    least = torch.full((3, 2), torch.finfo(dtype).min, dtype=dtype)
    assert torch.equal(weight(least, least[None, None]), torch.full_like(q, 0.5))  # finite: the mean
    hidden = torch.tensor([-math.inf, 0.0], dtype=dtype).expand(3, 2)
    assert torch.equal(weight(hidden, -least[None, None]), torch.ones_like(q))
    assert torch.equal(weight(least, hidden[None, None]), torch.ones_like(q))


HIDDEN_TAIL = {
    "lengths": lambda: Mask.lengths(torch.tensor([4, 4])),
    "keep per key": lambda: Mask.keep((torch.arange(7) < 4).expand(2, 1, 1, 7)),
    "keep per pair": lambda: Mask.keep((torch.arange(7) < 4).expand(5, 7)),
    "hide": lambda: Mask.hide((torch.arange(7) >= 4).expand(2, 4, 5, 7)),
    "window": lambda: Mask.window(None, 0) & Mask.keep((torch.arange(7) < 4).expand(1, 1, 1, 7)),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", HIDDEN_TAIL)
@pytest.mark.parametrize("bad", [NAN, float("inf")])
def test_what_lies_in_padding_changes_no_bit(backend, kind, bad):
    clean, dirty = qkv(), qkv()
    with torch.no_grad():
        for t in dirty[1:]:
            t[:, :, 4:] = bad
    mask = HIDDEN_TAIL[kind]()
    for a, b in zip(run(backend, *clean, mask), run(backend, *dirty, mask), strict=True):
        assert torch.equal(a, b)


# PyTorch's kernel gives 0 for a query row of NaN where the keys do not fill a vector register
@pytest.mark.parametrize("backend, keys", [("reference", 7), ("cpu", 7), ("aten", 16)])
def test_nan_where_it_is_seen(backend, keys):
    q, k, v = qkv(keys=keys)
    with torch.no_grad():
        q[0, 1, 2] = NAN
    out, dq, dk, dv = run(backend, q, k, v)
    assert out[0, 1, 2].isnan().all() and dq[0, 1, 2].isnan().all()
    rest = torch.ones_like(out, dtype=torch.bool)
    rest[0, 1, 2] = False
    assert out[rest].isfinite().all()
    assert dk[0, 1].isnan().any() and dk[1].isfinite().all()
    q, k, v = qkv(keys=keys)
    with torch.no_grad():
        v[0, 0, 3, 1] = NAN
    out = tfk.ops.attention(q, k, v, backend=backend)
    assert out[0, 0, :, 1].isnan().all() and out[1].isfinite().all()


@pytest.mark.parametrize("backend", ["reference", "cpu"])  # PyTorch's gives every key of the head a gradient of NaN
@pytest.mark.parametrize("bad", [NAN, float("inf")])
def test_a_query_row_of_nan_reaches_the_keys_that_it_sees_alone(backend, bad):
    clean, dirty = qkv(queries=7), qkv(queries=7)
    with torch.no_grad():
        dirty[0][0, 1, 2] = bad
    found, expected = run(backend, *dirty, Mask.causal()), run(backend, *clean, Mask.causal())
    for a, b, reached in zip(found, expected, (2, 2, slice(0, 3), slice(0, 3)), strict=True):
        rest = torch.ones_like(a, dtype=torch.bool)
        rest[0, 1, reached] = False
        assert a[0, 1, reached].isnan().all() and torch.equal(a[rest], b[rest])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("queries, keys", [(5, 5), (3, 7), (7, 3)])
def test_causal_is_top_left_unless_told_otherwise(backend, queries, keys):
    q, k, v = qkv(queries=queries, keys=keys, dtype=torch.float64)
    i, j = torch.arange(queries)[:, None], torch.arange(keys)[None]
    top = tfk.ops.attention(q, k, v, Mask.causal(), backend=backend)
    torch.testing.assert_close(top, tfk.ops.attention(q, k, v, Mask.keep(j <= i), backend="reference"))
    bottom = tfk.ops.attention(q, k, v, Mask.causal("bottom_right"), backend=backend)
    keep = Mask.keep(j <= i + keys - queries)
    torch.testing.assert_close(bottom, tfk.ops.attention(q, k, v, keep, backend="reference"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("batch, queries, keys", [(0, 5, 7), (2, 0, 7), (2, 5, 0), (0, 0, 0)])
def test_nothing_in_nothing_out(backend, batch, queries, keys):
    q, k, v = qkv(batch=batch, queries=queries, keys=keys)
    out, *gradients = run(backend, q, k, v)
    assert out.shape == (batch, 4, queries, 8) and (out == 0).all()
    assert [g.shape for g in gradients] == [q.shape, k.shape, v.shape] and all((g == 0).all() for g in gradients)
    bias = torch.full((1, 1, 1, 1), -torch.inf, requires_grad=True)  # here too a gradient arrives, and it is 0
    out = tfk.ops.attention(q, k, v, bias=bias, backend=backend)
    assert (out == 0).all() and torch.equal(torch.autograd.grad(out.sum(), bias)[0], torch.zeros(1, 1, 1, 1))


SHAPES = [(2, 4, 5, 7), (2, 1, 5, 7), (1, 4, 5, 7), (2, 1, 1, 7), (1, 1, 5, 1), (5, 7)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_heads_of_queries_give_keys_gradients_of_zero(backend):
    q = torch.randn(2, 0, 5, 8, requires_grad=True)
    k, v = (torch.randn(2, 3, 700, 8, requires_grad=True) for _ in range(2))
    torch.full((2, 3, 700, 8), NAN)  # what the allocator may hand out again
    out = tfk.ops.attention(q, k, v, backend=backend)
    dk, dv = torch.autograd.grad(out.sum(), (k, v))
    assert out.shape == (2, 0, 5, 8) and (dk == 0).all() and (dv == 0).all()
    assert tfk.ops.attention_weights(q, k, torch.zeros(2, 0, 5)).shape == (2, 0, 5, 700)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_bias_broadcasts_and_its_gradient_is_reduced(backend, shape):
    q, k, v = (t.detach() for t in qkv(dtype=torch.float64))
    bias = randn(*shape, dtype=torch.float64, seed=4).requires_grad_()
    out = tfk.ops.attention(q, k, v, bias=bias, backend=backend)
    expected = (q @ k.transpose(-1, -2) / math.sqrt(8) + bias).softmax(-1) @ v
    torch.testing.assert_close(out, expected)
    dout = randn(*out.shape, dtype=torch.float64, seed=5)
    (a,), (b,) = torch.autograd.grad(out, bias, dout), torch.autograd.grad(expected, bias, dout)
    assert a.shape == bias.shape
    torch.testing.assert_close(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_raw_masks_follow_pytorch(backend):
    q, k, v = qkv(dtype=torch.float64)
    keep = torch.rand(2, 1, 5, 7, generator=torch.Generator().manual_seed(1)) < 0.7
    expected = F.scaled_dot_product_attention(q, k, v, keep)
    torch.testing.assert_close(tfk.ops.attention(q, k, v, keep, backend=backend), expected)
    added = randn(5, 7, dtype=torch.float64)
    expected = F.scaled_dot_product_attention(q, k, v, added)
    torch.testing.assert_close(tfk.ops.attention(q, k, v, added, backend=backend), expected)
    with pytest.raises(ValueError, match=r"write \(B, 1, Tq, Tk\) with .unsqueeze\(1\)"):
        tfk.ops.attention(q, k, v, torch.ones(2, 5, 7, dtype=torch.bool), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_everything_at_once(backend):
    """Causal x window x lengths x keep x bias x GQA x Dv != D x Tq != Tk, and dropout where the backend has it."""
    q, k, v = qkv(heads=6, key_heads=2, queries=9, keys=11, width=5, value_width=3, dtype=torch.float64)
    keep = torch.rand(2, 6, 9, 11, generator=torch.Generator().manual_seed(1)) < 0.8
    mask = Mask.causal("bottom_right") & Mask.window(6, None) & Mask.lengths(torch.tensor([8, 11])) & Mask.keep(keep)
    options = {"bias": randn(1, 6, 1, 11, dtype=torch.float64, seed=7), "scale": 0.4}
    if backend != "aten":
        options |= {"dropout_p": 0.3, "seed": SEED}
    for a, b in zip(run(backend, q, k, v, mask, **options), run("reference", q, k, v, mask, **options), strict=True):
        torch.testing.assert_close(a, b)


LAYOUTS = {
    "(B, T, H, D) storage": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "slices of one projection": lambda t: torch.cat([t, t, t], -1)[..., t.shape[-1] : 2 * t.shape[-1]],
    "every second feature": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "features outermost": lambda t: t.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0),
    "misaligned": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layout_changes_no_bit(layout, dtype):
    plain = qkv(queries=70, keys=65, dtype=dtype)
    laid = [LAYOUTS[layout](t.detach()).requires_grad_() for t in plain]
    for a, b in zip(run("cpu", *plain, Mask.causal()), run("cpu", *laid, Mask.causal()), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("backend", WITH_LSE)
def test_packed_and_padded_runs_agree(backend):
    """Same tokens, same dropout, forward and backward, each segment against its row of the padded batch."""
    lengths, longest = [3, 0, 7, 5], 7
    q, k, v = qkv(batch=4, queries=longest, keys=longest, key_heads=2, dtype=torch.float64)
    keep = torch.arange(longest) < torch.tensor(lengths)[:, None]
    mask = Mask.causal() & Mask.lengths(torch.tensor(lengths))
    options = {"dropout_p": 0.3, "seed": SEED, "backend": backend}
    padded = tfk.ops.attention(q, k, v, mask, **options).transpose(1, 2)[keep]
    packed = [t.transpose(1, 2)[keep] for t in (q, k, v)]
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    out = tfk.ops.attention_varlen(*packed, ends, ends, longest, longest, Mask.causal(), **options)
    torch.testing.assert_close(out, padded)
    dout = randn(*out.shape, dtype=torch.float64, seed=3)
    for a, b in zip(*(torch.autograd.grad(o, (q, k, v), dout) for o in (out, padded)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["query", "key", "value", "dout"])
@pytest.mark.parametrize("bad", [NAN, float("inf")])
def test_segments_are_alone(backend, name, bad):
    assert_segments_are_alone(backend, name, bad)


def test_a_packed_call_of_the_reference_compiles():
    """To one graph: it is what a compiled model on a GPU is given."""

    def packed(q, k, v, ends):
        return tfk.ops.attention_varlen(q, k, v, ends, ends, 9, 9, Mask.causal(), backend="reference")

    ends, given = torch.tensor([0, 3, 3, 12]), [randn(12, 2, 8, seed=i) for i in range(3)]
    compiled = torch.compile(packed, fullgraph=True, backend="eager")(*given, ends)
    torch.testing.assert_close(compiled, packed(*given, ends))


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        ({"attn_mask": torch.ones(3, 3, dtype=torch.int64)}, ValueError, "attn_mask must be bool (True = may attend) "
         "or floating like query (added to the scores), got int64"),
        ({"attn_mask": torch.ones(3, 3, dtype=torch.float64)}, ValueError, "attn_mask must be bool (True = may attend) "
         "or floating like query (added to the scores), got float64"),
        ({"attn_mask": torch.ones(3, 3, device="meta")}, ValueError, "attn_mask must be on query's device cpu"),
        ({"attn_mask": "causal"}, TypeError, "attn_mask must be a tensor or None, got str"),
        ({name: torch.randn(3) for name in ("query", "key", "value")}, ValueError,
         "query must have at least 2 dimensions, got shape (3,)"),
        ({"value": torch.randn(2, 3, 8)}, ValueError,
         "value must have as many dimensions as query (1, 2, 3, 8), got shape (2, 3, 8)"),
    ],
)  # fmt: skip
def test_scaled_dot_product_attention_names_its_own_arguments(changes, error, sentence):
    arguments = {name: torch.randn(1, 2, 3, 8) for name in ("query", "key", "value")}
    with pytest.raises(error) as caught:
        tfk.ops.scaled_dot_product_attention(**arguments | changes)
    assert str(caught.value).startswith(f"scaled_dot_product_attention: {sentence}")


@pytest.mark.parametrize("backend", BACKENDS)
def test_scaled_dot_product_attention_is_torchs(backend):
    q, k, v = qkv(heads=4, key_heads=2, dtype=torch.float64)
    for options in (
        {"is_causal": True, "enable_gqa": True},
        {"enable_gqa": True, "scale": 0.2},
        {"attn_mask": torch.rand(5, 7) < 0.9, "enable_gqa": True},
        {"attn_mask": randn(2, 4, 5, 7, dtype=torch.float64), "enable_gqa": True},
    ):
        ours = tfk.ops.scaled_dot_product_attention(q, k, v, backend=backend, **options)
        torch.testing.assert_close(ours, F.scaled_dot_product_attention(q, k, v, **options).nan_to_num(0.0))
    flat = [t[:, 0] for t in (q, k, v)]
    ours = tfk.ops.scaled_dot_product_attention(*flat, attn_mask=torch.ones(2, 5, 7) > 0, backend=backend)
    torch.testing.assert_close(ours, F.scaled_dot_product_attention(*flat))
    unbatched = {"query": q[0], "key": k[0], "value": v[0], "enable_gqa": True}  # its leading axis counts heads
    for mask in (randn(4, 5, 7, dtype=torch.float64), torch.rand(4, 1, 7) < 0.9, torch.rand(1, 5, 7) < 0.9):
        ours = tfk.ops.scaled_dot_product_attention(**unbatched, attn_mask=mask, backend=backend)
        theirs = F.scaled_dot_product_attention(**unbatched, attn_mask=mask)
        torch.testing.assert_close(ours, theirs.nan_to_num(0.0))


@pytest.mark.parametrize("backend", BACKENDS)
def test_scaled_dot_product_attention_follows_autocast_as_torchs(backend):
    q, k, v = (t.detach() for t in qkv(heads=4, key_heads=4))
    mixed = {"query": q.bfloat16(), "key": k, "value": v, "attn_mask": randn(5, 7, dtype=torch.float16)}
    for given in ({"query": q, "key": k, "value": v, "is_causal": True}, mixed):
        with torch.autocast("cpu", torch.bfloat16):
            ours = tfk.ops.scaled_dot_product_attention(**given, backend=backend)
            theirs = F.scaled_dot_product_attention(**given)
            assert f"{backend:10}can" in tfk.explain("scaled_dot_product_attention", **given)
        assert ours.dtype == theirs.dtype == torch.bfloat16
        torch.testing.assert_close(ours, theirs, rtol=2.0**-7, atol=2.0**-7)
    with torch.autocast("cpu", torch.bfloat16):
        exact = [t.double() for t in (q, k, v)]
        assert tfk.ops.scaled_dot_product_attention(*exact, backend=backend).dtype == torch.float64


@pytest.mark.parametrize("average", [False, True])
def test_attention_weights_are_exact(average):
    q, k, v = qkv(dtype=torch.float64)
    mask = Mask.causal() & Mask.lengths(torch.tensor([0, 5]))
    _, lse = tfk.ops.attention(q, k, v, mask, return_lse=True, backend="cpu")
    weights = tfk.ops.attention_weights(q, k, lse, mask, average=average)
    visible = mask.dense(2, 4, 5, 7)
    expected = (q @ k.transpose(-1, -2) / math.sqrt(8)).masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num(0.0)
    torch.testing.assert_close(weights, expected.mean(1) if average else expected)
    some = tfk.ops.attention_weights(q, k, lse, mask, rows=torch.tensor([1, 4]), heads=torch.tensor([2]))
    torch.testing.assert_close(some, expected[:, [2]][:, :, [1, 4]])


def test_weights_under_autocast_are_as_exact():
    q, k, v = qkv()
    _, lse = tfk.ops.attention(q, k, v, return_lse=True, backend="cpu")
    weights = tfk.ops.attention_weights(q, k, lse)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(tfk.ops.attention_weights(q, k, lse), weights)


def test_double_backward():
    q, k, v = qkv(batch=1, heads=1, key_heads=1, queries=2, keys=3, width=2, value_width=2, dtype=torch.float64)
    ends = torch.tensor([0, 2]), torch.tensor([0, 3])

    def attention_varlen(q, k, v, backend):
        packed = (t[0].transpose(0, 1) for t in (q, k, v))
        return tfk.ops.attention_varlen(*packed, *ends, 2, 3, backend=backend)

    for function in (tfk.ops.attention, tfk.ops.scaled_dot_product_attention, attention_varlen):
        assert gradgradcheck(lambda *a, f=function: f(*a, backend="reference"), (q, k, v))
        with sdpa_kernel(SDPBackend.MATH):  # the only one of torch's that can
            assert gradgradcheck(lambda *a, f=function: f(*a, backend="aten"), (q, k, v))
        once = "attention: the cpu backend is differentiable once; use backend='reference' for a double backward$"
        for backend, refusal in (("cpu", once), ("aten", "_backward is not implemented")):
            out = function(q, k, v, backend=backend)
            (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
            with pytest.raises(RuntimeError, match=refusal):
                dq.sum().backward()


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit.trace")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", [None, Mask.causal(), Mask.window(2, 1), torch.eye(5, 7) > 0])
@pytest.mark.parametrize("key_heads", [2, 4])
def test_torch_jit_traces_it(backend, mask, key_heads):
    q, k, v = (t.detach() for t in qkv(key_heads=key_heads))
    call = lambda q, k, v: tfk.ops.attention(q, k, v, mask, backend=backend)
    traced = torch.jit.trace(call, (q, k, v))
    assert torch.equal(traced(2 * q, k, v), call(2 * q, k, v))


def test_repeatable_on_any_number_of_threads():
    q, k, v = qkv(heads=8, key_heads=2, queries=130, keys=150)
    bias = randn(1, 8, 1, 150, seed=5).requires_grad_()

    def once(threads):
        with on_threads(threads):
            out = tfk.ops.attention(q, k, v, bias=bias, dropout_p=0.1, seed=SEED, backend="cpu")
            return out, *torch.autograd.grad(out, (q, k, v, bias), torch.ones_like(out))

    first = once(2)
    for threads in (2, 1):
        assert all(torch.equal(a, b) for a, b in zip(first, once(threads), strict=True))


def test_compiles_to_one_graph_and_trains():
    @torch.compile(fullgraph=True)
    def step(q, k, v, lengths):
        mask = Mask.causal() & Mask.lengths(lengths)
        return tfk.ops.attention(q, k, v, mask, dropout_p=0.2, seed=SEED, backend="cpu")

    q, k, v = qkv()
    lengths = torch.tensor([4, 7])
    out = step(q, k, v, lengths)
    mask = Mask.causal() & Mask.lengths(lengths)
    eager = tfk.ops.attention(q, k, v, mask, dropout_p=0.2, seed=SEED, backend="cpu")
    torch.testing.assert_close(out, eager)
    dout = randn(*out.shape, seed=3)
    for a, b in zip(*(torch.autograd.grad(o, (q, k, v), dout) for o in (out, eager)), strict=True):
        torch.testing.assert_close(a, b)


def test_extra_memory_does_not_grow_with_the_square_of_the_length():
    """Forward and backward of 8192 keys: a (T, T) matrix of one head would be 256 MiB; all that lives is O(T)."""
    small = "small, large = ([torch.randn(1, 1, t, 16).requires_grad_() for _ in range(3)] for t in (256, 8192))\n"
    run = "tfk.ops.attention(*{}, backend='cpu').sum().backward()"
    assert growth(small + run.format("small"), run.format("large")) < 48
