"""_attention_bwd_ahead.py, Gluon's backward kernels for GPUs of compute capability 9, which run where AHEAD is set."""

import math

import pytest
import torch

from tests.cases import report_case
from tests.ptx.chosen import marked_cases, quick_where
from tests.ptx.test_attention_ahead import drawn, fitting, keep_matrix, taken
from tests.ptx.test_traffic import assert_banks_are_free, assert_little_is_lost, heads, traffic
from tfm_kernels import Mask, ops
from tfm_kernels.testing import assert_contract, invariance
from tfm_kernels.triton import _attention_bwd_ahead, _launch, attention_bwd
from tfm_kernels.triton._attention_bwd_ahead_tile import RING

KERNELS = {"attention_bwd_ahead_keys_kernel", "attention_bwd_ahead_queries_kernel"}
OTHERS = {"attention_bwd_keys_kernel", "attention_bwd_queries_kernel"}
CASES = [
    parameter
    for ops_of in (("attention",), ("attention_varlen",))
    for parameter in quick_where(taken, 2, list(filter(fitting, marked_cases(ops_of))))
]


@pytest.fixture(autouse=True)
def ahead(monkeypatch):
    monkeypatch.setattr(attention_bwd, "AHEAD", True)


def own(gpu):
    """Whether the last call went backward by Gluon's kernels alone."""
    return KERNELS <= set(gpu.launches) and not OTHERS & set(gpu.launches)


@pytest.mark.parametrize("case", CASES)
def test_contract(case, gpu):
    report_case(case, "triton").raise_broken()
    empty = any(isinstance(level, tuple) and 0 in level for level in case.levels.values())
    launched = (KERNELS | OTHERS) & set(gpu.launches)
    assert launched in (KERNELS, OTHERS) or empty or case.levels.get("segments") in ("no_keys", "none")
    assert not taken(case) or launched == KERNELS


