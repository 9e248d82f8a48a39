"""What attention's GPU kernels have to do wherever they run: imported by the tests of each backend, which say which.

A module that imports these tests has a fixture ``backend``.
"""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tfm_kernels as tfk
from tests.fences import fenced
from tfm_kernels import Mask, dropout
from tfm_kernels.ops.attention import _backward, _forward
from tfm_kernels.testing import assert_contract, exact, invariance
from tfm_kernels.testing.derivative import assert_opcheck

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SEED = torch.tensor(2**40 + 20261121)
NAN = float("nan")


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(batch=2, heads=4, key_heads=2, queries=5, keys=7, width=8, value_width=8, dtype=torch.float32):
    shapes = (batch, heads, queries, width), (batch, key_heads, keys, width), (batch, key_heads, keys, value_width)
    return [randn(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)]


def named(q, k, v, **options):
    return {"query": q, "key": k, "value": v, **options}


WIDTHS = [(96, 96), (200, 200), (256, 256), (129, 31), (1, 256)]  # every tile, D not a power of two, Dv not D


def assert_wide_heads(widths, dtype, backend):
    tensors = qkv(1, 2, 1, 70, 67, *widths, dtype)
    inputs = named(*tensors, mask=Mask.causal("bottom_right"), return_lse=True)
    assert_contract("attention", inputs, backend)


def assert_many_tiles(dtype, backend):
    """Tiles that are hidden, cut and whole, in one row and in one column."""
    q, k, v = qkv(1, 2, 2, 200, 270, 16, 16, dtype)
    for mask in (Mask.causal(), Mask.window(70, 5, "bottom_right") & Mask.lengths(torch.tensor([201]))):
        assert_contract("attention", named(q, k, v, mask=mask, dropout_p=0.2, seed=SEED), backend)


MASKS = {
    "causal": Mask.causal(),
    "window": Mask.window(3, 70, "bottom_right"),
    "lengths": Mask.lengths(torch.tensor([65, 0])),
    "keep": Mask.keep(torch.rand(2, 1, 66, 129, generator=torch.Generator().manual_seed(1)) < 0.02),
    "all": Mask.causal("bottom_right")
    & Mask.lengths(torch.tensor([64, 129]))
    & Mask.keep(torch.rand(1, 2, 66, 129, generator=torch.Generator().manual_seed(1)) < 0.1),
}


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("mask", MASKS)
def test_who_sees_whom(mask, p, backend):
    exact.assert_mask_support(backend, MASKS[mask], (2, 2, 66, 129), dropout_p=p, seed=5)


