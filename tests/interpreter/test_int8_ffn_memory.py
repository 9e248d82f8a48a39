"""int8_ffn: no byte outside of a tensor is touched, and offsets beyond 2**31 elements arrive."""

import pytest
import torch

from tests.fences import fenced, huge
from tests.interpreter.one_program import run_program
from tests.ops.test_int8_ffn import block
from tfm_kernels.testing import assert_contract
from tfm_kernels.triton import _int8, int8_ffn_fwd
from tfm_kernels.triton._activation import SILU

FAR = 2**31 + 4096  # elements; between the first row and the last, of 17
WAYS = [False, True]  # gated
NAMES = ["x", "w1", "scale1", "b1", "w2", "scale2", "b2", "gate", "gate_scale"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("gated", WAYS)
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (17, 9, 67, 33), (5, 401, 75, 24), (33, 48, 176, 40)], ids=str)
def test_no_byte_outside(sizes, gated, dtype, monkeypatch):
    """Every argument, every result and what lies between launches ends at a protected page; parts of k too."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: fenced(empty(*args, **kwargs)))
    given = block(*sizes, dtype, gated=gated, activation="silu")
    given = {name: fenced(t) if isinstance(t, torch.Tensor) else t for name, t in given.items()}
    assert_contract("int8_ffn", given, "triton", backward=False)


@pytest.fixture(scope="module")
def space():
    """Room for a tensor of more than 2**31 elements, taken up only where it is written."""
    return huge(FAR + 2**17, torch.float32)


@pytest.mark.parametrize("name", ["x", "w1", "gate", "w2"])
def test_arguments_with_far_rows(space, name):
    """17 rows, the last lies FAR elements behind the first."""
    given = block(17, 48, 17, 17, gated=True)
    run = lambda given: torch.ops.tfm_kernels.int8_ffn_fwd_triton(*(given[name] for name in NAMES), 3, True)
    t = given[name]
    far = space.view(t.dtype).as_strided(t.shape, (FAR // 16, 1)).copy_(t)
    assert torch.equal(run(given | {name: far}), run(given))


PRODUCT = {"E": 32, "part": 32, "splits": 1, "x_stride_m": 0, "w1_stride_f": 0, "gate_stride_f": 0, "BLOCK_M": 64}
PRODUCT |= {"BLOCK_N": 64, "BLOCK_K": 32, "GROUP_M": 8, "ALIGNED": 0, "STAGES": 1, "ACTIVATION": SILU.value}


def last_tile(monkeypatch, M, F, **given):
    """The program of the last tile of h, or of the last part of it; one row of x and of weights stands for all."""
    tiles = -(-M // 64) * -(-F // 64) * given.get("splits", 1)
    run_program(monkeypatch, int8_ffn_fwd.int8_ffn_fwd_kernel, tiles - 1, M=M, F=F, **{**PRODUCT, **given})


def factors(gated, width=32):
    g = torch.Generator().manual_seed(1)
    names = ("x_ptr", "w1_ptr", "gate_ptr") if gated else ("x_ptr", "w1_ptr")
    return {name: torch.randint(-127, 128, (1, width), generator=g, dtype=torch.int8) for name in names}


def random(seed, *shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) + 0.5


def ending(numel, end):
    """A vector of so many elements that ends with these."""
    t = huge(numel, end.dtype)
    t[-end.numel() :] = end
    return t


def ends(features, gated):
    """What scales and shifts the sums of features of which the last 64 differ."""
    found = {"scale1_ptr": ending(features, random(2, 64)), "b1_ptr": ending(features, random(3, 64))}
    return found | ({"gate_scale_ptr": ending(features, random(4, 64))} if gated else {})


def assert_same_end(far, near, last=64):
    """Whether two results end in the same numbers, bit for bit, none of them a 0 that was there before."""
    assert torch.equal(far[-last:], near[-last:]) and near[-last:].all()


@pytest.mark.parametrize("gated", WAYS)
@pytest.mark.parametrize("aligned", [False, True])
def test_far_features(space, aligned, gated, monkeypatch):
    """The last tile of more than 2**31 features, each with its scales and a bias."""

    def run(features, h):
        largest = huge(features // 64, torch.int32)
        results = {"hidden_ptr": h, "largest_ptr": largest, "step_ptr": torch.tensor([0.25])}
        last_tile(monkeypatch, 1, features, F_ALIGNED=aligned, **factors(gated), **ends(features, gated), **results)
        return h[:features], largest

    (far, far_largest), (near, near_largest) = run(FAR, space), run(64, torch.zeros(64))
    assert_same_end(far, near)
    assert_same_end(far_largest, near_largest, 1)


@pytest.mark.parametrize("gated", WAYS)
def test_far_rows(gated, monkeypatch):
    """The last tile of more than 2**31 rows, each with a step and largest elements."""
    some = {"scale1_ptr": random(5, 16), "b1_ptr": random(6, 16)} | ({"gate_scale_ptr": random(7, 16)} if gated else {})

    def run(rows):
        results = {"hidden_ptr": huge(rows * 16, torch.float32), "largest_ptr": huge(rows, torch.int32)}
        step = ending(rows, random(8, 64))
        last_tile(monkeypatch, rows, 16, F_ALIGNED=False, step_ptr=step, **factors(gated), **some, **results)
        return results.values()

    (far, far_largest), (near, near_largest) = run(FAR), run(64)
    assert_same_end(far, near, 64 * 16)
    assert_same_end(far_largest, near_largest)


@pytest.mark.parametrize("gated", WAYS)
def test_far_parts(space, gated, monkeypatch):
    """The last tile of the second of two parts, and what the last program makes of both."""
    given, sums = factors(gated, 64), 4 if gated else 2

    def run(features, parts, h):
        halves = {"E": 64, "splits": 2, "hidden_ptr": parts, "F_ALIGNED": True}
        last_tile(monkeypatch, 1, features, **given, **halves)
        for number in range(sums // 2):  # the first part, which no program has written here
            parts[(number + 1) * features - 64 : (number + 1) * features] = 7 + number
        largest = huge(-(-features // 512), torch.int32)
        run_program(
            monkeypatch, int8_ffn_fwd.int8_ffn_fwd_join_kernel, -(-features // 512) - 1, parts_ptr=parts, hidden_ptr=h,
            largest_ptr=largest, M=1, F=features, splits=2, BLOCK_N=512, F_ALIGNED=True, ACTIVATION=SILU.value,
            step_ptr=torch.tensor([2.0**-14]), **ends(features, gated),
        )  # fmt: skip
        written = [parts[(sums - number) * features - 64 :][:64] for number in range(1 + gated)]
        return *written, h[:features], largest[-1:]

    far = run(FAR, huge(sums * FAR, torch.int32), space)
    near = run(64, torch.zeros(sums * 64, dtype=torch.int32), torch.zeros(64))
    for a, b in zip(far, near, strict=True):
        assert_same_end(a, b)


def test_pieces_of_far_rows(monkeypatch):
    """The last program that rounds more than 2**31 elements of more than 2**31 blocks: its integers and steps."""
    x = random(9, 1, 32)

    def run(rows):
        largest = ending(rows * 2, x.amax().view(torch.int32) + torch.arange(8, dtype=torch.int32))
        integers, step = huge(rows * 32, torch.int8), huge(rows, torch.float32)
        run_program(
            monkeypatch, _int8.round_pieces_kernel, rows // 4 - 1, x_ptr=x, largest_ptr=largest, integers_ptr=integers,
            step_ptr=step, M=rows, K=32, blocks=2, x_stride_m=0, BLOCK_M=4, BLOCK_K=64, RUN=16, BLOCKS=128,
        )  # fmt: skip
        return integers, step

    (far, far_step), (near, near_step) = run(FAR), run(4)
    assert_same_end(far, near)
    assert_same_end(far_step, near_step, 4)


def test_a_far_row_is_rounded(space):
    """x's own offset: rows of h more than 2**31 elements apart."""
    x = random(10, 17, 48)
    far = space.as_strided((17, 48), (FAR // 16, 1)).copy_(x)
    largest = x.amax(1, keepdim=True).view(torch.int32)
    for found, expected in zip(_int8.round_rows(far, largest), _int8.round_rows(x), strict=True):
        assert torch.equal(found, expected)
