"""int8_linear's Triton kernels, interpreted: the numeric contract, every tile, parts of k, refusals."""

import math

import pytest
import torch

import tfm_kernels as tfk
from tests.interpreter.launches import chosen
from tests.ops import test_int8_linear as semantics
from tests.ops.test_int8_linear import SIZES, layer
from tfm_kernels import _library
from tfm_kernels.testing import assert_contract, invariance
from tfm_kernels.testing.contract import bits_equal
from tfm_kernels.triton import _int8, _int8_gemm, _launch

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WAYS = [False, True]  # dynamic
SMALL = [size for size in SIZES if math.prod(size) < 2 * 10**6]
LARGE = [pytest.param(size, marks=pytest.mark.slow) for size in SIZES if size not in SMALL]


def run(given):
    return tfk.ops.int8_linear(**given, backend="triton")


@pytest.mark.parametrize("dynamic", WAYS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [*SMALL, *LARGE], ids=str)
def test_contract(size, dtype, dynamic):
    for bias in (True, False):
        given = layer(*size, dtype, bias, dynamic)
        assert_contract("int8_linear", given, "triton", backward=False)


@pytest.fixture
def launches(monkeypatch):
    return chosen(monkeypatch, (_int8_gemm, "pick_config"))


# kind -> tiles (rows, features) of aligned factors, the largest first
TILES = {"half": [(256, 128), (128, 128), (64, 64), (16, 64)], "ieee": [(128, 128), (64, 64), (16, 64)]}


@pytest.mark.parametrize("dynamic", WAYS)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_every_tile(dtype, dynamic, launches, monkeypatch):
    """With as many multiprocessors as each is taken for, several tiles to a program, and with parts of k."""
    kind = "ieee" if dtype == torch.float32 and not dynamic else "half"
    for rows, multiprocessors in ((300, 1), (300, 6), (70, 8), (13, 1)):
        monkeypatch.setattr(_launch, "MULTIPROCESSORS", {9: multiprocessors})
        assert_contract("int8_linear", layer(rows, 48, 200, dtype, dynamic=dynamic), "triton", backward=False)
    assert {tile[1:3] for tile in launches} == set(TILES[kind])
    launches.clear()
    monkeypatch.setattr(_launch, "MULTIPROCESSORS", {9: 100})
    for rows, width in ((70, 400), (13, 400), (13, 401)):
        assert_contract("int8_linear", layer(rows, width, 75, dtype, dynamic=dynamic), "triton", backward=False)
    assert launches == {("_int8_gemm", 64, 64, True), ("_int8_gemm", 16, 64, True)}


@pytest.mark.parametrize("dynamic", WAYS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views_give_the_bits_of_contiguous_tensors(dtype, dynamic):
    given = layer(13, 24, 40, dtype, dynamic=dynamic)
    invariance.assert_view_equals_contiguous("int8_linear", given, "triton", backward=False)
    expected = run(given)
    assert expected.is_contiguous()
    assert torch.equal(run(given | {"x": given["x"].unsqueeze(1)}), expected.unsqueeze(1))
    turned = {name: torch.stack([given[name]] * 2, 1)[:, 0] for name in ("scale", "bias")}
    assert torch.equal(run(given | turned | {"weight": given["weight"].T.contiguous().T}), expected)


@pytest.mark.parametrize("size", [*SMALL, *LARGE], ids=str)
def test_the_product_of_integers_is_exact(size):
    semantics.test_the_product_of_integers_is_exact("triton", size)


@pytest.mark.parametrize("width", [63, 200, pytest.param(2**17, marks=pytest.mark.slow)])
def test_the_largest_integers(width):
    semantics.test_the_largest_integers("triton", width, torch.float32)


def test_halves_round_to_even():
    semantics.test_halves_round_to_even("triton")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_small_rows(dtype):
    semantics.test_small_rows("triton", dtype)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_in_its_row(value):
    semantics.test_what_is_not_finite_stays_in_its_row(value, "triton")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [40, 300, 1040, 5000])
