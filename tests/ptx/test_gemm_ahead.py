"""ffn by Gluon's kernels for GPUs of compute capability 9, which run where AHEAD is set: _gemm_ahead.py and others."""

import itertools

import pytest
import torch

import tfm_kernels as tfk
from tests.ffn_semantics import block
from tests.ptx.chosen import assert_held, marked_cases, quick_where
from tests.ptx.test_traffic import assert_little_is_lost, traffic
from tfm_kernels.testing import assert_contract
from tfm_kernels.triton import _ffn_fwd_ahead, _gemm, _gemm_ahead, _launch, ffn_fwd

PRODUCT = "gemm_ahead_kernel"
OWN = {PRODUCT, "ffn_fwd_ahead_kernel", "ffn_bwd_ahead_kernel"}
OTHERS = {"gemm_kernel", "ffn_fwd_kernel", "ffn_bwd_kernel"}


@pytest.fixture(autouse=True)
def ahead(monkeypatch):
    """On a GPU of one multiprocessor every product has tiles enough, and a program has several."""
    monkeypatch.setattr(_gemm, "AHEAD", True)
    monkeypatch.setattr(_launch, "MULTIPROCESSORS", {9: 1})


def fitting(parameter):
    levels = parameter.values[0].levels
    widths = [levels[name] for name in ("e", "f", "eo") if levels[name] != "same"]
    return levels["dtype"] in ("bf16", "f16") and 0 not in levels["rows"] and not any(width % 8 for width in widths)


def taken(case):
    """Whether it is one of those that Gluon's kernels are for: laid out for copies of 16 bytes."""
    return case.levels["layout"] == "contiguous"


# quick: of one row, and one of many with a gate
FITTING = sorted(
    filter(fitting, marked_cases(("ffn",))),
    key=lambda p: p.values[0].levels["rows"] == (300,) and not p.values[0].levels["gate"],
)
CASES = quick_where(taken, 2, FITTING)


@pytest.mark.parametrize("case", CASES)
def test_contract(case, gpu):
    assert_held(case, "triton", gpu)
    assert not taken(case) or OWN <= set(gpu.launches) and not OTHERS & set(gpu.launches)


@pytest.mark.parametrize(
    "dtype, gated, programs",
    [
        (torch.bfloat16, False, 2), (torch.float16, True, 1),
        *(pytest.param(torch.bfloat16, gated, 3, marks=pytest.mark.slow) for gated in (False, True)),
    ],
    ids=str,
)  # fmt: skip
def test_many_tiles(dtype, gated, programs, monkeypatch, gpu):
    """Several tiles a program, whole and not, of more steps than the ring has places and of fewer."""
    monkeypatch.setattr(_launch, "MULTIPROCESSORS", {9: programs})
    given = block(136, 328, 264 if gated else 520, 72, dtype, gated)
    given["dropout_rows"] = torch.arange(136) * 3 + 2**33
    assert_contract("ffn", given, "triton")
    assert OWN <= set(gpu.launches) and not {"ffn_fwd_kernel", "ffn_bwd_kernel"} & set(gpu.launches)


def factors(M, N, K, a_k_inner, b_k_inner, dtype, seed=0):
    """Small integers, whose sums are exact, and all of their product."""
    g = torch.Generator().manual_seed(seed + K)
    a, b = (torch.randint(-2, 3, size, generator=g) for size in ((M, K), (N, K)))
    c = a @ b.T
    a, b = (t.to(dtype) if inner else t.T.contiguous().to(dtype) for t, inner in ((a, a_k_inner), (b, b_k_inner)))
    return a, b, c.to(dtype)


def multiplied(a, b, M, N, K, a_k_inner, b_k_inner, **more):
    """gemm(), which is to have taken the kernel."""
    config = _gemm.pick_config(M, N, "half", True, (9, 0))
    return _gemm.gemm(a, b, config, "half", True, a_k_inner=a_k_inner, b_k_inner=b_k_inner, **more)


# rows, columns, k: a tile and less, edges in each direction, k of a part of a step to more than two rounds of the ring
SIZES = ((128, 256, 64), (8, 8, 8), (200, 264, 72), (136, 520, 584), (304, 24, 0))


@pytest.mark.parametrize("M, N, K", SIZES)
@pytest.mark.parametrize("inner", [(True, True), (True, False), (False, False), (False, True)], ids=str)
def test_products_are_exact(inner, M, N, K, gpu):
    a, b, expected = factors(M, N, K, *inner, torch.bfloat16)
    assert torch.equal(multiplied(a, b, M, N, K, *inner), expected)
    assert gpu.launches == [PRODUCT]


