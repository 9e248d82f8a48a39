"""Attention's Triton kernels of few queries against many keys, interpreted: the contract, masks, padding, caches."""

import itertools

import pytest
import torch

import tfm_kernels as tfk
from tests.attention_semantics import (  # noqa: F401  (tests that every backend has)
    DTYPES,
    SEED,
    named,
    qkv,
    randn,
    test_backward_of_another_backend,
    test_compiled,
    test_nan_where_it_is_seen,
    test_nothing_in_nothing_out,
    test_packed_dropout_is_the_padded_calls,
    test_rows_far_from_zero_have_right_gradients,
    test_rows_that_see_nothing,
    test_scale,
    test_segments_are_alone,
    test_the_least_finite_bias_gives_the_mean,
    test_views_give_the_bits_of_contiguous_tensors,
    test_what_lies_in_padding_changes_no_bit,
    test_wrong_lengths_read_nothing_outside,
)
from tests.interpreter.few_queries import taken
from tfm_kernels import Mask
from tfm_kernels.testing import assert_contract, exact, judge
from tfm_kernels.triton import _attention_call, _attention_fwd_few, _launch

KEYS = 1100
LENGTHS = torch.tensor([KEYS, 0, 1, 64, 700])  # less than a tile, one tile, whole parts and a piece of one


@pytest.fixture
def backend():
    return "triton"


@pytest.fixture(autouse=True)
def semantics_take_few(request):
    """The tests of semantics, whose sizes are small."""
    if request.function.__module__ == __name__:
        yield
    else:
        with taken():
            yield


@pytest.fixture
def launched(monkeypatch):
    """The names of the kernels that were launched."""
    names = []
    launch = _attention_call.Call.launch

    def told(call, kernel, programs, config, **more):
        names.append(kernel.fn.__name__)
        launch(call, kernel, programs, config, **more)

    monkeypatch.setattr(_attention_call.Call, "launch", told)
    return names


PARTED, WHOLE = ["attention_fwd_few_kernel", "attention_fwd_merge_kernel"], ["attention_fwd_few_kernel"]


def config_of(q, k, v, mask=None, extras="none"):
    """What pick_config says of a call whose band shows all keys."""
    width, group = max(q.shape[3], v.shape[3]), q.shape[1] // k.shape[1]
    units = k.shape[0] * k.shape[1]
    return _attention_fwd_few.pick_config(
        width, group, q.shape[2], k.shape[2], k.shape[2], units, extras, q.dtype, (9, 0)
    )


SHAPES = [(1, 1, 16), (1, 4, 64), (3, 2, 40), (16, 1, 128), (5, 8, 16)]
PARTS = [(shape, dtype, everything) for shape in SHAPES for dtype in DTYPES for everything in (False, True)]
LONG = [(SHAPES[-1], torch.float16, False), (SHAPES[-1], torch.float16, True), (SHAPES[-1], torch.bfloat16, False)]


@pytest.mark.parametrize(
    "shape, dtype, everything", [pytest.param(*p, marks=pytest.mark.slow) if p in LONG else p for p in PARTS], ids=str
)
def test_contract_of_parts(dtype, shape, everything, launched):
    """Queries, heads of a group and width; sequences of very different lengths, twice bit for bit."""
    queries, group, width = shape
    keys = KEYS if dtype != torch.float32 else 300  # its tiles are smaller
    lengths = LENGTHS.clamp(max=keys)[: 5 if width <= 40 else 3]
    q, k, v = qkv(len(lengths), group, 1, queries, keys, width, width - 1, dtype)
    mask, options = Mask.lengths(lengths), {}
    if everything:
        keep = torch.rand(1, 1, queries, keys, generator=torch.Generator().manual_seed(3)) < 0.5
        mask = mask & Mask.causal("bottom_right") & Mask.keep(keep)
        options = {"bias": randn(1, group, 1, keys, dtype=dtype, seed=4), "dropout_p": 0.2, "seed": SEED}
    assert config_of(q, k, v, extras="unaligned" if everything else "none").parts > 4
    inputs = named(q, k, v, mask=mask, return_lse=True, **options)
    assert_contract("attention", inputs, "triton", backward=False)
    assert launched == PARTED * 2


