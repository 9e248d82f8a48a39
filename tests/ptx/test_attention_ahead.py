"""_attention_fwd_ahead.py, Gluon's kernel for GPUs of compute capability 9, which runs where AHEAD is set."""

import pytest
import torch

from tests.cases import report_case
from tests.ptx.chosen import marked_cases, quick_where
from tfm_kernels import Mask
from tfm_kernels.testing import assert_contract, invariance
from tfm_kernels.triton import _attention_fwd_ahead, _launch, attention_fwd

KERNEL = "attention_fwd_ahead_kernel"
OTHERS = {"attention_fwd_kernel", "attention_fwd_few_kernel"}


@pytest.fixture(autouse=True)
def ahead(monkeypatch):
    monkeypatch.setattr(attention_fwd, "AHEAD", True)


def fitting(parameter):
    levels = parameter.values[0].levels
    return levels["dtype"] in ("bf16", "f16") and levels["d"] > 32


def taken(case):
    """Whether it is one of those that Gluon's kernels are for: of many queries, laid out for copies of 16 bytes."""
    tokens = case.levels.get("lengths_qk", case.levels.get("segments"))
    return case.levels["layout"] in ("contiguous", "token_major") and tokens in ((150, 200), "with_empty", "ragged")


CASES = [
    parameter
    for ops, count in ((("attention",), 3), (("attention_varlen",), 2))
    for parameter in quick_where(taken, count, list(filter(fitting, marked_cases(ops))))
]


@pytest.mark.parametrize("case", CASES)
def test_contract(case, gpu):
    report_case(case, "triton").raise_broken()
    empty = any(isinstance(level, tuple) and 0 in level for level in case.levels.values())
    launched = {KERNEL, *OTHERS} & set(gpu.launches)
    assert len(launched) == 1 or empty or case.levels.get("segments") in ("no_keys", "none")
    assert not taken(case) or launched == {KERNEL}


def drawn(dtype, width, queries, keys, heads=2):
    g = torch.Generator().manual_seed(width + keys)
    new = lambda heads, length: torch.randn(1, heads, length, width, generator=g).to(dtype)
    return {"query": new(heads, queries), "key": new(heads // 2, keys), "value": new(heads // 2, keys)}


def keep_matrix(queries, keys):
    """Some pairs; of a whole tile in the middle none, nor of a few keys within another."""
    keep = torch.rand(1, 1, queries, keys, generator=torch.Generator().manual_seed(keys)) < 0.6
    keep[..., 64:128] = False
    keep[..., 36:38] = False
    return Mask.keep(keep)


MANY = (150, 464)  # queries and keys: tiles whole and not, more than twice around the ring
MORE = {
    "plain": {},
    "causal": {"mask": Mask.causal()},
    "window": {"mask": Mask.window(100, 20)},
    "lengths": {"mask": Mask.lengths(torch.tensor([201]))},
    "dropout": {"dropout_p": 0.3, "seed": torch.tensor(2**40 + 3)},
    "bias": {"bias": torch.randn(1, 1, *MANY, generator=torch.Generator().manual_seed(1))},
    "keep": {"mask": keep_matrix(*MANY)},
    "all": {
        "mask": Mask.causal("bottom_right") & keep_matrix(*MANY), "dropout_p": 0.3, "seed": torch.tensor(7),
        "bias": torch.randn(1, 2, *MANY, generator=torch.Generator().manual_seed(2)),
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "dtype, width, more",
    [
        pytest.param(dtype, width, more, marks=() if width == 64 or more in ("all", "plain") else pytest.mark.slow)
        for dtype, width in ((torch.bfloat16, 64), (torch.float16, 104), (torch.bfloat16, 128))
        for more in MORE
    ],
    ids=str,
)
def test_many_tiles(dtype, width, more, gpu):
    given = {**drawn(dtype, width, *MANY), **MORE[more]}
    if "bias" in given and more == "all":
        given["bias"] = given["bias"].to(dtype)
    assert_contract("attention", given, "triton", backward=False)
    assert KERNEL in gpu.launches and not OTHERS & set(gpu.launches)


@pytest.mark.parametrize(
    "more", [*(pytest.param(m, marks=pytest.mark.slow) for m in ("lengths", "keep")), "causal", "bias", "all"]
)
def test_nan_that_nobody_sees(more, gpu):
    given = {**drawn(torch.bfloat16, 64, *MANY), **MORE[more]}
    if more == "bias":
        given["bias"] = given["bias"].clone()
        given["bias"][..., 100:103] = -torch.inf  # in the middle of a tile, of fewer queries than it has rows
    given = {
        name: t.bfloat16() if name == "bias" else t for name, t in given.items() if name not in ("dropout_p", "seed")
    }
    invariance.assert_hidden_keys_unread(given, "triton")
    assert KERNEL in gpu.launches


@pytest.mark.parametrize("width", [64, 128])
def test_scores_of_any_size(width, gpu):
    for factor in (300.0, 1e4):
        given = drawn(torch.bfloat16, width, 100, 300)
        given["query"], given["key"] = given["query"] * factor, given["key"] * factor
        assert_contract("attention", given, "triton", backward=False)
    assert KERNEL in gpu.launches


def test_which_calls_are_its_own():
    pick = _attention_fwd_ahead.pick_config
    for dim in (33, 64, 65, 128):
        for extras, biased in (("none", False), ("aligned", False), ("aligned", True)):
            for queries in (64, 65):
                config = pick(dim, queries, extras, biased, torch.bfloat16, (9, 0))
                assert config.num_stages == _attention_fwd_ahead.RING.value and config.block_d >= dim
                assert config.block_m == 16 * config.num_warps  # a warp has 16 rows of a product
    others = [
        (32, 100, "none", False, torch.bfloat16, (9, 0)), (129, 100, "none", False, torch.bfloat16, (9, 0)),
        (64, 100, "unaligned", False, torch.bfloat16, (9, 0)), (64, 100, "none", False, torch.float32, (9, 0)),
        (64, 100, "none", False, torch.bfloat16, (8, 0)), (64, 100, "none", False, torch.bfloat16, (10, 0)),
    ]  # fmt: skip
    assert not any(pick(*call) for call in others)


def test_left_alone_elsewhere(monkeypatch, gpu):
    monkeypatch.setattr(attention_fwd, "AHEAD", False)
    assert_contract("attention", drawn(torch.bfloat16, 64, *MANY), "triton", backward=False)
    assert KERNEL not in gpu.launches and _launch.capability(torch.zeros(1)) == (9, 0)