def results(backend, q, k, v, mask=None, **options):
    """out and the gradients of q, k, v for a fixed random dout."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out = tfk.ops.attention(*leaves, mask, backend=backend, **options)
    return out, *torch.autograd.grad(out, leaves, randn(*out.shape, dtype=out.dtype, seed=9))


HIDDEN_TAIL = {
    "lengths": Mask.lengths(torch.tensor([4, 4])),
    "keep per key": Mask.keep((torch.arange(7) < 4).expand(2, 1, 1, 7)),
    "keep per pair": Mask.keep((torch.arange(7) < 4).expand(5, 7)),
    "hide": Mask.hide((torch.arange(7) >= 4).expand(2, 4, 5, 7)),
    "window": Mask.window(None, 0) & Mask.keep((torch.arange(7) < 4).expand(1, 1, 1, 7)),
}


@pytest.mark.parametrize("kind", [*HIDDEN_TAIL, "bias"])
@pytest.mark.parametrize("bad", [NAN, float("inf")])
def test_what_lies_in_padding_changes_no_bit(kind, bad, backend):
    clean, options = qkv(), {}
    dirty = [t.clone() for t in clean]
    for t in dirty[1:]:
        t[:, :, 4:] = bad
    if kind == "bias":
        options["bias"] = torch.zeros(1, 1, 5, 7).index_fill(3, torch.tensor([4, 5, 6]), -math.inf)
    else:
        options["mask"] = HIDDEN_TAIL[kind]
    for a, b in zip(results(backend, *clean, **options), results(backend, *dirty, **options), strict=True):
        assert torch.equal(a, b) and a.isfinite().all()


BANDS = {
    "causal": Mask.causal(),
    "window": Mask.window(2, 1),
    "causal and lengths": Mask.causal() & Mask.lengths(torch.tensor([30, 9])),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bad", [NAN, float("inf")])
@pytest.mark.parametrize("kind", BANDS)
def test_what_lies_beyond_the_last_querys_reach_changes_no_bit(kind, bad, dtype, backend):
    """More keys than queries see, in one tile with those that they see."""
    clean = qkv(keys=40, dtype=dtype)
    dirty = [t.clone() for t in clean]
    for t in dirty[1:]:
        t[:, :, 6:] = bad
    pairs = zip(results(backend, *clean, BANDS[kind]), results(backend, *dirty, BANDS[kind]), strict=True)
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in pairs)


def test_nan_where_it_is_seen(backend):
    """A query row of NaN: NaN in that row, and in the gradients of the keys that it sees, of no others."""
    q, k, v = qkv(queries=7, key_heads=4)
    q[0, 1, 2] = NAN
    out, dq, dk, dv = results(backend, q, k, v, Mask.causal())
    rest = torch.ones_like(out, dtype=torch.bool)
    rest[0, 1, 2] = False
    assert out[0, 1, 2].isnan().all() and dq[0, 1, 2].isnan().all() and out[rest].isfinite().all()
    for gradient in (dk, dv):
        assert gradient[0, 1, :3].isnan().all() and gradient[0, 1, 3:].isfinite().all()
        assert gradient[1].isfinite().all() and gradient[0, [0, 2, 3]].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_see_nothing(dtype, backend):
    q, k, v = qkv(dtype=dtype)
    keep = torch.ones(5, 7, dtype=torch.bool)
    keep[2] = False
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out, lse = tfk.ops.attention(*leaves, Mask.keep(keep), return_lse=True, backend=backend)
    assert (out[:, :, 2] == 0).all() and (lse[:, :, 2] == -math.inf).all() and lse[:, :, 3].isfinite().all()
    dout = torch.zeros_like(out)
    dout[:, :, 2] = 1.0
    for gradient in torch.autograd.grad(out, leaves, dout):
        assert (gradient == 0).all()


def test_rows_far_from_zero_have_right_gradients(backend):
    """|lse| of 1e5 and more, where float32 has lost log(sum) beside the maximum: large scores, and a bias of one large
    number for a whole row, as padded queries are often hidden.
    """
    q, k, v = qkv(queries=7)
    assert_contract("attention", named(300 * q, 300 * k, v), backend)
    bias = torch.zeros(1, 1, 7, 7)
    bias[:, :, 2], bias[:, :, 5] = -1e5, torch.finfo(torch.float32).min
    found = results(backend, q, k, v, bias=bias)
    expected = results("reference", *(t.double() for t in (q, k, v)), bias=bias.double())
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=0.02)  # 1e5 eps is 0.006


@pytest.mark.parametrize("size", [1e3, 1e5, 1e9, 1e14])
def test_scores_of_any_size(size, backend):
    """Of scores up to 1e28 the largest takes all: what rounding it loses must not come to powers of two by itself."""
    q, k, v = qkv(queries=33, keys=65)
    assert_contract("attention", named(size * q, size * k, v), backend, backward=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_least_finite_bias_gives_the_mean(dtype, backend):
    q, k, v = qkv(dtype=dtype)
    bias = torch.full((1, 1, 5, 7), torch.finfo(dtype).min, dtype=dtype)
    out = tfk.ops.attention(q, k, v, bias=bias, backend=backend)
    expected = v.double().mean(2, keepdim=True).repeat_interleave(2, 1).expand_as(out)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("scale", [0.0, 1e-40, -1.0])
@pytest.mark.parametrize("with_bias", [False, True])
def test_scale(scale, with_bias, backend):
    q, k, v = qkv()
    bias = {"bias": randn(1, 4, 5, 7, seed=4)} if with_bias else {}
    assert_contract("attention", named(q, k, v, scale=scale, return_lse=True, **bias), backend)


@pytest.mark.parametrize("shape", [(2, 4, 0, 7), (2, 4, 5, 0), (0, 4, 5, 7)], ids=str)
def test_nothing_in_nothing_out(shape, backend):
    batch, heads, queries, keys = shape
    q, k, v = qkv(batch, heads, 2, queries, keys)
    for gradient in results(backend, q, k, v):
        assert (gradient == 0).all()


@pytest.mark.parametrize("p", [2.0**-33, 0.1, 0.5, 0.9999, 1.0])
@pytest.mark.parametrize("keys", [7, 64, 130])
def test_dropout_masks_are_those_of_the_other_backends(keys, p, backend):
    """Queries of 0 and values of unit vectors: the output is the weight matrix; the gradient of the values its sum."""
    batch, heads, queries = 2, 2, 66
    narrow = {"dtype": torch.bfloat16}  # its tiles are larger, and so fewer
    q, k = torch.zeros(batch, heads, queries, 8, **narrow), torch.zeros(batch, heads, keys, 8, **narrow)
    keep = dropout.keep_mask(SEED, p, dropout.attention_rows(batch, heads, queries, "cpu"), keys)
    for name in (backend, "cpu", "reference"):
        v = torch.eye(keys, **narrow).expand(batch, heads, keys, keys).clone().requires_grad_()
        out = tfk.ops.attention(q, k, v, dropout_p=p, seed=SEED, backend=name)
        assert torch.equal(out != 0, keep), name
        dout = torch.eye(queries, keys, **narrow).expand(
            batch, heads, queries, keys
        )  # column i of dv is row i of the weights
        (dv,) = torch.autograd.grad(out, v, dout)
        rows = min(queries, keys)
        assert torch.equal(dv.transpose(-1, -2)[:, :, :rows] != 0, keep[:, :, :rows]), name


def test_packed_dropout_is_the_padded_calls(backend):
    """Row numbers go by max_seqlen_q."""
    lengths, longest = [3, 9, 0, 70], 72
    ends = torch.tensor([0, 3, 12, 12, 82])
    packed = [randn(82, 2, 16, seed=seed) for seed in range(3)]
    options = {"dropout_p": 0.4, "seed": SEED, "backend": backend}
    found = tfk.ops.attention_varlen(*packed, ends, ends, longest, longest, Mask.causal(), **options)
    padded = [torch.zeros(4, 2, longest, 16) for _ in range(3)]
    for full, short in zip(padded, packed, strict=True):
        for b, length in enumerate(lengths):
            full[b, :, :length] = short[ends[b] : ends[b] + length].transpose(0, 1)
    mask = Mask.causal() & Mask.lengths(torch.tensor(lengths))
    expected = tfk.ops.attention(*padded, mask, **options)
    for b, length in enumerate(lengths):
        torch.testing.assert_close(found[ends[b] : ends[b] + length].transpose(0, 1), expected[b, :, :length])


def assert_segments_are_alone(backend, name, bad):
    """Whatever one segment holds, and whatever gradient arrives there, changes no bit of the others."""
    clean = [randn(20, heads, 8, seed=seed) for seed, heads in enumerate((2, 1, 1, 2))]
    dirty = [t.clone() for t in clean]
    dirty[("query", "key", "value", "dout").index(name)][5:9] = bad
    ends, rest = torch.tensor([0, 3, 9, 9, 20]), [*range(3), *range(9, 20)]

    def packed(q, k, v, dout):
        leaves = [t.requires_grad_() for t in (q, k, v)]
        out = tfk.ops.attention_varlen(*leaves, ends, ends, 11, 11, Mask.window(4, 1), backend=backend)
        return out, *torch.autograd.grad(out, leaves, dout)

    for a, b in zip(packed(*clean), packed(*dirty), strict=True):
        assert torch.equal(a[rest], b[rest]) and b[rest].isfinite().all()


@pytest.mark.parametrize("name", ["query", "key", "value", "dout"])
@pytest.mark.parametrize("bad", [NAN, float("inf")])
def test_segments_are_alone(name, bad, backend):
    assert_segments_are_alone(backend, name, bad)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views_give_the_bits_of_contiguous_tensors(dtype, backend):
    inputs = named(*qkv(2, 2, 2, 9, 12, 16, 24, dtype), bias=randn(1, 2, 9, 12, dtype=dtype, seed=4))
    invariance.assert_view_equals_contiguous("attention", inputs, backend)


def test_batch_and_heads_are_independent_and_padding_is_unread(backend):
    inputs = named(*qkv(3, 4, 2, 9, 70, 16, 16))
    invariance.assert_batch_and_heads_independent(inputs, backend)
    invariance.assert_padding_unread(inputs, torch.tensor([3, 70, 65]), backend)


def test_opcheck(backend):
    bias = randn(1, 4, 1, 7, seed=4)
    inputs = named(*qkv(), bias=bias, mask=Mask.lengths(torch.tensor([3, 7])), dropout_p=0.25, seed=SEED)
    checked = assert_opcheck("attention", inputs, backend)
    assert checked == [f"tfm_kernels::attention_{way}_{backend}" for way in ("fwd", "bwd")]


def step(backend, q, k, v, bias):
    seed = torch.full((), 3, device=q.device)
    return tfk.ops.attention(q, k, v, Mask.causal(), bias=bias, dropout_p=0.1, seed=seed, backend=backend) * 2


def test_compiled(backend):
    """fullgraph=True, forward and backward; an inductor graph calls the operators as they are."""
    leaves = [t.requires_grad_() for t in (*qkv(), randn(1, 4, 5, 7, seed=4))]
    eager = step(backend, *leaves)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(backend, *leaves)
    torch.testing.assert_close(compiled, eager)
    found, expected = (torch.autograd.grad(out.sum(), leaves) for out in (compiled, eager))
    torch.testing.assert_close(found, expected)


def test_traced_for_a_gpu_that_is_not_there(backend):
    """Without gradients: torch's autograd ends the process where a CPU build meets a CUDA device."""
    with FakeTensorMode():
        options = {"device": "cuda", "dtype": torch.bfloat16}
        q, k, v = (torch.empty(2, heads, 5, 16, **options) for heads in (4, 2, 2))
        bias = torch.empty(1, 4, 5, 5, **options)
        out = torch.compile(step, fullgraph=True, backend="eager")(backend, q, k, v, bias)
        assert out.device.type == "cuda" and out.shape == q.shape and out.dtype == torch.bfloat16
        lse = torch.empty(2, 4, 5, device="cuda")
        indices = (None, None, None, None)
        settings = (5, 5, [-9, 9, -9, 9], 0.25, 0.0, None, True, True)
        dq, dk, _, dbias = _backward[backend](out, None, q, k, v, out, lse, bias, *indices, *settings)
        assert dq.device.type == dbias.device.type == "cuda" and (dk.shape, dbias.shape) == (k.shape, bias.shape)