def masks(queries, keys):
    return {
        "plain": {},
        "causal": {"mask": Mask.causal()},
        "window": {"mask": Mask.window(100, 20)},
        "lengths": {"mask": Mask.lengths(torch.tensor([keys * 3 // 7]))},
        "dropout": {"dropout_p": 0.3, "seed": torch.tensor(2**40 + 3)},
        "all": {
            "mask": Mask.causal("bottom_right") & Mask.lengths(torch.tensor([keys * 6 // 7])), "dropout_p": 0.3,
            "seed": torch.tensor(7),
        },
        "all_dropped": {"dropout_p": 1.0, "seed": torch.tensor(7)},
    }  # fmt: skip


def pairs(dtype, queries, keys):
    g = torch.Generator().manual_seed(keys)

    def bias(*shape):
        """Some pairs hidden, and a few keys, in the middle of a tile, from all queries."""
        found = torch.randn(*shape, generator=g).masked_fill_(torch.rand(*shape, generator=g) < 0.2, -math.inf)
        found[..., 100:103] = -math.inf
        return found

    return {
        "bias": {"bias": bias(1, 2, queries, keys).to(dtype)},
        "float32 bias": {"bias": bias(1, 1, queries, keys), "mask": Mask.causal()},
        "keep": {"mask": keep_matrix(queries, keys)},
        "all pairs": {
            "mask": Mask.causal("bottom_right") & keep_matrix(queries, keys), "dropout_p": 0.3, "seed": torch.tensor(7),
            "bias": bias(1, 2, queries, keys),
        },
    }  # fmt: skip


MANY = (160, 464)  # queries and keys: tiles whole and not, more than twice around the rings
FEW = (60, 40)  # one warp group


QUICK_TILES = ((64, "lengths"), (128, "all"))
WIDTHS = {64: torch.bfloat16, 104: torch.float16, 128: torch.bfloat16}
TILES = [
    pytest.param(dtype, width, more, marks=() if (width, more) in QUICK_TILES else pytest.mark.slow)
    for width, dtype in WIDTHS.items()
    for more in masks(0, 0)
]


@pytest.mark.parametrize("dtype, width, more", TILES, ids=str)
def test_many_tiles(dtype, width, more, gpu):
    for queries, keys in (MANY, MANY[::-1], FEW):
        given = {**drawn(dtype, width, queries, keys), **masks(queries, keys)[more]}
        assert_contract("attention", given, "triton")
        assert own(gpu)


QUICK_PAIRS = ((64, "float32 bias"), (128, "all pairs"))


@pytest.mark.parametrize(
    "width, more",
    [
        pytest.param(width, more, marks=() if (width, more) in QUICK_PAIRS else pytest.mark.slow)
        for width in WIDTHS
        for more in pairs(torch.bfloat16, *FEW)
    ],
)
def test_bias_and_keep(width, more, gpu):
    for queries, keys in (MANY, MANY[::-1]):
        given = {**drawn(WIDTHS[width], width, queries, keys), **pairs(WIDTHS[width], queries, keys)[more]}
        assert_contract("attention", given, "triton")
        assert own(gpu)


SHARED = {"heads": (3, 1), "sequences": (1, 4), "both": (1, 1)}  # the sequences and heads that a bias has


@pytest.mark.parametrize("multiprocessors", [1, pytest.param(132, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "width, shared, more",
    [
        (128, "sequences", "causal"),
        *(pytest.param(width, shared, more, marks=pytest.mark.slow) for width, shared, more in (
            (64, "both", "lengths"), (64, "sequences", "everything"), (104, "heads", "keep"), (128, "both", "lengths"),
            (64, "both", "causal"),
        )),
    ],
)  # fmt: skip
def test_a_bias_that_is_shared(width, shared, more, multiprocessors, monkeypatch, gpu):
    """By more members than the ring has places, summed one after another or apart; some do not meet a tile."""
    monkeypatch.setattr(_launch, "MULTIPROCESSORS", {9: multiprocessors})
    queries, keys, dtype = 160, 272, WIDTHS[width]
    g = torch.Generator().manual_seed(width)
    new = lambda heads, length: torch.randn(3, heads, length, width, generator=g).to(dtype)
    given = {"query": new(4, queries), "key": new(2, keys), "value": new(2, keys)}
    given["bias"] = torch.randn(*SHARED[shared], queries, keys, generator=g)
    given["bias"][torch.rand(given["bias"].shape, generator=g) < 0.2] = -math.inf
    if more == "causal":
        given |= {"mask": Mask.causal(), "bias": given["bias"].to(dtype)}
    else:
        given["mask"] = Mask.lengths(torch.tensor([272, 130, 0]))
    if more in ("keep", "everything"):
        given["mask"] &= Mask.keep(torch.rand(3, 1, queries, keys, generator=g) < 0.6)
    if more == "everything":
        given |= {"dropout_p": 0.3, "seed": torch.tensor(9)}
    assert_contract("attention", given, "triton")
    assert own(gpu) and "attention_bwd_ahead_bias_kernel" in gpu.launches
    assert "attention_bwd_bias_kernel" not in gpu.launches


@pytest.mark.parametrize(
    "width, shape, p", [(64, (1, 2, 1, 464), 0.0), (64, (1, 2, 160, 1), 0.0), (128, (1, 1, 160, 464), 0.1)], ids=str
)
def test_shared_biases_of_plain_triton(width, shape, p, gpu):
    """Those of keys or queries alone, and with dropout of wide heads."""
    given = {
        **drawn(torch.bfloat16, width, *MANY),
        "bias": torch.randn(shape, generator=torch.Generator().manual_seed(3)),
    }
    given |= {"dropout_p": p, "seed": torch.tensor(3)} if p else {}
    assert_contract("attention", given, "triton")
    assert "attention_bwd_bias_kernel" in gpu.launches and "attention_bwd_ahead_bias_kernel" not in gpu.launches


def test_bits_are_no_more_than_the_results(monkeypatch, gpu):
    """What dropout draws is kept for the second kernel where that takes no more memory than dq, dk and dv."""
    calls = []
    monkeypatch.setattr(_attention_bwd_ahead.Call, "launch", lambda call, kernel, *_, **more: calls.append(more))
    for length in (2944, 3200):  # 3 results of 64 numbers of 16 bits a position are worth 3072 bits for each
        t = torch.zeros(1, 1, length, 64, dtype=torch.bfloat16)
        call = _attention_bwd_ahead.Call(
            "op", t, t, t, None, None, None, None, None, length, length, [-1, -1, -1, -1], 1.0, 0.1, torch.tensor(0)
        )
        assert _attention_bwd_ahead.pass_back(call, (9, 0), {}, t, t, t, None)
    (writes, reads), (draws, draws_again) = calls[:2], calls[2:]
    assert writes["bits_ptr"] is reads["bits_ptr"] and reads["bits_ptr"].numel() == 2944 * 2944 // 32
    assert draws["bits_ptr"] is draws_again["bits_ptr"] is None
    assert reads["seed_ptr"] is None and draws_again["seed_ptr"] is call.seed is not None


@pytest.mark.parametrize(
    "width, more",
    [
        (64, "all pairs"), (128, "all"),
        *(pytest.param(*other, marks=pytest.mark.slow) for other in (
            (64, "dropout"), (64, "all"), (128, "dropout"), (128, "all pairs"),
        )),
    ],
)  # fmt: skip
def test_both_kernels_draw(width, more, gpu, monkeypatch):
    """As where there are too many pairs for a bit of each."""
    bits_of = _attention_bwd_ahead.bits_of
    monkeypatch.setattr(_attention_bwd_ahead, "bits_of", lambda call, results: bits_of(call, 0))
    for queries, keys in (MANY, FEW) if more != "all pairs" else (MANY,):
        asked = masks(queries, keys) | pairs(torch.bfloat16, queries, keys)
        assert_contract("attention", {**drawn(torch.bfloat16, width, queries, keys), **asked[more]}, "triton")
        assert own(gpu)


@pytest.mark.parametrize("p", [pytest.param(0.0, marks=pytest.mark.slow), 0.3])
@pytest.mark.parametrize("width", [64, 128])
def test_groups_of_heads(width, p, gpu):
    given = {**drawn(torch.bfloat16, width, *MANY, heads=6), "mask": Mask.causal()}
    given["key"], given["value"] = (given[name][:, :2] for name in ("key", "value"))
    given |= {"dropout_p": p, "seed": torch.tensor(3)} if p else {}
    assert_contract("attention", given, "triton")
    assert own(gpu)


@pytest.mark.parametrize("more", ["causal", "lengths", "window", "keep", "float32 bias", "all pairs"])
def test_nan_that_nobody_sees(more, gpu):
    given = {**drawn(torch.bfloat16, 64, *MANY), **(masks(*MANY) | pairs(torch.bfloat16, *MANY))[more]}
    given = {name: t for name, t in given.items() if name not in ("dropout_p", "seed")}
    invariance.assert_hidden_keys_unread(given, "triton")
    assert own(gpu)


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("width", [64, 128])
def test_nan_where_it_is_seen(width, p, gpu):
    """A query row of NaN: NaN in that row, and in the gradients of the keys that it sees, of no others."""
    given = drawn(torch.bfloat16, width, 200, 200)
    given["query"][0, 1, 90] = math.nan
    leaves = [t.requires_grad_() for t in given.values()]
    more = {"dropout_p": p, "seed": torch.tensor(3)} if p else {}
    out = ops.attention(*leaves, Mask.causal(), **more, backend="triton")
    dq, dk, dv = torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert own(gpu) and dq[0, 1, 90].isnan().all()
    for gradient in (dk, dv):
        assert gradient[0, 0, :91].isnan().all() and gradient[0, 0, 91:].isfinite().all()
    dq[0, 1, 90] = 0.0
    assert dq.isfinite().all()


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("width", [64, 128])
def test_scores_of_any_size(width, p, gpu):
    """Rows so far from 0 that their offset is NaN are met once more."""
    for factor in (300.0, 1e4):
        given = drawn(torch.bfloat16, width, 100, 300)
        given["query"], given["key"] = given["query"] * factor, given["key"] * factor
        given |= {"dropout_p": p, "seed": torch.tensor(3)} if p else {}
        assert_contract("attention", given, "triton")
        assert own(gpu)


@pytest.mark.parametrize("more", ["dropout", "shared bias", pytest.param("bias", marks=pytest.mark.slow)])
@pytest.mark.parametrize("width", [64, 128])
def test_no_two_words_of_one_bank(width, more, gpu):
    q, k, v = heads(width)
    bias = torch.randn(1, 1 if more == "shared bias" else 2, 256, 256).bfloat16().requires_grad_()
    given = {"dropout_p": 0.1} if more == "dropout" else {"bias": bias}
    found = traffic(gpu, lambda: ops.attention(q, k, v, **given, backend="triton"))
    # of a row's numbers each is read alone in its sector, by three tiles of each row at most
    lost = dict.fromkeys(KERNELS, 28 * 3 * 2 * 256 * 3)
    if more == "shared bias":  # four tiles of keys; the sums of two members, 16 bytes by two instructions
        lost["attention_bwd_ahead_bias_kernel"] = 28 * 4 * 2 * 256 * 3 + 2 * 256 * 256 * 4
    for name in lost:
        assert_banks_are_free(name, found[name], most=1.0)
        if more != "dropout":
            assert_little_is_lost(name, found[name], most=1.0, lost=lost[name])


def test_repeats_bit_for_bit(gpu):
    """Whatever the order in which the machine's warps run."""
    given = {**drawn(torch.bfloat16, 64, *MANY), "dropout_p": 0.1, "seed": torch.tensor(5)}
    found = []
    for turn in range(2):
        gpu.begin(seed=gpu.seed + turn)
        leaves = [given[name].clone().requires_grad_() for name in ("query", "key", "value")]
        out = ops.attention(*leaves, dropout_p=0.1, seed=given["seed"], backend="triton")
        found.append(torch.autograd.grad(out, leaves, torch.ones_like(out)))
        assert own(gpu)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_which_calls_are_its_own():
    pick = _attention_bwd_ahead.pick_config
    for kernel in ("keys", "queries"):
        for dim in (33, 64, 65, 128):
            for length, pairs_have in ((1, 0), (64, 0), (65, 0), (65, 1), (65, 2), (65, 5)):
                for dropout in ("none", "read", "drawn"):
                    config = pick(kernel, dim, length, pairs_have, dropout, torch.bfloat16, (9, 0))
                    stays = config.block_n if kernel == "keys" else config.block_m
                    assert config.block_d >= dim and config.num_stages == RING.value
                    assert stays == 16 * config.num_warps  # a warp has 16 rows of a product
        others = [
            (32, 100, 0, "none", torch.bfloat16, (9, 0)), (129, 100, 0, "none", torch.bfloat16, (9, 0)),
            (64, 100, 0, "none", torch.float32, (9, 0)), (64, 100, 0, "drawn", torch.bfloat16, (8, 0)),
            (64, 100, 0, "drawn", torch.bfloat16, (10, 0)), (64, 64, 1, "none", torch.bfloat16, (9, 0)),
        ]  # fmt: skip
        assert not any(pick(kernel, *call) for call in others)


@pytest.mark.parametrize("queries, keys", [FEW, (160, 84)], ids=["short", "unaligned"])
@pytest.mark.parametrize("more", ["bias", "keep"])
def test_bias_and_keep_that_go_elsewhere(more, queries, keys, gpu):
    given = {**drawn(torch.bfloat16, 64, queries, keys), **pairs(torch.bfloat16, queries, keys)[more]}
    assert_contract("attention", given, "triton")
    assert OTHERS <= set(gpu.launches) and not KERNELS & set(gpu.launches)


def test_left_alone_elsewhere(monkeypatch, gpu):
    monkeypatch.setattr(attention_bwd, "AHEAD", False)
    assert_contract("attention", drawn(torch.bfloat16, 64, *FEW), "triton")
    assert not KERNELS & set(gpu.launches)
