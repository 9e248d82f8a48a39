"""linear_cross_entropy's Triton kernels, interpreted: the numeric contract, tiles, ignored rows, chunks, refusals."""

import itertools
import math

import pytest
import torch

import tfm_kernels as tfk
from tests.cases import CASES, report_case
from tests.interpreter.launches import chosen
from tests.ops import test_linear_cross_entropy as semantics
from tests.ops.test_linear_cross_entropy import REDUCTIONS, call, run
from tfm_kernels import _library
from tfm_kernels.ops.linear_cross_entropy import BWD, FWD
from tfm_kernels.testing import assert_contract, invariance
from tfm_kernels.testing.derivative import assert_opcheck
from tfm_kernels.triton import _cross_entropy, _gemm, _launch, linear_cross_entropy_bwd, linear_cross_entropy_fwd

LOSSES = [case for case in CASES if case.op == "linear_cross_entropy" and case.levels["dtype"] != "f64"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FEW = DTYPES[:2]
BF16_FIRST = [DTYPES[1], *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in (DTYPES[0], DTYPES[2]))]


def steps(case):
    """Tiles of the call's products times their steps along k, about: what the interpreter's time follows."""
    size = case.levels
    rows, deep = torch.Size(size["rows"]).numel(), 16 if size["dtype"] == "f32" else 64
    tile = 64 if deep == 64 or not size["k"] % 8 else 32
    count = lambda n, by=tile: -(-n // by)
    m, k, v = count(rows), count(size["k"]), count(size["v"])
    return m * v * count(size["k"], deep) * 2 + m * k * count(size["v"], deep) + v * k * count(rows, deep)


def marked(case):
    return pytest.param(case, id=case.id, marks=pytest.mark.slow if steps(case) > 45 else ())


@pytest.mark.parametrize("case", [marked(case) for case in LOSSES])
def test_contract(case):
    report_case(case, "triton").raise_broken()


def test_there_are_enough_cases():
    quick = [case for case in LOSSES if not marked(case).marks]
    assert len(quick) >= 80 and len(LOSSES) >= 140
    for factor in ("dtype", "bias", "ignored", "ignore_index", "label_smoothing", "reduction", "layout", "data"):
        assert {case.levels[factor] for case in quick} == {case.levels[factor] for case in LOSSES}, factor


@pytest.fixture
def launches(monkeypatch):
    picks = [(module, "pick_config") for module in (linear_cross_entropy_fwd, linear_cross_entropy_bwd)]
    return chosen(monkeypatch, *picks, (_gemm, "pick_split"))


@pytest.mark.parametrize("dtype", FEW)
def test_largest_tiles_and_few_programs(dtype, launches, monkeypatch):
    """A GPU of one multiprocessor takes the largest tile, and several to a program."""
    monkeypatch.setattr(_launch, "MULTIPROCESSORS", {9: 1})
    assert_contract("linear_cross_entropy", call((270,), 40, 300, dtype, label_smoothing=0.2), "triton")
    half = dtype == torch.bfloat16
    tile = (128 if half else 64, 128)
    assert launches == {
        ("linear_cross_entropy_fwd", *tile, half), ("linear_cross_entropy_bwd", *tile, False),
        ("_gemm", 128, 256 if half else 128, False),
    }  # fmt: skip


@pytest.mark.parametrize("dtype", FEW)
def test_chunks_of_classes_and_cut_sums(dtype, launches, monkeypatch):
    """dx is added up over chunks, each cut in parts; dweight's sum over rows is cut; V is no multiple of 8."""
    monkeypatch.setattr(linear_cross_entropy_bwd, "CHUNK_BYTES", 1)
    monkeypatch.setattr(_gemm, "LEAST_K", 64)
    assert_contract("linear_cross_entropy", call((150,), 16, 603, dtype, reduction="none"), "triton")
    assert ("_gemm", 128, 128, True) in launches


@pytest.mark.parametrize("dtype", FEW)
def test_chunks_change_dx_by_its_order_of_addition_alone(dtype, monkeypatch):
    given = call((40,), 24, 520, dtype, reduction="none")
    whole = run(given, "triton")
    monkeypatch.setattr(linear_cross_entropy_bwd, "CHUNK_BYTES", 1)
    found = run(given, "triton")
    for place in (0, 2, 3):  # loss, dweight, dbias
        assert torch.equal(found[place], whole[place])
    assert_contract("linear_cross_entropy", given, "triton")


@pytest.mark.parametrize("dtype", BF16_FIRST)
def test_tails_of_tiles(dtype):
    semantics.test_contract("triton", dtype)


@pytest.mark.parametrize("dtype", FEW)
def test_leading_axes_are_rows(dtype):
    semantics.test_leading_axes_are_rows("triton", dtype)


@pytest.mark.parametrize("dtype, reduction", [(torch.float32, "mean"), (torch.bfloat16, "none")])
def test_what_is_ignored_is_not_read(dtype, reduction):
    semantics.test_what_is_ignored_is_not_read("triton", dtype, reduction)


def test_rows_that_count_are_found_in_order(monkeypatch):
    """By steps of 16 rows; ignore_index may be any int64."""
    monkeypatch.setattr(_cross_entropy, "BLOCK", 16)
    g = torch.Generator().manual_seed(2)
    for rows, ignored in itertools.product((1, 15, 16, 17, 100), (-100, 0, 3, 2**63 - 1, -(2**63))):
        target = torch.randint(4, (rows, 2), generator=g)[:, 0]
        target[torch.rand(rows, generator=g) < 0.5] = ignored
        losses = [torch.full((rows,), math.nan) for _ in range(2)]
        found, count = _cross_entropy.live_rows(target, ignored, losses)
        expected = (target != ignored).nonzero()[:, 0]
        assert torch.equal(found[:count], expected) and int(count) == len(expected)
        for t in losses:
            assert not t[target == ignored].any() and bool(t[target != ignored].isnan().all())


def test_ignored_rows_cost_no_tile(monkeypatch):
    """One of 1000 rows counts: as many tiles are loaded as for a call of one row."""
    loads = []
    product = _cross_entropy.product.fn if hasattr(_cross_entropy.product, "fn") else _cross_entropy.product
    monkeypatch.setattr(_cross_entropy, "product", lambda *args: loads.append(1) or product(*args))
    monkeypatch.setattr(_launch, "MULTIPROCESSORS", {9: 1})
    given = call((1000,), 8, 40, torch.bfloat16, ignored=0, reduction="sum")
    given["target"][torch.arange(1000) != 777] = -100
    found, among_others = run(given, "triton"), len(loads)
    one = given | {"x": given["x"].detach()[777:778].requires_grad_(), "target": given["target"][777:778]}
    alone = run(one, "triton")
    assert among_others == 2 == len(loads) - among_others
    assert torch.equal(found[1][777:778], alone[1]) and not found[1][:777].any() and not found[1][778:].any()
    for place in (0, 2, 3):
        assert torch.equal(found[place], alone[place])


@pytest.mark.parametrize("dtype, label_smoothing", [(torch.float32, 0.1), (torch.bfloat16, 0.0)])
def test_all_rows_ignored(dtype, label_smoothing):
    semantics.test_all_rows_ignored("triton", dtype, label_smoothing)


@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_no_rows(shape):
    semantics.test_no_rows("triton", shape)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_no_width(reduction):
    """Logits are the bias."""
    assert_contract("linear_cross_entropy", call((4,), 0, 11, torch.float32, reduction=reduction), "triton")


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_huge_logits_do_not_overflow(sign):
    semantics.test_huge_logits_do_not_overflow("triton", sign)


@pytest.mark.parametrize("dtype", BF16_FIRST)
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_in_its_row(dtype, number):
    semantics.test_what_is_not_finite_stays_in_its_row("triton", dtype, number)


@pytest.mark.parametrize("dtype", FEW)
def test_nothing_stands_behind_the_last_class(dtype):
    """There z is 0, far above all that there is, and products of aligned rows read up to a multiple of 8."""
    given = call((9,), 8, 131, dtype, reduction="none")
    given["bias"] = (given["bias"].detach() - 1e4).requires_grad_()
    assert all(bool(t.isfinite().all()) for t in run(given, "triton"))
    assert_contract("linear_cross_entropy", given, "triton")


@pytest.mark.parametrize("together", [1, 32])
def test_classes_that_cannot_be(together, monkeypatch):
    """A bias of -inf takes a class out, as one does whose power is 0 in float32; whole tiles hold nothing else."""
    monkeypatch.setattr(linear_cross_entropy_fwd, "JOIN_PARTS", together)
    given, found = call((9,), 6, 300, torch.float32, reduction="none"), []
    given["target"] = torch.where(given["target"] == -100, -100, given["target"].clamp(min=90, max=150))
    for out in (-math.inf, -1e30):
        bias = given["bias"].detach().clone()
        bias[190:] = bias[:70] = out
        found.append(run(given | {"bias": bias.requires_grad_()}, "triton"))
    for a, b in zip(*found, strict=True):
        assert bool(a.isfinite().all()) and torch.equal(a, b)


@pytest.mark.parametrize("number", [11, -1, 2**40, -(2**63)])
def test_a_target_that_is_no_class_gives_nan(number):
    """In its row: looking first would have a GPU's host wait."""
    given = call((5,), dtype=torch.float32, ignored=0, reduction="none")
    given["target"][3] = number
    loss, dx, *_ = run(given, "triton")
    others = torch.arange(5) != 3
    assert bool(loss[others].isfinite().all() and dx[others].isfinite().all())
    assert bool(loss[3].isnan() and dx[3].isnan().all())


@pytest.mark.parametrize("dtype", BF16_FIRST)
def test_any_subset_of_gradients(dtype):
    semantics.test_any_subset_of_gradients("triton", dtype)


@pytest.mark.parametrize("dtype", FEW)
def test_views_give_the_bits_of_contiguous_tensors(dtype):
    given = call((9,), 40, 24, dtype, reduction="none", label_smoothing=0.1)
    invariance.assert_view_equals_contiguous("linear_cross_entropy", given, "triton")


def test_opcheck():
    """torch.library.opcheck of both operators."""
    given = call((9,), dtype=torch.float32, label_smoothing=0.1)
    checked = assert_opcheck("linear_cross_entropy", given, "triton")
    assert checked == [f"tfm_kernels::linear_cross_entropy_{way}_triton" for way in ("fwd", "bwd")]


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiles_whole(reduction):
    """To the bits of the plain call."""
    torch.compiler.reset()
    compiled = torch.compile(tfk.ops.linear_cross_entropy, fullgraph=True, backend="eager")
    given = call((3, 5), dtype=torch.float32, reduction=reduction, label_smoothing=0.1)
    for a, b in zip(run(given, "triton", function=compiled), run(given, "triton"), strict=True):
        assert torch.equal(a, b)


def test_what_is_saved_for_the_backward_has_no_logits():
    saved, given = [], call((64,), 8, 160, torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        tfk.ops.linear_cross_entropy(**given, backend="triton")
    assert saved and max(shape.numel() for shape in saved) == 160 * 8


def test_gradients_that_a_forward_left_are_refused():
    given = call((9,), dtype=torch.float32)
    x, weight, bias, target = (given[name].detach() for name in ("x", "weight", "bias", "target"))
    with pytest.raises(ValueError, match=r"save_x, save_weight and save_bias must be False"):
        FWD["triton"](x, weight, bias, target, -100, 0.0, True, False, False)
    rest = (x, weight, bias, target, x[:, 0], x, x[:0, 0], x[:0, 0], -100, 0.0, True, True, True)
    with pytest.raises(ValueError, match=r"gx, gweight and gbias must be empty"):
        BWD["triton"](x[:, 0], *rest)


def test_what_it_cannot_run():
    given = call((9,))
    with pytest.raises(tfk.BackendError, match="has no float64 kernels"):
        tfk.ops.linear_cross_entropy(**given, backend="triton")
    x, weight = (given[name].detach().float() for name in ("x", "weight"))
    assert _library.triton_interprets()
    assert "-> triton" not in tfk.explain("linear_cross_entropy", x, weight, given["target"])
    with pytest.raises(ValueError, match=r"label_smoothing must lie in \[0, 1\], got 2.0"):
        FWD["triton"](x, weight, None, given["target"], -100, 2.0, False, False, False)