@pytest.mark.parametrize("ways", [(False, True), (True, False), (True, True)], ids=str)
def test_backward_of_another_backend(ways, backend):
    """What the forward saves means the same to every backend."""
    forward, backward = (backend if ours else "cpu" for ours in ways)
    q, k, v = qkv(queries=40, keys=70, width=16, value_width=24)
    bias, dout = randn(1, 4, 40, 1, seed=4), randn(2, 4, 40, 24, seed=5)
    arguments = (bias, None, torch.tensor([70, 33]), None, None, 40, 70, [-99, 0, -99, 9], 0.3, 0.1, SEED, True)
    saved = {name: _forward[name](q, k, v, *arguments) for name in ("cpu", forward)}
    dlse = randn(2, 4, 40, seed=6)
    expected = _backward["cpu"](dout, dlse, q, k, v, *saved["cpu"], *arguments, True)
    found = _backward[backward](dout, dlse, q, k, v, *saved[forward], *arguments, True)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def direct(backend, q=None, k=None, v=None, **changed):
    plain = qkv()
    given = {
        "bias": None, "keep": None, "key_lengths": None, "cu_seqlens_q": None, "cu_seqlens_k": None,
        "max_seqlen_q": 5, "max_seqlen_k": 7, "window": [-99, 99, -99, 99], "scale": 1.0, "dropout_p": 0.0,
        "seed": None, "deterministic": True,
    }  # fmt: skip
    tensors = [default if t is None else t for t, default in zip((q, k, v), plain, strict=True)]
    return _forward[backend](*tensors, *{**given, **changed}.values())