def test_the_integers_are_those_of_the_definition(dtype, width):
    """And the steps, in float32: of ordinary rows, tiny ones, ones of zeros and ones that are not finite."""
    g = torch.Generator().manual_seed(width)
    sizes = torch.logspace(*((-9, 4) if dtype == torch.float16 else (-40, 37)), 11, dtype=torch.float64)
    x = (torch.randn(11, width, generator=g) * sizes.unsqueeze(1)).to(dtype)
    x[3], x[4, 5], x[5, width - 1], x[6, 0] = 0.0, math.nan, math.inf, -math.inf
    integers, step = _int8.round_rows(x)
    wide = x.float()
    largest = wide.abs().amax(1)
    steps = (largest / 127).masked_fill(~largest.isfinite(), math.nan)
    assert bits_equal(step.nan_to_num(-1.0), steps.nan_to_num(-1.0))
    live = largest.isfinite() & (largest >= 2.0**-119)
    expected = torch.round(wide * (torch.full_like(largest, 127) / largest).unsqueeze(1))[live]
    assert integers.dtype == torch.int8 and live.sum() == 6
    assert torch.equal(integers[live, :width].float(), expected) and not integers[~live].any()
    assert not integers[:, width:].any() and integers.shape[1] % 16 == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_do_not_depend_on_their_number(dtype):
    """A product of integers is exact, whichever tile it takes and however k is cut."""
    given = layer(100, 270, 53, dtype, dynamic=True)
    whole = run(given)
    for rows in (1, 16, 17, 65):
        assert torch.equal(run(given | {"x": given["x"][:rows]}), whole[:rows]), rows


@pytest.mark.parametrize("dynamic", WAYS)
@pytest.mark.parametrize("shape", [(0, 4, 5), (4, 0, 5), (40, 0, 5), (4, 3, 0), (0, 0, 0)])
def test_nothing_of_something(shape, dynamic):
    semantics.test_nothing_of_something("triton", shape, dynamic)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_of_16_bits_do_not_overflow(dtype):
    """They are scaled at the end: 65504 times 127, a thousand times, is no float16."""
    given = layer(3, 1000, 5, dtype)
    given |= {"x": torch.full((3, 1000), 60000.0).to(dtype), "weight": torch.full((5, 1000), 127, dtype=torch.int8)}
    given["scale"] = torch.full((5,), 2.0**-18)
    assert_contract("int8_linear", given, "triton", backward=False)


@pytest.mark.parametrize("dynamic", WAYS)
def test_opcheck(dynamic):
    operator = torch.ops.tfm_kernels.int8_linear_fwd_triton.default
    torch.library.opcheck(operator, tuple(layer(5, 12, 9, dynamic=dynamic).values()))


@pytest.mark.parametrize("dynamic", WAYS)
def test_compiles_whole(dynamic):
    """To the bits of the plain call."""
    torch.compiler.reset()
    compiled = torch.compile(tfk.ops.int8_linear, fullgraph=True, backend="eager")
    given = layer(25, 16, 8, dynamic=dynamic)
    assert torch.equal(compiled(**given, backend="triton"), run(given))


def test_what_it_cannot_run():
    given = layer(5, 8, 12)
    with pytest.raises(tfk.BackendError, match="has no float64 kernels"):
        run(layer(5, 8, 12, torch.float64))
    with pytest.raises(tfk.BackendError, match="computes no gradients; call it under torch.no_grad"):
        run(given | {"x": given["x"].requires_grad_()})
    with torch.no_grad():
        assert run(given).shape == (5, 12)
        assert _library.triton_interprets() and "-> cpu" in tfk.explain("int8_linear", **given)
        assert "proven on an H200" in tfk.explain("int8_linear", **given)
    x, weight, scale, bias, _ = (t.detach() if isinstance(t, torch.Tensor) else t for t in given.values())
    operator = torch.ops.tfm_kernels.int8_linear_fwd_triton
    for arguments, sentence in [
        ((x, weight[:, 1:], scale, bias), r"weight must have shape \(12, 8\), got \(12, 7\)"),
        ((x, weight, scale[1:], bias), r"scale must have shape \(12,\), got \(11,\)"),
        ((x, weight, scale, bias.double()), "bias must be one of"),
        ((x, weight, scale, bias.half()), "bias must be one of"),
        ((x[0], weight, scale, bias), "x and weight must have 2 dimensions, got 1 and 2"),
        ((x, weight[0], scale, bias), "x and weight must have 2 dimensions, got 2 and 1"),
        ((x, weight.float(), scale, bias), "weight must be one of"),
        ((x, weight, scale.double(), bias), "scale must be one of"),
        ((x, weight, scale, bias[1:]), r"bias must have shape \(12,\), got \(11,\)"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            operator(*arguments, False)
    wide = torch.zeros(1).expand(1, 2**17 + 1), torch.zeros(1, dtype=torch.int8).expand(1, 2**17 + 1)
    with pytest.raises(ValueError, match="x must have at most 131072 columns, got 131073"):
        operator(*wide, torch.ones(1), None, True)
    none = wide[0][:0]
    assert operator(none, wide[1], torch.ones(1), None, False).shape == (0, 1)
    assert operator(none[:, 1:], wide[1][:, 1:], torch.ones(1), None, True).shape == (0, 1)
