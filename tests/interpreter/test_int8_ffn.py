"""int8_ffn's Triton kernels, interpreted: the numeric contract, every tile, parts of k, the integers, refusals."""

import math

import pytest
import torch

import tfm_kernels as tfk
from tests.interpreter.launches import chosen
from tests.ops import test_int8_ffn as semantics
from tests.ops.test_int8_ffn import ACTIVATIONS, FEW, TILES, block
from tfm_kernels import _library
from tfm_kernels.testing import assert_contract, invariance
from tfm_kernels.testing.contract import bits_equal
from tfm_kernels.triton import _int8, _int8_gemm, _launch, int8_ffn_fwd

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WAYS = [False, True]  # gated
PARTS = (5, 400, 75, 24)  # the first product's k is cut
LARGE = [
    pytest.param(size, marks=pytest.mark.slow) for size in ((19, 400, 75, 24), (16, 129, 600, 300), FEW[2], *TILES[:3])
]


def run(given):
    return tfk.ops.int8_ffn(**given, backend="triton")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [*FEW[:2], PARTS, *LARGE], ids=str)
def test_contract(size, dtype):
    """Every activation, gated and not; of the small sizes each activation with one storage type gated."""
    for i, activation in enumerate(ACTIVATIONS):
        for gated in WAYS if size[0] > 5 else [(i + DTYPES.index(dtype)) % 2 == 0]:
            given = block(*size, dtype, (i + gated) % 2 == 0, gated, activation)
            assert_contract("int8_ffn", given, "triton", backward=False)


@pytest.fixture
def launches(monkeypatch):
    """Those of the first product."""
    return chosen(monkeypatch, (int8_ffn_fwd, "pick_config"))


# gated -> tiles (rows, features) of aligned factors
TILE_SIZES = {False: {(256, 128), (128, 128), (64, 64), (16, 64)}, True: {(128, 64), (64, 64), (16, 64)}}


@pytest.mark.parametrize("gated", WAYS)
def test_every_tile(gated, launches, monkeypatch):
    """With as many multiprocessors as each is taken for, several tiles to a program, and with parts of k."""
    for rows, multiprocessors in ((130, 1), (130, 3), (70, 8), (13, 1))[gated:]:
        monkeypatch.setattr(_launch, "MULTIPROCESSORS", {9: multiprocessors})
        given = block(rows, 48, 136, 8, torch.bfloat16, gated=gated, activation="silu")
        assert_contract("int8_ffn", given, "triton", backward=False)
    assert {tile[1:3] for tile in launches} == TILE_SIZES[gated]
    launches.clear()
    monkeypatch.setattr(_launch, "MULTIPROCESSORS", {9: 100})
    for rows, width in ((17, 260), (13, 260), (13, 261)):
        given = block(rows, width, 75, 9, torch.bfloat16, gated=gated, activation="silu")
        assert_contract("int8_ffn", given, "triton", backward=False)
    assert launches == {("int8_ffn_fwd", 64, 64, True), ("int8_ffn_fwd", 16, 64, True)}


