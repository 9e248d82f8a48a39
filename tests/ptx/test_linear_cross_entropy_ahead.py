"""linear_cross_entropy by Gluon's kernels for GPUs of compute capability 9, which run where AHEAD is set."""

import math

import pytest
import torch

import tfm_kernels as tfk
from tests.cases import CASES
from tests.ops.test_linear_cross_entropy import NAMES, call, run
from tests.ptx.chosen import assert_held
from tests.ptx.test_gemm_ahead import multiplied
from tests.ptx.test_traffic import assert_little_is_lost, traffic
from tfm_kernels.testing import assert_contract
from tfm_kernels.triton import (
    _gemm,
    _gemm_ahead,
    _launch,
    _linear_cross_entropy_bwd_ahead,
    _linear_cross_entropy_fwd_ahead,
    _replay,
    linear_cross_entropy_bwd,
)

PRODUCT = "gemm_ahead_kernel"
OWN = {PRODUCT, "linear_cross_entropy_fwd_ahead_kernel", "linear_cross_entropy_bwd_ahead_kernel"}
OTHERS = {"gemm_kernel", "linear_cross_entropy_fwd_kernel", "linear_cross_entropy_bwd_kernel"}
NAN = float("nan")


@pytest.fixture(autouse=True)
def ahead(monkeypatch):
    """On a GPU of one multiprocessor every product has tiles enough, and a program has several."""
    monkeypatch.setattr(_gemm, "AHEAD", True)
    monkeypatch.setattr(_launch, "MULTIPROCESSORS", {9: 1})


def fitting(case):
    levels = case.levels
    return levels["dtype"] in ("bf16", "f16") and not levels["k"] % 8 and 0 not in levels["rows"]


def marked(case):
    """What is slow: calls of many classes, and those that may be taken by other kernels."""
    quick = case.levels["layout"] == "contiguous" and case.levels["v"] < 1000
    return pytest.param(case, id=case.id, marks=() if quick else pytest.mark.slow)


LOSSES = [case for case in CASES if case.op == "linear_cross_entropy" and fitting(case)]


@pytest.mark.parametrize("case", [marked(case) for case in LOSSES])
def test_contract(case, gpu):
    assert_held(case, "triton", gpu)
    unaligned = case.levels["layout"] != "contiguous"
    assert unaligned or OWN <= set(gpu.launches) and not OTHERS & set(gpu.launches)


def test_there_are_enough_cases():
    assert len(LOSSES) >= 25 and sum(not marked(case).marks for case in LOSSES) >= 4


def assert_all_own(gpu):
    assert OWN <= set(gpu.launches) and not OTHERS & set(gpu.launches)


@pytest.mark.parametrize(
    "dtype, biased, label_smoothing, programs",
    [
        (torch.bfloat16, True, 0.1, 2),
        *(pytest.param(torch.float16, *more, marks=pytest.mark.slow) for more in ((False, 0.0, 1), (True, 0.0, 3))),
        *(pytest.param(torch.bfloat16, *more, marks=pytest.mark.slow) for more in ((False, 1.0, 3), (True, 0.3, 5))),
    ],
    ids=str,
)  # fmt: skip
def test_many_tiles(dtype, biased, label_smoothing, programs, monkeypatch, gpu):
    """Several a program, whole and not; steps whole and not; parts of several tiles; a chunk is one tile of classes."""
    monkeypatch.setattr(_launch, "MULTIPROCESSORS", {9: programs})
    monkeypatch.setattr(_gemm_ahead, "LEAST", 0)
    monkeypatch.setattr(linear_cross_entropy_bwd, "CHUNK_BYTES", 1)
    given = call((250,), 136, 603, dtype, label_smoothing=label_smoothing, reduction="none")
    assert_contract("linear_cross_entropy", given if biased else given | {"bias": None}, "triton")
    assert_all_own(gpu)


def test_what_is_ignored_is_not_read(gpu):
    given = call((140,), 40, 300, torch.bfloat16, label_smoothing=0.1)
    ignored = given["target"] == -100
    clean = run(given, "triton")
    x = given["x"].detach().masked_fill(ignored.unsqueeze(1), NAN).requires_grad_()
    assert ignored[0] and not clean[1][ignored].any()
    for a, b in zip(run(given | {"x": x}, "triton"), clean, strict=True):
        assert torch.equal(a, b)
    assert_all_own(gpu)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_all_rows_ignored(label_smoothing, gpu):
    """No tile of any kernel; what they would have written is 0."""
    given = call((200,), 40, 300, torch.bfloat16, ignored=1, reduction="sum", label_smoothing=label_smoothing)
    assert not any(bool(t.any()) for t in run(given, "triton"))
    assert_all_own(gpu)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_in_its_row(number, gpu):
    given = call((70,), 40, 130, torch.bfloat16, ignored=0, reduction="none")
    clean_loss, clean_dx, *_ = run(given, "triton")
    x = given["x"].detach().clone()
    x[40, 7] = number
    loss, dx, *_ = run(given | {"x": x.requires_grad_()}, "triton")
    others = torch.arange(70) != 40
    assert torch.equal(loss[others], clean_loss[others]) and torch.equal(dx[others], clean_dx[others])
    assert bool(dx[40].isnan().all())
    assert bool(loss[40].isnan() if math.isnan(number) else not loss[40].isfinite())


