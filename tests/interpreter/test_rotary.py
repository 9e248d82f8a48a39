"""rotary's Triton kernel, interpreted: the numeric contract, bits, pieces of wide heads, strides, refusals."""

import pytest
import torch

import tfm_kernels as tfk
from tests.cases import CASES, report_case
from tests.ops import test_rotary as semantics
from tests.ops.test_rotary import SIZES, call
from tfm_kernels import _library
from tfm_kernels.ops.rotary import BWD, FWD
from tfm_kernels.testing import assert_contract, invariance
from tfm_kernels.testing.derivative import assert_opcheck

TURNS = [case for case in CASES if case.op == "rotary" and case.levels["dtype"] != "f64"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
QUICK, SLOW = [*SIZES[:6], (1, 2, 3, 300, 276)], [*SIZES[6:], (2, 1, 20, 544, 528)]


def marked(case):
    """The interpreter needs a second for some 40 programs."""
    elements = torch.Size(case.levels["places"]).numel() * case.levels["d"]
    return pytest.param(case, id=case.id, marks=pytest.mark.slow if elements > 30_000 else ())


@pytest.mark.parametrize("case", [marked(case) for case in TURNS])
def test_contract(case):
    report_case(case, "triton").raise_broken()


def test_there_are_enough_cases():
    quick = [case for case in TURNS if not marked(case).marks]
    assert len(quick) >= 80 and len(TURNS) >= 90
    for factor in TURNS[0].levels:
        assert {case.levels[factor] for case in quick} == {case.levels[factor] for case in TURNS}, factor


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [*QUICK, *(pytest.param(s, marks=pytest.mark.slow) for s in SLOW)], ids=str)
def test_every_kind_of_factors(size, dtype, interleaved):
    """Programs with one row and with many, heads in pieces, a piece that is not turned."""
    for angles, rows in sorted({(dtype, None), (dtype, 1), (dtype, size[0]), (torch.float32, size[0])}, key=str):
        assert_contract("rotary", call(size, dtype, angles, rows, interleaved), "triton")