BANDS = {
    "window": Mask.window(300, 0, "bottom_right"),
    "wide window": Mask.window(1000, 4, "bottom_right"),
    "window from the left": Mask.window(7, 500),
    "causal from the right": Mask.causal("bottom_right"),
    "both corners": Mask.window(None, 900) & Mask.window(800, None, "bottom_right"),
}


@pytest.mark.parametrize("band", BANDS)
def test_bands_of_parts(band, launched):
    q, k, v = qkv(2, 4, 2, 3, KEYS, 16, 16, torch.bfloat16)
    inputs = named(q, k, v, mask=BANDS[band] & Mask.lengths(torch.tensor([KEYS, 901])), return_lse=True)
    assert_contract("attention", inputs, "triton", backward=False)
    assert launched == PARTED * 2


KEEP = torch.rand(2, 2, 9, 150, generator=torch.Generator().manual_seed(1)) < 0.05
SEEN = {
    "causal": Mask.causal(),
    "window": Mask.window(3, 70, "bottom_right"),
    "lengths": Mask.lengths(torch.tensor([65, 0])),
    "keep": Mask.keep(KEEP),
    "all": Mask.causal("bottom_right") & Mask.lengths(torch.tensor([128, 150])) & Mask.keep(KEEP[:1]),
}


@pytest.mark.parametrize("mask", SEEN)
def test_who_sees_whom_in_parts(mask):
    with taken() as launches:
        exact.assert_mask_support("triton", SEEN[mask], (2, 2, 9, 150), dropout_p=0.3, seed=5)
    assert max(config.parts for name, config, _ in launches if name == "attention_fwd_few_kernel") > 1


def test_a_band_that_shows_few_keys_is_not_parted(launched):
    q, k, v = qkv(2, 4, 2, 3, KEYS, 16, 16, torch.bfloat16)
    assert_contract("attention", named(q, k, v, mask=Mask.window(90, 0, "bottom_right")), "triton", backward=False)
    assert launched == WHOLE * 2


@pytest.mark.parametrize("width", [31, 64])
def test_contract_in_one_part(width, launched, monkeypatch):
    """Many sequences fill the multiprocessors by themselves."""
    monkeypatch.setattr(_launch, "MULTIPROCESSORS", {9: 2})
    q, k, v = qkv(4, 8, 2, 3, 200, width, width, torch.bfloat16)
    assert config_of(q, k, v).parts == 1
    mask = Mask.lengths(torch.tensor([200, 0, 65, 1])) & Mask.causal("bottom_right")
    assert_contract("attention", named(q, k, v, mask=mask, return_lse=True), "triton", backward=False)
    assert launched == WHOLE * 2


def test_how_keys_are_parted_changes_no_more_than_roundings(launched, monkeypatch):
    q, k, v = qkv(1, 4, 1, 2, KEYS, 32, 32)
    for multiprocessors, least in ((132, 40), (2, 2)):
        monkeypatch.setattr(_launch, "MULTIPROCESSORS", {9: multiprocessors})
        assert config_of(q, k, v).parts >= least
        assert_contract("attention", named(q, k, v, return_lse=True), "triton", backward=False)
    assert launched == PARTED * 4


def test_more_parts_than_are_added_up_at_once(launched):
    q, k, v = qkv(1, 2, 1, 1, 16 * 50, 16, 16)
    assert config_of(q, k, v).parts == 50
    assert_contract("attention", named(q, k, v, return_lse=True), "triton", backward=False)
    assert launched == PARTED * 2


