"""rotary: no byte outside of a tensor is touched, and offsets beyond 2**31 elements arrive."""

import pytest
import torch

from tests.fences import fenced, fenced_empty_like, huge
from tests.interpreter.one_program import run_program
from tests.ops.test_rotary import call
from tfm_kernels.ops.rotary import BWD, FWD
from tfm_kernels.testing import assert_contract
from tfm_kernels.triton import _rotary

FAR = 2**31 + 4096  # elements between two neighbours along a dimension


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "size", [(1, 1, 1, 1, 0), (2, 3, 5, 9, 6), (2, 1, 11, 64, 64), (1, 3, 3, 128, 48), (1, 1, 3, 272, 264)], ids=str
)
def test_no_byte_outside(size, dtype, interleaved, monkeypatch):
    """Every argument and every result ends at a protected page, in either order of heads and positions."""
    monkeypatch.setattr(torch, "empty_like", fenced_empty_like_outside_of_itself())
    given = call(size, dtype, rows=size[0], interleaved=interleaved)
    tables = {name: fenced(given[name]) for name in ("cos", "sin")}
    for x in (fenced(given["x"]), fenced(given["x"].transpose(1, 2)).transpose(1, 2)):
        dy = {"y": fenced_empty_like(x).copy_(torch.randn(x.shape))}
        assert_contract("rotary", {**given, **tables, "x": x}, "triton", douts=dy)


def fenced_empty_like_outside_of_itself():
    """For tensors that are to be filled; "meta" ones are left to PyTorch."""
    empty_like = torch.empty_like
    return lambda t, **options: empty_like(t, **options) if options else fenced_empty_like(t)


@pytest.fixture(scope="module")
def space():
    """Room for a tensor of more than 2**31 elements, taken up only where it is written."""
    return huge(FAR + 2**26, torch.float16)


def apart(space, t, dim):
    """``t``, its last slice along ``dim`` FAR elements behind the first, the other slices in between."""
    strides = [t.stride(i) for i in range(t.dim())]
    strides[dim] = FAR // (t.shape[dim] - 1)
    return space.as_strided(t.shape, strides).copy_(t)


@pytest.mark.parametrize(
    "name, dim", [*(("x", dim) for dim in range(4)), *((n, dim) for n in ("cos", "sin") for dim in range(3))]
)
@pytest.mark.parametrize("turn", [FWD["triton"], BWD["triton"]], ids=["fwd", "bwd"])
def test_arguments_with_far_neighbours(space, name, dim, turn):
    given = call((2, 2, 3, 32, 16), torch.float16, rows=2)
    given["x"] = given["x"].contiguous()
    expected = turn(**given_to(turn, given))
    far = {**given, name: apart(space, given[name], dim)}
    assert torch.equal(turn(**given_to(turn, far)), expected)


def given_to(turn, given):
    first = "x" if turn is FWD["triton"] else "dy"
    return {first: given["x"], "cos": given["cos"], "sin": given["sin"], "interleaved": False}


@pytest.mark.parametrize("dim", range(4))
@pytest.mark.parametrize("back", [False, True])
def test_results_with_far_neighbours(space, dim, back, monkeypatch):
    """The last program of a call whose result has more than 2**31 elements: the rows of a call of their own."""
    given = call((1, 1, 1, 64, 64), torch.float16)
    expected = (BWD if back else FWD)["triton"](*given.values(), False)
    shape = [1, 1, 1, 64]
    shape[min(dim, 2)] = FAR // (64 if dim < 3 else 63) + 1
    strides = torch.empty(shape, device="meta").stride()
    if dim == 3:  # features apart, as where heads are stored one below the other
        strides = (1, 1, 1, shape[2])
    y = space.as_strided(shape, strides)
    assert sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) >= 2**31
    config = _rotary.pick_config(64, dim < 3)
    rows = shape[1] * shape[2]
    of = lambda name, letters, strides: {f"{name}_stride_{d}": s for d, s in zip(letters, strides, strict=True)}
    run_program(
        monkeypatch, _rotary.rotary_kernel, shape[0] * -(-rows // config.block_m) - 1, x_ptr=given["x"], y_ptr=y,
        cos_ptr=given["cos"], sin_ptr=given["sin"], H=shape[1], T=shape[2], D=64, R=64, BLOCK_M=config.block_m,
        BLOCK_N=config.block_n, ALIGNED=dim < 3, INTERLEAVED=False, BACK=back, **of("x", "bhtd", (0, 0, 0, 1)),
        **of("y", "bhtd", strides), **of("cos", "btd", (0, 0, 1)), **of("sin", "btd", (0, 0, 1)),
    )  # fmt: skip
    assert expected.abs().max() > 0 and torch.equal(y[-1, -1, -1], expected[0, 0, 0])