def test_classes_that_cannot_be(monkeypatch, gpu):
    """A bias of -inf takes a class out, as one does whose power is 0; a thread or a tile has nothing else."""
    monkeypatch.setattr(linear_cross_entropy_bwd, "CHUNK_BYTES", 1)
    given, found = call((9,), 8, 1030, torch.bfloat16, reduction="none"), []
    given["target"] = torch.where(given["target"] == -100, -100, given["target"].clamp(min=600, max=700))
    for out in (-math.inf, -1e30):
        bias = given["bias"].detach().clone()
        bias[:300] = bias[512:570] = bias[760:] = out
        found.append(run(given | {"bias": bias.requires_grad_()}, "triton"))
    for a, b in zip(*found, strict=True):
        assert bool(a.isfinite().all()) and torch.equal(a, b)
    assert_all_own(gpu)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_nothing_stands_beyond_the_last_class_and_row(sign, gpu):
    """There z is 0, far above all that there is, or a bias whose power is infinite."""
    given = call((9,), 8, 131, torch.bfloat16, reduction="none", label_smoothing=0.2)
    given["bias"] = (given["bias"].detach() + sign * 1e4).requires_grad_()
    assert all(bool(t.isfinite().all()) for t in run(given, "triton"))
    assert_contract("linear_cross_entropy", given, "triton")
    assert_all_own(gpu)


@pytest.mark.parametrize("number", [300, -1, 2**40, 2**32 + 5, -(2**63)])
def test_a_target_that_is_no_class_gives_nan(number, gpu):
    given = call((5,), 8, 300, torch.float16, ignored=0, reduction="none")
    given["target"][3] = number
    loss, dx, *_ = run(given, "triton")
    others = torch.arange(5) != 3
    assert bool(loss[others].isfinite().all() and dx[others].isfinite().all())
    assert bool(loss[3].isnan() and dx[3].isnan().all())


@pytest.mark.slow
def test_any_subset_of_gradients(gpu):
    given = call((70,), 40, 130, torch.bfloat16)
    everything = dict(zip(NAMES, run(given, "triton")[1:], strict=True))
    for names in (("x",), ("weight",), ("bias",), ("x", "weight"), ("weight", "bias")):
        some = {key: t.detach() if key in NAMES and key not in names else t for key, t in given.items()}
        for name, t in zip(names, run(some, "triton", names)[1:], strict=True):
            assert torch.equal(t, everything[name]), f"{name} of {names}"


def test_any_order_of_groups_gives_the_same_bits(gpu):
    given, found = call((140,), 72, 300, torch.bfloat16, label_smoothing=0.1), []
    for order in range(3):
        gpu.begin(seed=order)
        found.append(run(given, "triton"))
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_a_call_like_one_before_is_repeated(monkeypatch, gpu):
    monkeypatch.setattr(_replay, "_found", {})
    given = call((140,), 72, 300, torch.bfloat16, label_smoothing=0.1)
    first, _, third = (run(given, "triton") for _ in range(3))
    assert _replay._found and all(isinstance(found, _replay.Replay) for found in _replay._found.values())
    assert all(torch.equal(a, b) for a, b in zip(first, third, strict=True))


@pytest.mark.parametrize("biased", [False, True])
def test_traffic(biased, gpu):
    """Whole sectors, and no two words of one bank."""
    given = call((128,), 128, 512, torch.bfloat16, ignored=0)
    call_of = lambda: tfk.ops.linear_cross_entropy(**given | ({} if biased else {"bias": None}), backend="triton")
    found = traffic(gpu, call_of)
    for name in OWN:
        assert_little_is_lost(name, found[name], most=1.0)


def test_which_calls_are_its_own(monkeypatch):
    monkeypatch.setattr(_launch, "MULTIPROCESSORS", {8: 108, 9: 132, 10: 148})
    own = (8192, 33708, 1024, True, torch.bfloat16, (9, 0))
    for pick in (_linear_cross_entropy_fwd_ahead.pick_config, _linear_cross_entropy_bwd_ahead.pick_config):
        assert pick(*own).ahead and pick(*own).programs == 132
        for at, other in ((0, 0), (1, 100), (3, False), (4, torch.float32), (5, (8, 0)), (5, (10, 0))):
            few = (100, *own[1:]) if at == 1 else own
            assert pick(*few[:at], other, *few[at + 1 :]) is None