def test_scores_far_from_zero_in_parts(launched):
    """lse of 1e5, where float32 has lost the sum of a part's weights beside its largest score."""
    q, k, v = qkv(2, 4, 2, 3, 400, 16, 16)
    k[:, :, 100:300] = k[:, :, 300:301]  # the same score in many parts
    assert_contract("attention", named(300 * q, 300 * k, v, return_lse=True), "triton", backward=False)
    bias = torch.full((1, 1, 3, 400), torch.finfo(torch.float32).min)
    out = tfk.ops.attention(q, k, v, bias=bias, backend="triton")
    judge("attention", named(0 * q, k, v), {"out": out}).raise_broken()  # the mean, as of scores that are all the same
    assert launched == PARTED * 3


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["lengths", "keep", "bias"])
def test_hidden_parts_and_keys_are_unread(kind, bad, launched):
    q, k, v = qkv(2, 4, 2, 3, KEYS, 16, 16, torch.bfloat16)
    hidden = torch.zeros(2, KEYS, dtype=torch.bool)
    hidden[0, 700:], hidden[1, 3:] = True, True
    if kind != "lengths":
        hidden[0, 100:420] = True  # a hole of whole tiles and pieces
    options = {
        "lengths": {"mask": Mask.lengths(torch.tensor([700, 3]))},
        "keep": {"mask": Mask.hide(hidden[:, None, None])},
        "bias": {"bias": torch.zeros(2, 1, 1, KEYS).masked_fill(hidden[:, None, None], -torch.inf)},
    }[kind]
    clean = tfk.ops.attention(q, k, v, return_lse=True, backend="triton", **options)
    for t in (k, v):
        t.masked_fill_(hidden[:, None, :, None], bad)
    dirty = tfk.ops.attention(q, k, v, return_lse=True, backend="triton", **options)
    exact.assert_same_bits(dict(enumerate(clean)), dict(enumerate(dirty)), "with what lies in hidden keys")
    assert clean[0].isfinite().all() and launched == PARTED * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_query_of_nan_stays_in_its_row(dtype, launched):
    q, k, v = qkv(2, 4, 2, 3, 400, 16, 16, dtype)
    q[1, 2, 1] = float("nan")
    out, lse = tfk.ops.attention(q, k, v, return_lse=True, backend="triton")
    wrong = torch.zeros(2, 4, 3, dtype=torch.bool)
    wrong[1, 2, 1] = True
    assert torch.equal(out.isnan().any(-1), wrong) and out[1, 2, 1].isnan().all() and torch.equal(lse.isnan(), wrong)
    assert launched[0] == "attention_fwd_few_kernel"


def test_packed_sequences_in_parts(launched):
    """Decoding steps of sequences side by side: no query, no key, less than a part, many parts."""
    ends_q, ends_k = torch.tensor([0, 1, 1, 4, 9, 11]), torch.tensor([0, 900, 950, 950, 953, 1500])
    q, k, v = (randn(t, h, 16, dtype=torch.bfloat16, seed=h + t) for t, h in ((11, 4), (1500, 2), (1500, 2)))
    inputs = {
        "query": q, "key": k, "value": v, "cu_seqlens_q": ends_q, "cu_seqlens_k": ends_k, "max_seqlen_q": 5,
        "max_seqlen_k": 900, "return_lse": True,
    }  # fmt: skip
    for mask in (None, Mask.causal("bottom_right"), Mask.window(300, 0, "bottom_right")):
        assert_contract("attention_varlen", {**inputs, "mask": mask}, "triton", backward=False)
    assert launched == PARTED * 6


def test_a_cache_is_read_where_it_lies(launched, monkeypatch):
    """Slices of reserved memory, tokens or heads first, give the bits of copies, and no copy of them is made."""
    q, k, v = qkv(2, 4, 2, 1, KEYS, 16, 16, torch.bfloat16)
    expected = tfk.ops.attention(q, k, v, backend="triton")
    monkeypatch.setattr(_attention_call.Call, "like", forbid_copies(_attention_call.Call.like))
    for order in ((0, 1, 2, 3), (0, 2, 1, 3)):
        stores = [torch.full((2, 2, 2000, 48), float("nan"), dtype=torch.bfloat16).permute(order) for _ in "kv"]
        stores = [t.contiguous().permute(order)[:, :, 8 : 8 + KEYS, 16:32] for t in stores]
        for store, t in zip(stores, (k, v), strict=True):
            store.copy_(t)
        assert torch.equal(tfk.ops.attention(q, *stores, backend="triton"), expected)
    assert launched == PARTED * 3


def forbid_copies(like):
    def found(call, t, width, dtype=None):
        assert t is call.query, "a copy of the keys or values is made"
        return like(call, t, width, dtype)

    return found


def test_every_order_of_rows_is_the_same_call(launched):
    """Heads of a group one by one, and queries one by one, are the call of all together."""
    q, k, v = qkv(1, 6, 2, 4, 400, 16, 16)
    expected = tfk.ops.attention(q, k, v, backend="triton")
    for h, i in itertools.product(range(6), range(4)):
        one = [t[:, n : n + 1] for t, n in ((q[:, :, i : i + 1], h), (k, h // 3), (v, h // 3))]
        torch.testing.assert_close(tfk.ops.attention(*one, backend="triton"), expected[:, h : h + 1, i : i + 1])
    assert set(launched) == set(PARTED)
