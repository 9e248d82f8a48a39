"""linear_cross_entropy: no byte outside of a tensor is touched, and offsets beyond 2**31 elements arrive."""

import pytest
import torch

from tests.fences import fenced, huge
from tests.interpreter.one_program import run_program
from tests.ops.test_linear_cross_entropy import call
from tfm_kernels.ops.linear_cross_entropy import BWD, FWD
from tfm_kernels.testing import assert_contract
from tfm_kernels.triton import _gemm, linear_cross_entropy_bwd, linear_cross_entropy_fwd

FAR = 2**31 + 4096  # elements between the first row and the last, of 17


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [(1, 1, 1), (65, 9, 67), (33, 40, 299)], ids=str)
def test_no_byte_outside(sizes, dtype, monkeypatch):
    """Every argument and every result ends at a protected page; chunks of classes and cut sums too."""
    empty, zeros = torch.empty, torch.zeros
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: fenced(empty(*args, **kwargs)))
    monkeypatch.setattr(torch, "zeros", lambda *args, **kwargs: fenced(zeros(*args, **kwargs)))
    monkeypatch.setattr(_gemm, "LEAST_K", 16)
    monkeypatch.setattr(linear_cross_entropy_bwd, "CHUNK_BYTES", 1)
    rows, width, classes = sizes
    given = call((rows,), width, classes, dtype, ignored=3 * (rows > 1), reduction="none", label_smoothing=0.1)
    given = {name: fenced(t.detach()) if isinstance(t, torch.Tensor) else t for name, t in given.items()}
    dloss = torch.randn(rows, generator=torch.Generator().manual_seed(9))
    assert_contract("linear_cross_entropy", given, "triton", douts={"loss": fenced(dloss)})


@pytest.fixture(scope="module")
def space():
    """Room for a tensor of more than 2**31 elements, taken up only where it is written."""
    return huge(FAR + 2**17, torch.float32)


@pytest.mark.parametrize("name", ["x", "weight", "dloss"])
def test_arguments_with_far_rows(space, name):
    """17 rows, the last lies FAR elements behind the first."""
    given = {key: t.detach() for key, t in call((17,), 24, 17, torch.float32).items() if key != "target"}
    given["dloss"] = torch.randn(17, generator=torch.Generator().manual_seed(9))
    target = torch.arange(17).flip(0)

    def run(x, weight, bias, dloss):
        loss, lse, *nothing = FWD["triton"](x, weight, bias, target, 5, 0.1, False, False, False)
        rest = (target, lse, *nothing, 5, 0.1, True, True, True)
        return loss, *BWD["triton"](dloss, x, weight, bias, *rest)

    t = given[name]
    apart = space.as_strided((17, *t.shape[1:]), (FAR // 16, *t.stride()[1:])).copy_(t)
    for a, b in zip(run(**given | {name: apart}), run(**given), strict=True):
        assert torch.equal(a, b)


WIDE = 32768  # columns of tensors with more than 2**31 elements
ROWS = FAR // WIDE + 1  # the last tile holds one row
TILE = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 16, "ALIGNED": False, "PRECISION": "ieee", "STAGES": 1}


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def every_row(rows):
    """What the kernels read of rows that all count; one row of x and one target stand for all."""
    numbers = huge(rows, torch.int64)
    numbers[-64:] = torch.arange(rows)[-64:]
    given = {
        "x_ptr": randn(1, 16),
        "x_stride_m": 0,
        "target_ptr": torch.tensor([WIDE - 3]),
        "target_stride": 0,
        "K": 16,
    }
    return given | {"rows_ptr": numbers, "count_ptr": torch.tensor(rows), "M": rows, "weight_stride_v": 16}


def assert_same_end(far, near):
    """Whether two results end in the same 64 numbers, bit for bit, none of them a 0 that was there before."""
    assert torch.equal(far[-64:], near[-64:]) and near[-64:].all()


@pytest.mark.parametrize("far", ["dz_ptr", "dbias_ptr"])
def test_gradients_of_logits_with_far_rows(space, far, monkeypatch):
    """The last tile of dz, and the sums of the last of many tiles of rows, are those of one row alone."""
    weight = randn(WIDE, 16, seed=1)
    lse = (randn(1, 16) @ weight.T).logsumexp(1)

    def run(rows, result):
        tiles = -(-rows // 64)
        near = {"dz_ptr": torch.zeros(1), "dz_stride_m": WIDE, "begin": 0, "chunk": WIDE}
        if far == "dbias_ptr":
            near = {"dz_ptr": huge(rows * 64, torch.float32), "dz_stride_m": 64, "begin": WIDE - 64, "chunk": 64}
        of_rows = huge(rows, torch.float32)
        of_rows[-64:] = lse
        run_program(
            monkeypatch, linear_cross_entropy_bwd.linear_cross_entropy_bwd_kernel, tiles * (near["chunk"] // 64) - 1,
            weight_ptr=weight, V=WIDE, dloss_ptr=torch.tensor([0.5]), dloss_stride=0, lse_ptr=of_rows, share=1.0,
            even=0.0, GROUP_M=8, **{**every_row(rows), **TILE, **near, far: result},
        )  # fmt: skip
        return result

    run(ROWS if far == "dz_ptr" else 64 * ROWS - 63, space)
    assert_same_end(space[: ROWS * WIDE], run(1, torch.zeros(WIDE)))


def test_parts_of_far_rows(monkeypatch):
    """The last rows of the last part of 4 numbers a row and part are those of 64 rows alone."""
    weight = randn(WIDE, 16, seed=1)[-256:]

    def run(rows):
        parts = huge(4 * 4 * rows, torch.float32)
        run_program(
            monkeypatch, linear_cross_entropy_fwd.linear_cross_entropy_fwd_kernel, 4 * rows // 64 - 1,
            weight_ptr=weight, V=256, splits=4, parts_ptr=parts, SMOOTHED=True,
            **every_row(rows) | {"target_ptr": torch.tensor([253])}, **TILE,
        )  # fmt: skip
        return parts.view(4, 4, rows)[:, -1]

    rows = FAR // 4 // 4 + 64
    rows -= rows % 64
    assert 4 * 4 * rows > 2**31
    for far, near in zip(run(rows), run(64), strict=True):
        assert_same_end(far, near)


@pytest.mark.parametrize("adds", [False, True])
def test_products_with_far_rows(space, adds, monkeypatch):
    """The last tile of C, whose rows are elsewhere than A's, as in the backward's dx: that of one row alone."""
    a, b = randn(1, 16), randn(16, WIDE, seed=1)

    def run(count, rows, result):
        places = huge(count + 63, torch.int64)
        places[count - 1] = rows - 1
        result[rows * WIDE - 64 : rows * WIDE] = 2.0
        run_program(
            monkeypatch, _gemm.gemm_kernel, -(-count // 64) * (WIDE // 64) - 1, a_ptr=a, b_ptr=b, c_ptr=result,
            rows_ptr=places, count_ptr=torch.tensor(count), M=rows, N=WIDE, K=16, part=16, splits=1, a_stride=0,
            b_stride=WIDE, GROUP_M=8, A_K_INNER=True, B_K_INNER=False, A_PADDED=True, ADDS=adds, **TILE,
        )  # fmt: skip
        return result[: rows * WIDE]

    far = run(64 * (ROWS // 64) + 1, ROWS, space)
    near = run(1, 1, torch.zeros(WIDE))
    assert_same_end(far, near)
    assert not (near[-64:] == 2.0).any()