@pytest.mark.parametrize("M, V", [(8192, 33708), (2048, 50257), (700, 128000), (128, 40000), (100000, 300)])
def test_parts_of_classes(M, V, monkeypatch):
    """Every program has nearly as much to do, and a thread writes its sums seldom."""
    monkeypatch.setattr(_launch, "MULTIPROCESSORS", {9: 132})
    config = _linear_cross_entropy_fwd_ahead.pick_config(M, V, 512, True, torch.bfloat16, (9, 0))
    tiles_m, tiles_v = -(-M // 128), -(-V // 256)
    run_of_tiles = -(-tiles_v // config.splits)
    assert run_of_tiles * (config.splits - 1) < tiles_v <= run_of_tiles * config.splits
    most = -(-tiles_m * config.splits // config.programs) * run_of_tiles
    assert config.programs == min(132, tiles_m * config.splits) and most <= 1.1 * tiles_m * tiles_v / 132 + 1


def test_left_alone_elsewhere(monkeypatch, gpu):
    monkeypatch.setattr(_gemm, "AHEAD", False)
    run(call((20,), 8, 40, torch.bfloat16), "triton")
    assert OTHERS <= set(gpu.launches) and not OWN & set(gpu.launches)


def of_some_classes(M, width, classes, count, dtype=torch.bfloat16):
    """dz of count rows, as the kernel before leaves it: zeros up to a multiple of 8 classes, then and below NaN."""
    g = torch.Generator().manual_seed(classes)
    dz = torch.full((M, classes + 40 - classes % 8), NAN)
    dz[:count] = torch.randint(-2, 3, (count, dz.shape[1]), generator=g).float()
    dz[:count, classes:] = 0
    dz[:, (classes + 7) // 8 * 8 :] = NAN
    return dz.to(dtype)[:, :classes], dz[:count, :classes]


def added(a, b, M, N, K, sums, **more):
    config = _gemm.pick_added(M, N, K, True, a.dtype, (9, 0))
    return _gemm.gemm(
        a, b, config, "half", True, a_k_inner=True, b_k_inner=False, padded=True, into=sums, **more
    )  # fmt: skip


# rows, rows that count, features, classes: a tile and less, edges, none at all
SIZES = ((300, 200, 264, 584), (128, 128, 256, 64), (9, 5, 8, 3), (140, 131, 24, 77), (40, 0, 16, 24))


@pytest.mark.parametrize("M, count, width, classes", SIZES)
def test_the_product_for_dx(M, count, width, classes, gpu):
    """Is added to the rows that count, of which the device knows how many; classes need not be a multiple of 8."""
    (dz, whole), g = of_some_classes(M, width, classes, count), torch.Generator().manual_seed(1)
    rows = torch.randperm(M, generator=g)
    weight = torch.randint(-2, 3, (classes, width), generator=g)
    sums = torch.randint(-9, 9, (1, M * width), generator=g).float()
    expected = sums.clone().view(M, width)
    expected[rows[:count]] += whole @ weight.float()
    wide = torch.nn.functional.pad(weight.bfloat16(), (8, 16, 1, 8), value=NAN)[1 : 1 + classes, 8 : 8 + width]
    found = added(dz, wide, M, width, classes, sums, rows=rows, count=torch.tensor(count))
    assert found is sums and torch.equal(sums.view(M, width), expected) and gpu.launches == [PRODUCT]


@pytest.mark.parametrize("M, count, width, classes", SIZES)
def test_the_product_for_dweight(M, count, width, classes, gpu):
    dz, whole = of_some_classes(M, width, classes, count, torch.float16)
    x = torch.randint(-2, 3, (M, width), generator=torch.Generator().manual_seed(1)).half()
    expected = whole.T @ x[:count].float()
    x[count:] = NAN
    given = {"padded": True, "count": torch.tensor(count)}
    assert torch.equal(multiplied(dz, x, classes, width, M, False, False, **given), expected.half())
    assert gpu.launches == [PRODUCT]


def test_cut_sums(monkeypatch, gpu):
    """Parts of the classes for dx, some of them of no class in a shorter call; parts of the rows, some of none."""
    monkeypatch.setattr(_launch, "MULTIPROCESSORS", {9: 4})
    monkeypatch.setattr(_gemm_ahead, "LEAST_K", 64)
    M, width, count = 300, 40, 100
    sums, expected = torch.zeros(4, 128 * width), torch.zeros(128, width)
    for classes in (320, 70):
        dz, whole = of_some_classes(128, width, classes, count)
        weight = torch.randint(-2, 3, (classes, width), generator=torch.Generator().manual_seed(1)).bfloat16()
        expected[:count] += whole @ weight.float()
        config = _gemm.pick_added(128, width, 320, True, dz.dtype, (9, 0))
        assert (config.splits, config.programs) == (4, 4)
        _gemm.gemm(
            dz, weight, config, "half", True, a_k_inner=True, b_k_inner=False, padded=True, count=torch.tensor(count),
            rows=torch.arange(128), into=sums,
        )  # fmt: skip
    assert torch.equal(sums.sum(0).view(128, width), expected) and gpu.launches == [PRODUCT] * 2
    dz, whole = of_some_classes(M, width, 77, count)
    x = torch.randint(-2, 3, (M, width), generator=torch.Generator().manual_seed(1)).bfloat16()
    found = multiplied(dz, x, 77, width, M, False, False, padded=True, count=torch.tensor(count))
    assert torch.equal(found, (whole.T @ x[:count].float()).bfloat16())
    assert gpu.launches[2:] == [PRODUCT, "sum_rows_kernel"]