ENDS = torch.tensor([0, 5])
REFUSED = [
    dict(q=torch.zeros(2, 4, 5, 9)),
    dict(q=torch.zeros(2, 3, 5, 8)),
    dict(q=torch.zeros(2, 4, 5, 8).double()),
    dict(k=torch.zeros(2, 2, 7, 8).half()),
    dict(v=torch.zeros(2, 2, 6, 8)),
    dict(v=torch.zeros(2, 2, 7, 257)),
    dict(bias=torch.zeros(2, 4, 5, 6)),
    dict(bias=torch.zeros(2, 4, 5, 7).half()),
    dict(keep=torch.zeros(1, 1, 1, 7)),
    dict(key_lengths=torch.tensor([1, 2, 3])),
    dict(window=[0, 0]),
    dict(dropout_p=0.5),
    dict(dropout_p=1.5, seed=SEED),
    dict(cu_seqlens_q=ENDS),
    dict(cu_seqlens_q=ENDS, cu_seqlens_k=ENDS),
]


@pytest.mark.parametrize("index", range(len(REFUSED)))
def test_the_operator_itself_refuses_what_would_read_outside(index, backend):
    with pytest.raises((ValueError, RuntimeError), match=f"attention_fwd_{backend}: "):
        direct(backend, **REFUSED[index])


