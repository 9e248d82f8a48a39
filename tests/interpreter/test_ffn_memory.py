"""ffn: no byte outside of a tensor is touched, and offsets beyond 2**31 elements arrive."""

import pytest
import torch

from tests import ffn_semantics as semantics
from tests.fences import fenced, huge
from tests.ffn_semantics import FAR, SEED, apart, randn
from tests.interpreter.one_program import run_program
from tfm_kernels.triton import _gemm, _launch, _sums, ffn_bwd, ffn_fwd


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (65, 9, 67, 5), (33, 40, 72, 16)], ids=str)
def test_no_byte_outside(sizes, save, dtype, monkeypatch):
    """Every argument and every result ends at a protected page; the gradients of weights are cut sums too."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: fenced(empty(*args, **kwargs)))
    monkeypatch.setattr(_gemm, "LEAST_K", 16)
    semantics.assert_no_byte_outside("triton", sizes, save, dtype)


@pytest.fixture(scope="module")
def spaces():
    """Room for tensors of more than 2**31 elements, taken up only where it is written."""
    return [huge(FAR + 2**17, torch.float32) for _ in range(2)]


@pytest.fixture
def space(spaces):
    return spaces[0]


@pytest.mark.parametrize("name", ["x", "w1", "w2", "gate", "dy"])
def test_arguments_with_far_rows(space, name):
    semantics.assert_far_rows_arrive("triton", name, space)


TILE = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 16, "GROUP_M": 8, "ALIGNED": False, "PRECISION": "ieee", "STAGES": 1}
WIDE = 32768  # columns of results with more than 2**31 elements
ROWS = FAR // WIDE + 1  # the last tile holds one row
FIRST = {"M": ROWS, "scale": 1.0, "last_dropped": 0, "ACTIVATION": 0, **TILE}  # of the first launches


def last_tile(rows, columns):
    return -(-rows // 64) * (columns // 64) - 1


def ends_with(space, expected, at=ROWS * WIDE):
    """Whether the 64 elements before ``at`` are those."""
    torch.testing.assert_close(space[at - 64 : at], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("gated", [False, True])
def test_forward_results_with_far_rows(spaces, gated, monkeypatch):
    """The last tile of h and preact; one row of x stands for all of them."""
    hidden, preact = spaces
    F = WIDE // 2 if gated else WIDE
    rows = 2 * ROWS if gated else ROWS  # h of a gate has half of preact's columns
    x, w1, b1, gate = randn(1, 16), randn(F, 16, seed=1), randn(F, seed=2), randn(F, 16, seed=3)
    b_gate = randn(F, seed=4)
    if gated:
        preact = huge(rows * WIDE, torch.float32)
    run_program(
        monkeypatch, ffn_fwd.ffn_fwd_kernel, last_tile(rows, F), x_ptr=x, w1_ptr=w1, b1_ptr=b1,
        gate_ptr=gate if gated else None, b_gate_ptr=b_gate if gated else None, hidden_ptr=hidden, preact_ptr=preact,
        E=16, F=F, x_stride_m=0, w1_stride_f=16, gate_stride_f=16, **FIRST | {"M": rows},
    )  # fmt: skip
    p, g = (x @ w1.T + b1)[0, -64:], (x @ gate.T + b_gate)[0, -64:]
    assert (rows - 1) * F >= 2**31
    ends_with(hidden, p.clamp(min=0) * g if gated else p.clamp(min=0), rows * F)
    ends_with(preact, g if gated else p, rows * WIDE)
    if gated:
        ends_with(preact, p, rows * WIDE - F)


@pytest.mark.parametrize("far", ["hidden_ptr", "dp_ptr", "dg_ptr", "p_ptr", "g_ptr", "db1_ptr"])
def test_backward_tensors_with_far_rows(spaces, far, monkeypatch):
    """The last tile of each tensor of (M, F); one row of dy, of p and of g stands for all where they are not it."""
    dy, w2 = randn(1, 16), randn(16, WIDE, seed=1)
    near = {"p_ptr": randn(1, WIDE, seed=2), "g_ptr": randn(1, WIDE, seed=3)}
    p, g = (t[0, -64:].clone() for t in near.values())
    dh = (dy @ w2)[0, -64:]
    expected = {"hidden_ptr": p.clamp(min=0) * g, "dp_ptr": dh * g * (p > 0), "dg_ptr": dh * p.clamp(min=0)}
    space, pointers, rows = spaces[0], dict(near), ROWS
    if far in near:
        space[ROWS * WIDE - 64 : ROWS * WIDE] = near[far][0, -64:]
        pointers |= {far: space, "dp_ptr": spaces[1]}
        other = "g_ptr" if far == "p_ptr" else "p_ptr"
        pointers[other] = huge(ROWS * WIDE, torch.float32)
        pointers[other][ROWS * WIDE - 64 : ROWS * WIDE] = near[other][0, -64:]
        space = spaces[1]
    else:
        pointers[far] = space
    if far == "db1_ptr":  # a row of it for each 64 rows
        rows = 64 * ROWS - 63
    run_program(
        monkeypatch, ffn_bwd.ffn_bwd_kernel, last_tile(rows, WIDE), dy_ptr=dy, w2_ptr=w2, F=WIDE, Eo=16, dy_stride_m=0,
        w2_stride_o=WIDE, p_stride_m=WIDE if far in near else 0, **FIRST | {"M": rows}, **pointers,
    )  # fmt: skip
    ends_with(space, expected.get(far, expected["dp_ptr"]))


def test_numbers_of_far_rows(monkeypatch):
    """The last tile of more than 2**31 rows, each with the number that dropout reads."""
    scale, last_dropped = _launch.check_dropout("ffn", 0.4, SEED)
    x, w1, dy, w2 = randn(1, 16), randn(64, 16, seed=1), randn(1, 16, seed=2), randn(16, 64, seed=3)

    def last_rows(rows):
        """What the last 64 rows get: all of them see the same x and dy."""
        numbers, hidden, dp = huge(rows, torch.int64), huge(rows * 64, torch.float32), huge(rows * 64, torch.float32)
        numbers[-64:] = torch.arange(64) * 5 + 3
        given = FIRST | {"M": rows, "F": 64, "scale": scale, "last_dropped": last_dropped, "seed_ptr": SEED}
        given |= {"rows_ptr": numbers}
        run_program(
            monkeypatch, ffn_fwd.ffn_fwd_kernel, last_tile(rows, 64), x_ptr=x, w1_ptr=w1, hidden_ptr=hidden, E=16,
            x_stride_m=0, w1_stride_f=16, gate_stride_f=0, **given,
        )  # fmt: skip
        run_program(
            monkeypatch, ffn_bwd.ffn_bwd_kernel, last_tile(rows, 64), dy_ptr=dy, w2_ptr=w2, p_ptr=x @ w1.T, dp_ptr=dp,
            Eo=16, dy_stride_m=0, w2_stride_o=64, p_stride_m=0, **given,
        )  # fmt: skip
        return hidden[-64 * 64 :].clone(), dp[-64 * 64 :].clone()

    expected = last_rows(64)
    for a, b in zip(last_rows(FAR), expected, strict=True):
        assert b.abs().max() > 0
        assert torch.equal(a, b)


def test_products_with_far_rows(space, monkeypatch):
    """The last tile of C, and of the last part of a cut sum."""
    a, b = randn(1, 32), randn(64, 32, seed=1)
    common = {"a_ptr": a, "b_ptr": b, "c_ptr": space, "K": 32, "a_stride": 0, "b_stride": 32, "a2_stride": 0}
    common |= {"b2_stride": 0, "A_K_INNER": True, "B_K_INNER": True, **TILE}
    for rows, splits in ((FAR // 64, 1), (FAR // 128, 2)):
        tile = -(-rows // 64) * splits - 1
        run_program(
            monkeypatch, _gemm.gemm_kernel, tile, M=rows, N=64, part=32 // splits, splits=splits, **common
        )  # fmt: skip
        k = slice(32 - 32 // splits, 32)
        ends_with(space, (a[:, k] @ b[:, k].T)[0], rows * splits * 64)


def test_sums_with_far_rows(spaces, monkeypatch):
    """Far rows, far columns, and a far run of rows."""
    space, sums = spaces
    t = randn(17, 24)
    torch.testing.assert_close(_sums.sum_rows(apart(space, t), torch.float32), t.sum(0))
    block = {"BLOCK_M": 1, "BLOCK_N": 64, "ALIGNED": False}
    space[FAR - 64 : FAR] = t[0, :1] + torch.arange(64)
    run_program(
        monkeypatch, _sums.sum_rows_kernel, FAR // 64 - 1, x_ptr=space, sum_ptr=sums, M=1, N=FAR, run=1,
        x_stride_m=0, **block,
    )  # fmt: skip
    ends_with(sums, space[FAR - 64 : FAR], FAR)
    run_program(
        monkeypatch, _sums.sum_rows_kernel, 0, FAR // 64 - 1, x_ptr=t[0], sum_ptr=sums, M=FAR // 64, N=64, run=1,
        x_stride_m=0, **block | {"ALIGNED": False, "BLOCK_N": 16}, 
    )  # fmt: skip
    torch.testing.assert_close(sums[FAR - 64 : FAR - 48], t[0, :16])
