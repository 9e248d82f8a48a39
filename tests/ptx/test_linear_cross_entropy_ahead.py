"""linear_cross_entropy by Gluon's kernels for GPUs of compute capability 9, which run where AHEAD is set."""

import pytest
import torch

from tests.cases import CASES
from tests.ptx.chosen import assert_held
from tests.ptx.test_gemm_ahead import multiplied
from tfm_kernels.triton import _gemm, _gemm_ahead, _launch

PRODUCT = "gemm_ahead_kernel"
OWN = {PRODUCT}
OTHERS = {"gemm_kernel"}
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