def test_wrong_lengths_read_nothing_outside(backend):
    """On a GPU nobody looks at lengths beforehand: the kernels clamp what they load."""
    out, _ = direct(backend, *(fenced(t) for t in qkv()), key_lengths=fenced(torch.tensor([2**62, -5])))
    assert out[0].isfinite().all() and (out[1] == 0).all()
    shapes = (5, 4, 8), (7, 2, 8), (7, 2, 8)
    q, k, v = (fenced(randn(*shape, seed=seed)) for seed, shape in enumerate(shapes))
    bad = fenced(torch.tensor([3, 2**40, -7, 2]))
    out, _ = direct(backend, q, k, v, cu_seqlens_q=bad, cu_seqlens_k=bad, max_seqlen_q=5, max_seqlen_k=7)
    for rows, keys in ((slice(3, 5), slice(3, 7)), (slice(0, 2), slice(0, 2))):  # what clamping leaves of them
        dense = [t.transpose(0, 1).unsqueeze(0) for t in (q[rows], k[keys], v[keys])]
        expected = tfk.ops.attention(*dense, scale=1.0, backend="cpu")
        torch.testing.assert_close(out[rows].transpose(0, 1).unsqueeze(0), expected)


@pytest.mark.parametrize(
    "call, why",
    [
        (lambda backend: tfk.ops.attention(*(t.double() for t in qkv()), backend=backend), "has no float64 kernels"),
        (lambda backend: tfk.ops.attention(*qkv(width=257), backend=backend), "at most 256, got 257"),
    ],
)
def test_what_it_cannot_is_said(call, why, backend):
    with pytest.raises(tfk.BackendError, match=why):
        call(backend)
    words = tfk.explain("attention", *qkv())
    assert f"-> {backend}" not in words and "proven on an H200" in words
