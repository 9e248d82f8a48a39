"""int8_linear: no byte outside of a tensor is touched, and offsets beyond 2**31 elements arrive."""

import pytest
import torch

from tests.fences import fenced, huge
from tests.interpreter.one_program import run_program
from tests.ops.test_int8_linear import layer
from tfm_kernels.testing import assert_contract
from tfm_kernels.triton import _int8, _int8_gemm

FAR = 2**31 + 4096  # elements; between the first row and the last, of 17


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (65, 9, 67), (33, 48, 299), (13, 401, 75), (70, 400, 24)], ids=str)
def test_no_byte_outside(sizes, dynamic, dtype, monkeypatch):
    """Every argument, every result and what lies between launches ends at a protected page; parts of k too."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: fenced(empty(*args, **kwargs)))
    given = layer(*sizes, dtype, dynamic=dynamic)
    given = {name: fenced(t) if isinstance(t, torch.Tensor) else t for name, t in given.items()}
    assert_contract("int8_linear", given, "triton", backward=False)


@pytest.fixture(scope="module")
def space():
    """Room for a tensor of more than 2**31 elements, taken up only where it is written."""
    return huge(FAR + 2**17, torch.float32)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", ["x", "weight"])
def test_arguments_with_far_rows(space, name, dynamic):
    """17 rows, the last lies FAR elements behind the first."""
    given = layer(17, 48, 17, dynamic=dynamic)
    run = torch.ops.tfm_kernels.int8_linear_fwd_triton
    t = given[name]
    far = space.view(t.dtype).as_strided((17, 48), (FAR // 16, 1)).copy_(t)
    assert torch.equal(run(**given | {name: far}), run(**given))


PRODUCT = {"K": 32, "part": 32, "splits": 1, "x_stride_m": 0, "weight_stride_n": 0, "BLOCK_M": 64, "BLOCK_N": 64}
PRODUCT |= {"BLOCK_K": 32, "GROUP_M": 8, "ALIGNED": 0, "PRECISION": "ieee", "STAGES": 1}


def last_tile(monkeypatch, M, N, **given):
    """The program of the last tile of y, or of the last part of it; one row of x and of weights stands for all."""
    tiles = -(-M // 64) * -(-N // 64) * given.get("splits", 1)
    run_program(
        monkeypatch, _int8_gemm.int8_gemm_kernel, tiles - 1, M=M, N=N, **{**PRODUCT, **given}
    )  # fmt: skip


def factors(dynamic):
    g = torch.Generator().manual_seed(1)
    weight = torch.randint(-128, 128, (1, 32), generator=g, dtype=torch.int8)
    x = torch.randint(-127, 128, (1, 32), generator=g, dtype=torch.int8) if dynamic else torch.randn(1, 32, generator=g)
    return {"x_ptr": x, "weight_ptr": weight}


def ending(numel, end):
    """A vector of so many elements that ends with these."""
    t = huge(numel, end.dtype)
    t[-end.numel() :] = end
    return t


def assert_same_end(far, near):
    """Whether two results end in the same 64 numbers, bit for bit, none of them a 0 that was there before."""
    assert torch.equal(far[-64:], near[-64:]) and near[-64:].all()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("aligned", [False, True])
def test_far_features(space, aligned, dynamic, monkeypatch):
    """The last tile of more than 2**31 features, each with a scale and a bias."""
    scale, bias = torch.rand(64, generator=torch.Generator().manual_seed(2)) + 0.5, torch.arange(64.0)

    def run(features, y):
        ends = {"scale_ptr": ending(features, scale), "bias_ptr": ending(features, bias), "y_ptr": y}
        if dynamic:
            ends["step_ptr"] = torch.tensor([0.25])
        last_tile(monkeypatch, 1, features, Y_ALIGNED=aligned, **factors(dynamic), **ends)
        return y[:features]

    assert_same_end(run(FAR, space), run(64, torch.zeros(64)))


@pytest.mark.parametrize("dynamic", [False, True])
def test_far_rows(space, dynamic, monkeypatch):
    """The last tile of more than 2**31 rows, each with a step."""
    step = torch.rand(64, generator=torch.Generator().manual_seed(3)) + 0.5

    def run(rows, y):
        ends = {"scale_ptr": torch.tensor([0.5]), "y_ptr": y} | ({"step_ptr": ending(rows, step)} if dynamic else {})
        last_tile(monkeypatch, rows, 1, Y_ALIGNED=False, **factors(dynamic), **ends)
        return y[:rows]

    assert_same_end(run(FAR, space), run(64, torch.zeros(64)))


@pytest.mark.parametrize("dynamic", [False, True])
def test_far_parts(space, dynamic, monkeypatch):
    """The last tile of the second of two parts, and what the last program makes of both."""
    given, dtype = factors(dynamic), torch.int32 if dynamic else torch.float32
    given |= {name: t.repeat(1, 2) for name, t in given.items()}
    given["x_ptr"][:, 32:] += 1

    def run(features, parts, y):
        halves = {"K": 64, "splits": 2, "y_ptr": parts, "Y_ALIGNED": True}
        last_tile(monkeypatch, 1, features, **given, **halves)
        parts[features - 64 : features] = 7
        ends = {
            "scale_ptr": ending(features, torch.rand(64) * 0 + 0.5),
            "bias_ptr": ending(features, torch.arange(64.0)),
        }
        ends |= {"step_ptr": torch.tensor([0.25])} if dynamic else {}
        run_program(
            monkeypatch, _int8_gemm.int8_gemm_join_kernel, -(-features // 512) - 1, parts_ptr=parts, y_ptr=y,
            M=1, N=features, splits=2, BLOCK_N=512, Y_ALIGNED=True, **ends,
        )  # fmt: skip
        return parts[: 2 * features], y[:features]

    far, near = run(FAR, huge(2 * FAR, dtype), space), run(64, torch.zeros(128, dtype=dtype), torch.zeros(64))
    for a, b in zip(far, near, strict=True):
        assert_same_end(a, b)


def test_integers_of_far_rows(monkeypatch):
    """The last program that rounds more than 2**31 elements: its integers and steps."""
    x = torch.randn(1, 32, generator=torch.Generator().manual_seed(4)) + 4.0

    def run(rows):
        integers, step = huge(rows * 32, torch.int8), huge(rows, torch.float32)
        run_program(
            monkeypatch, _int8.round_rows_kernel, rows // 4 - 1, x_ptr=x, integers_ptr=integers, step_ptr=step, M=rows,
            K=32, x_stride_m=0, BLOCK_M=4, BLOCK_K=64, RUN=16, ALIGNED=False,
        )  # fmt: skip
        return integers, step[-4:]

    (far, far_step), (near, near_step) = run(FAR), run(4)
    assert_same_end(far, near)
    assert torch.equal(far_step, near_step) and near_step.all()