def rounded_steps(t, cos, sin, interleaved, back):
    """ROTARY.1, or ROTARY.2 where ``back``: every product and every sum rounded to float32, the results once more."""
    turned = cos.shape[-1]
    columns = torch.arange(turned)
    i, j = (columns[0::2], columns[1::2]) if interleaved else columns.chunk(2)
    cos, sin, wide, y = cos.float().unsqueeze(-3), sin.float().unsqueeze(-3), t.float(), t.clone()
    a, b = wide[..., i], wide[..., j]
    if back:
        first, second = a * cos[..., i] + b * sin[..., j], b * cos[..., j] - a * sin[..., i]
    else:
        first, second = a * cos[..., i] - b * sin[..., i], b * cos[..., j] + a * sin[..., j]
    y[..., i], y[..., j] = first.to(t.dtype), second.to(t.dtype)
    return y


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width, turned", [(64, 64), (128, 48), (70, 34), (272, 266)])
def test_bits(width, turned, dtype, interleaved):
    """The roundings are those that the contract has, and no others, aligned or not; what is not turned is copied."""
    given = call((2, 3, 11, width, turned), dtype, torch.float32, 2)
    given["x"][0, 0, 0, 0] = -0.0
    given["x"][0, 0, 0, -1] = torch.inf
    arguments = *given.values(), interleaved
    assert torch.equal(FWD["triton"](*arguments), rounded_steps(*arguments, back=False))
    assert torch.equal(BWD["triton"](*arguments), rounded_steps(*arguments, back=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_any_strides(dtype, interleaved):
    semantics.test_any_strides("triton", dtype, interleaved)


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradients_of_views_give_the_bits_of_contiguous_tensors(interleaved):
    given = call((2, 3, 5, 64, 48), torch.bfloat16, rows=2, interleaved=interleaved)
    invariance.assert_view_equals_contiguous("rotary", given, "triton")


def test_factors_in_any_order_and_with_gaps():
    """cos and sin with strides of their own; as columns of one table, as complex numbers lie, one row for all."""
    given = call((2, 3, 5, 64, 48), rows=2)
    cos, sin = given["cos"], given["sin"]
    expected = tfk.ops.rotary(**given, backend="triton")
    both = torch.stack((cos, sin), -1)
    table = torch.cat((cos, sin), -1)
    for other_cos, other_sin in (
        (both[..., 0], both[..., 1]), (table[..., :48], table[..., 48:]), (cos.mT.contiguous().mT, sin),
        (cos, sin.transpose(0, 1).contiguous().transpose(0, 1)),
    ):  # fmt: skip
        found = tfk.ops.rotary(given["x"], other_cos, other_sin, backend="triton")
        assert torch.equal(found, expected)
    one = cos[:1, :1].expand(2, 5, 48)
    found = tfk.ops.rotary(given["x"], one, one, backend="triton")
    assert torch.equal(found, tfk.ops.rotary(given["x"], one.contiguous(), one.contiguous(), backend="triton"))


@pytest.mark.parametrize("rows", [None, 1, 5])
def test_one_position_of_each_sequence(rows):
    """Decoding."""
    given = call((5, 3, 1, 64, 64), torch.bfloat16, rows=rows)
    assert_contract("rotary", given, "triton")
    for layout in (given["x"].contiguous(), given["x"].transpose(0, 2).contiguous().transpose(0, 2)):
        y = tfk.ops.rotary(layout, given["cos"], given["sin"], backend="triton")
        assert y.stride() == torch.empty_like(layout).stride()
        assert torch.equal(y, tfk.ops.rotary(**given, backend="triton"))


@pytest.mark.parametrize("size", [(0, 2, 3, 8, 8), (2, 0, 3, 8, 8), (2, 2, 0, 8, 8), (2, 2, 3, 0, 0)], ids=str)
def test_nothing_of_something(size):
    semantics.test_nothing_of_something("triton", size)


def test_what_is_not_finite_stays_in_its_pair():
    semantics.test_what_is_not_finite_stays_in_its_pair("triton")


@pytest.mark.parametrize("trained", [False, True])
def test_compiles_whole(trained):
    semantics.test_traced_whole("triton", trained)


@pytest.mark.parametrize("interleaved", [False, True])
def test_opcheck(interleaved):
    """torch.library.opcheck of both operators: results lie as their fakes say."""
    given = call((2, 3, 5, 20, 16), interleaved=interleaved)
    checked = assert_opcheck("rotary", given, "triton")
    assert checked == [f"tfm_kernels::rotary_{way}_triton" for way in ("fwd", "bwd")]


def test_a_second_derivative_is_refused():
    given = call((1, 2, 3, 8, 8))
    x = given.pop("x").requires_grad_()
    (dx,) = torch.autograd.grad(tfk.ops.rotary(x, **given, backend="triton").square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="the triton backend is differentiable once"):
        dx.sum().backward()


def test_what_it_cannot_run():
    given = call((2, 3, 5, 64, 48), torch.float64)
    with pytest.raises(tfk.BackendError, match="has no float64 kernels"):
        tfk.ops.rotary(**given, backend="triton")
    semantics.test_gradients_of_the_factors_are_refused_by_name_and_left_to_pytorch_otherwise("triton")
    assert _library.triton_interprets() and "-> triton" not in tfk.explain("rotary", **call((2, 3, 5, 64, 48)))


@pytest.mark.parametrize("turn, name", [(FWD["triton"], "x"), (BWD["triton"], "dy")])
def test_what_the_operators_refuse(turn, name):
    x, table = torch.ones(2, 3, 5, 8), torch.ones(5, 8)
    for bad, words in (
        ((x[0], table, table), rf"{name} must have shape \(B, H, T, D\), got \(3, 5, 8\)"),
        ((x, table[:4], table[:4]), r"cos must have shape \(5, R\), R even and at most 8, got \(4, 8\)"),
        ((x, table[0, 0], table[0, 0]), r"cos must have shape \(5, R\)"),
        ((x, table[:, :7], table[:, :7]), r"cos must have shape \(5, R\)"),
        ((x, torch.ones(5, 10), torch.ones(5, 10)), r"cos must have shape \(5, R\)"),
        ((x, torch.ones(3, 5, 8), torch.ones(3, 5, 8)), r"cos must have shape \(5, R\)"),
        ((x, table, table[:, :6]), r"sin must have shape \(5, 8\), got \(5, 6\)"),
        ((x.double(), table, table), f"{name} must be one of"),
        ((x.half(), table.bfloat16(), table.bfloat16()), "cos must be one of"),
        ((x.half(), table.half(), table), "sin must be one of"),
    ):
        with pytest.raises(ValueError, match=words):
            turn(*bad, False)