@pytest.mark.parametrize("gated", WAYS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_relu_gives_the_bits_of_pytorchs_own_operations(dtype, gated):
    """Where the activation has no rounding of its own the hidden layer's float32 is aten's, and so are its integers."""
    for size in ((17, 64, 200, 24), PARTS, (5, 130, 520, 33)):
        given = block(*size, dtype, gated=gated, activation="relu")
        assert torch.equal(run(given), tfk.ops.int8_ffn(**given, backend="aten"))


def hidden(given):
    """What the first product leaves for a call: h with its padding, and the largest elements of its blocks."""
    integers, step = _int8.round_rows(given["x"])
    ends = {"scale1_ptr": given["scale1"], "gate_scale_ptr": given.get("gate_scale"), "b1_ptr": given["b1"]}
    index = ACTIVATIONS.index(given["activation"])
    width = given["x"].shape[1]
    return int8_ffn_fwd._hidden(integers, given["w1"], given.get("gate"), width, index, step_ptr=step, **ends)


@pytest.mark.parametrize("gated", WAYS)
@pytest.mark.parametrize(
    "size", [(40, 64, 200), (5, 400, 75), (4, 260, 1040), pytest.param((4, 20, 9000), marks=pytest.mark.slow)], ids=str
)
def test_the_integers_of_the_hidden_layer_are_those_of_the_definition(size, gated):
    """And the steps, in float32: of ordinary rows, tiny ones, ones of zeros and ones that are not finite."""
    given = block(*size, 1, gated=gated, activation="relu")
    given["b1"], given["scale1"] = torch.zeros_like(given["b1"]), given["scale1"] * 2.0**-5
    given["x"][0], given["x"][1, 5], given["x"][2] = 0.0, math.nan, given["x"][2] * 2.0**-117
    h, largest = hidden(given)
    wide = h[:, : size[2]]
    assert h.shape[1] % _int8.RUN == 0 and not h[[0, *range(2, size[0])], size[2] :].any()
    blocks = wide.split(_int8_gemm.JOIN_N if size[1] > 2 * _int8_gemm.LEAST_K else 64, 1)
    assert largest.shape == (size[0], len(blocks))
    for found, block_ in zip(largest.view(torch.float32).unbind(1), blocks, strict=True):
        assert bits_equal(found.nan_to_num(-1.0), block_.abs().amax(1).nan_to_num(-1.0))
    integers, step = _int8.round_rows(h, largest)
    plain, plain_step = _int8.round_rows(h)
    assert torch.equal(integers, plain) and bits_equal(step.nan_to_num(-1.0), plain_step.nan_to_num(-1.0))
    most = wide.abs().amax(1)
    assert bits_equal(step.nan_to_num(-1.0), (most / 127).nan_to_num(-1.0)) and step[1].isnan()
    live = most >= 2.0**-119
    expected = torch.round(wide * (torch.full_like(most, 127) / most).unsqueeze(1))[live]
    assert torch.equal(integers[live, : size[2]].float(), expected) and live.sum() == size[0] - 3
    assert not integers[~live].any() and not integers[:, size[2] :].any()


def test_more_blocks_than_are_read_at_once():
    x = torch.rand(3, 200 * 16)
    x[1, -1], x[2, 0] = 9.0, 9.0
    largest = x.view(3, 200, 16).amax(2).view(torch.int32)
    for found, expected in zip(_int8.round_rows(x, largest), _int8.round_rows(x), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("gated", WAYS)
def test_rows_do_not_depend_on_their_number(gated):
    """Products of integers are exact, whichever tile they take and however k is cut."""
    given = block(70, 270, 75, 20, torch.bfloat16, gated=gated)
    whole = run(given)
    for rows in (1, 17):
        assert torch.equal(run(given | {"x": given["x"][:rows]}), whole[:rows]), rows


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views_give_the_bits_of_contiguous_tensors(dtype):
    given = block(13, 24, 40, 12, dtype, gated=True)
    invariance.assert_view_equals_contiguous("int8_ffn", given, "triton", backward=False)
    expected = run(given)
    assert expected.is_contiguous() and torch.equal(run(given | {"x": given["x"].unsqueeze(1)}), expected.unsqueeze(1))
    turned = {name: given[name].T.contiguous().T for name in ("w1", "w2", "gate")}
    vectors = ("scale1", "scale2", "gate_scale", "b1", "b2")
    turned |= {name: torch.stack([given[name]] * 2, 1)[:, 0] for name in vectors}
    assert torch.equal(run(given | turned), expected)
    for name in ("w1", "w2", "gate"):  # rows of one further apart than those of the others
        apart = given[name].repeat(1, 2)[:, : given[name].shape[1]]
        assert torch.equal(run(given | {name: apart}), expected), name


@pytest.mark.parametrize("value", [math.nan, *(pytest.param(v, marks=pytest.mark.slow) for v in (math.inf, -math.inf))])
def test_what_is_not_finite_stays_in_its_row(value):
    semantics.test_what_is_not_finite_stays_in_its_row(value, "triton")


def test_a_hidden_layer_that_overflows_is_nan_in_its_row():
    given = block(5, 24, 40, 12, gated=True)
    clean = run(given)
    given["gate_scale"] = given["gate_scale"] * 1e30
    given["x"] = torch.where(torch.arange(5)[:, None] == 3, 1e20, 1e-20) * given["x"]
    y = run(given)
    assert y[3].isnan().all() and y[[0, 1, 2, 4]].isfinite().all() and clean.isfinite().all()
    assert torch.equal(y.isnan(), tfk.ops.int8_ffn(**given, backend="reference").isnan())


def test_a_hidden_activation_of_zeros():
    semantics.test_a_hidden_activation_of_zeros("triton")


@pytest.mark.parametrize("shape", [(0, 4, 5, 3), (4, 0, 5, 3), (40, 0, 5, 3), (4, 3, 0, 5), (4, 3, 5, 0), (0, 0, 0, 0)])
@pytest.mark.parametrize("gated", WAYS)
def test_nothing_of_something(shape, gated):
    given = block(*shape, gated=gated, activation="relu")
    y = run(given)
    assert y.shape == (shape[0], shape[3]) and torch.equal(y, tfk.ops.int8_ffn(**given, backend="aten"))


@pytest.mark.parametrize("gated", WAYS)
def test_opcheck(gated):
    given = block(5, 12, 9, 7, gated=gated)
    names = ["x", "w1", "scale1", "b1", "w2", "scale2", "b2", "gate", "gate_scale"]
    arguments = *(given.get(name) for name in names), 1, True
    torch.library.opcheck(torch.ops.tfm_kernels.int8_ffn_fwd_triton.default, arguments)


def test_traced_whole():
    """To the bits of the plain call."""
    torch.compiler.reset()
    semantics.test_traced_whole("triton", True)


def test_what_it_cannot_run():
    given = block(5, 8, 12, 8, gated=True)
    with pytest.raises(tfk.BackendError, match="has no float64 kernels"):
        run(block(5, 8, 12, 8, torch.float64))
    with pytest.raises(tfk.BackendError, match=r"has kernels for rows that are rounded alone \(dynamic=True\)"):
        run(block(5, 8, 12, 8, dynamic=False))
    with pytest.raises(tfk.BackendError, match="computes no gradients; call it under torch.no_grad"):
        run(given | {"x": given["x"].requires_grad_()})
    with torch.no_grad():
        assert run(given).shape == (5, 8)
        assert _library.triton_interprets() and "-> cpu" in tfk.explain("int8_ffn", **given)
        assert "proven on an H200" in tfk.explain("int8_ffn", **given)
    names = ["x", "w1", "scale1", "b1", "w2", "scale2", "b2", "gate", "gate_scale"]
    plain = {name: given[name].detach() for name in names}
    operator = torch.ops.tfm_kernels.int8_ffn_fwd_triton
    for change, sentence in [
        ({"w1": plain["w1"][:, 1:]}, r"w1 must have shape \(12, 8\), got \(12, 7\)"),
        ({"w2": plain["w2"][:, 1:]}, r"w2 must have shape \(8, 12\), got \(8, 11\)"),
        ({"scale2": plain["scale2"][1:]}, r"scale2 must have shape \(8,\), got \(7,\)"),
        ({"gate": plain["gate"].float()}, "gate must be one of"),
        ({"b1": plain["b1"].double()}, "b1 must be one of"),
        ({"gate": None}, "gate and gate_scale must come together"),
        ({"x": plain["x"][0]}, r"x must have 2 dimensions, got shape \(8,\)"),
        ({"x": plain["x"].double()}, "x must be one of"),
        ({"w1": plain["w1"].view(torch.uint8)}, "w1 must be one of"),
        ({"w2": plain["w2"].float()}, "w2 must be one of"),
        ({"scale1": plain["scale1"].double()}, "scale1 must be one of"),
        ({"b2": plain["b2"].double()}, "b2 must be one of"),
        *(
            ({name: plain[name][1:]}, rf"{name} must have shape \(12")
            for name in ("scale1", "b1", "gate", "gate_scale")
        ),
        ({"b2": plain["b2"][1:]}, r"b2 must have shape \(8,\), got \(7,\)"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            operator(*(plain | change).values(), 1, True)
    with pytest.raises(ValueError, match=r"activation must lie in 0..3, got 4"):
        operator(*plain.values(), 4, True)
    with pytest.raises(ValueError, match="w1 must be on cpu, got meta"):
        int8_ffn_fwd.int8_ffn_fwd(*(plain | {"w1": plain["w1"].to("meta")}).values(), 1, True)
    with pytest.raises(ValueError, match="dynamic must be True"):
        operator(*plain.values(), 1, False)
    wide = lambda rows, dtype=torch.int8: torch.zeros(1, dtype=dtype).expand(rows, _int8.MAX_WIDTH + 1)
    one, steps = torch.zeros(1, 1, dtype=torch.int8), torch.ones(1)
    with pytest.raises(ValueError, match="x must have at most 131072 columns, got 131073"):
        operator(wide(1, torch.float32), wide(1), steps, None, one, steps, None, None, None, 0, True)
    with pytest.raises(ValueError, match="w2 must have at most 131072 columns, got 131073"):
        operator(steps[None], wide(1).T, wide(1, torch.float32)[0], None, wide(1), steps, None, None, None, 0, True)
    widest, none = wide(1)[:, 1:], wide(0, torch.float32)[:, 1:]
    assert operator(none, widest, steps, None, one, steps, None, None, None, 0, True).shape == (0, 1)


def test_the_second_product_is_int8_linears(monkeypatch):
    """Each call multiplies twice: by its own first launch, then by the shared product, of integers."""
    kinds, multiply = [], _int8_gemm.multiply
    monkeypatch.setattr(_int8_gemm, "multiply", lambda factor, *args, **ends: (
        kinds.append(factor.dtype), multiply(factor, *args, **ends)))  # fmt: skip
    given = block(5, 24, 40, 12)
    run(given)
    assert kinds == [torch.int8]