@pytest.mark.parametrize("b_k_inner", [True, False])
def test_two_products_and_a_bias(b_k_inner, gpu):
    M, N, K = 200, 264, 136
    a, b, first = factors(M, N, K, True, b_k_inner, torch.float16)
    a2, b2, second = factors(M, N, K, True, b_k_inner, torch.float16, seed=1)
    bias = torch.randint(-9, 9, (N,), generator=torch.Generator().manual_seed(1)).half() if b_k_inner else None
    found = multiplied(a, b, M, N, K, True, b_k_inner, a2=a2, b2=b2, bias=bias)
    assert torch.equal(found, first + second + (0 if bias is None else bias)) and gpu.launches == [PRODUCT]


@pytest.mark.parametrize("inner", [(False, False), (True, True)], ids=str)
def test_cut_sums(inner, monkeypatch, gpu):
    """Few tiles and many k: three parts, of which the last is shorter, and a part of a step of that."""
    monkeypatch.setattr(_launch, "MULTIPROCESSORS", {9: 3})
    monkeypatch.setattr(_gemm_ahead, "LEAST_K", 64)
    M, N, K = 96, 136, 1000
    a, b, expected = factors(M, N, K, *inner, torch.bfloat16)
    assert torch.equal(multiplied(a, b, M, N, K, *inner), expected)
    assert gpu.launches == [PRODUCT, "sum_rows_kernel"]


def test_rows_far_apart_and_nothing_beyond_edges(gpu):
    """NaN surrounds the factors, and rows begin at other multiples of 16 bytes than they end."""
    M, N, K = 136, 264, 72
    a, b, expected = factors(M, N, K, True, True, torch.bfloat16)
    wide = lambda t, pad: torch.nn.functional.pad(t, (8, pad, 2, 2), value=float("nan"))[2:-2, 8 : 8 + K]
    assert torch.equal(multiplied(wide(a, 24), wide(b, 40), M, N, K, True, True), expected)


def test_any_order_of_groups_gives_the_same_bits(gpu):
    given = block(200, 136, 264, 40, torch.bfloat16)
    seed, p = given.pop("seed"), given.pop("dropout_p")
    call = [given[name] for name in ("x", "w1", "b1", "w2", "b2")]
    found = []
    for order in range(4):
        gpu.begin(seed=order)
        found.append(ffn_fwd.ffn_fwd(*call, None, 1, p, seed, None, True))
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("activation, gated", [("gelu", False), ("silu", True)])
def test_traffic(activation, gated, gpu):
    """Whole sectors, and no two words of one bank."""
    sizes = {"x": (128, 128), "w1": (256, 128), "b1": (256,), "w2": (128, 256), "gate": (256, 128)}
    given = {name: torch.randn(size, dtype=torch.bfloat16).requires_grad_() for name, size in sizes.items()}
    call = lambda: tfk.ops.ffn(
        given["x"], given["w1"], given["b1"], given["w2"], None, gate=given["gate"] if gated else None, dropout_p=0.1,
        activation=activation, backend="triton",
    )  # fmt: skip
    found = traffic(gpu, call)
    for name in OWN:
        assert_little_is_lost(name, found[name], most=1.0)


def test_which_calls_are_its_own(monkeypatch):
    monkeypatch.setattr(_launch, "MULTIPROCESSORS", {8: 108, 9: 132, 10: 148})
    pick = _gemm_ahead.pick_config
    own = (8192, 4096, 1024, True, True, torch.bfloat16, (9, 0))
    config = pick(*own)
    assert (config.programs, config.splits) == (132, 1) and config.num_stages == _gemm_ahead.RING.value
    assert config.block_m == 2 * _gemm_ahead.ROWS.value and config.num_warps == _gemm_ahead.WARPS.value
    for at, other in ((0, 128), (0, 0), (4, False), (5, torch.float32), (6, (8, 0)), (6, (10, 0))):
        assert pick(*own[:at], other, *own[at + 1 :]) is None
    small = (1024, 1024, 8192, True, True, torch.float16, (9, 0))
    assert pick(*small).splits == 4 and pick(*small).programs == 128
    assert pick(*small[:3], False, *small[4:]) is None and pick(*small[:2], 1024, *small[3:]) is None
    with monkeypatch.context() as changed:
        changed.setattr(_gemm_ahead, "LEAST", 0)
        assert pick(8, 8, 8, *own[3:]).programs == 1 and pick(0, 8, 8, *own[3:]) is None
    for M, F, gated in itertools.product((100, 8192), (64, 4096), (False, True)):
        config = _ffn_fwd_ahead.pick_config(M, F, gated, True, torch.bfloat16, (9, 0))
        assert (config is None) == (M == 100 or F == 64)


def test_left_alone_elsewhere(monkeypatch, gpu):
    monkeypatch.setattr(_gemm, "AHEAD", False)
    assert_contract("ffn", block(200, 40, 320, 72, torch.bfloat16), "triton")
    assert OTHERS <= set(gpu.launches) and not OWN & set(gpu.launches)
