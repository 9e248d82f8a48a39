"""ffn on the CPU with few rows, where kernels of their own stream the weights: backend "cpu", named."""

import math

import pytest
import torch

import tfm_kernels as tfk
from tests.threads import on_threads
from tfm_kernels.testing import assert_contract

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SEED = torch.tensor(20261122)


def block(rows, width, hidden, out, dtype=torch.float32, gated=False):
    def draw(*shape, scale=1.0):
        return (scale * torch.randn(*shape, dtype=torch.float64, generator=generator)).to(dtype)

    generator = torch.Generator().manual_seed(rows * 1000 + width)
    spread = 1.5 / math.sqrt(width)
    given = {"x": draw(rows, width), "w1": draw(hidden, width, scale=spread), "b1": draw(hidden)}
    given |= {"w2": draw(out, hidden, scale=1 / math.sqrt(hidden)), "b2": draw(out)}
    return given | {"gate": draw(hidden, width, scale=spread) if gated else None}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "size",
    [
        (1, 16, 4, 4),
        (1, 129, 300, 33),
        (1, 583, 4097, 17),
        (2, 17, 3, 5),
        (3, 1, 1, 1),
        (5, 1040, 70, 9),
        (7, 66, 1030, 48),
        (8, 7, 1100, 130),
        (31, 33, 66, 31),
        (32, 64, 80, 2),
    ],
    ids=str,
)
def test_contract(dtype, size):
    """Tails of rows, features and sums; sums longer than one stretch; forward and backward."""
    for gated in (False, True):
        given = block(*size, dtype, gated)
        assert_contract("ffn", {**given, "activation": "gelu"}, "cpu")
        assert_contract("ffn", {**given, "dropout_p": 0.3, "seed": SEED}, "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_a_row_does_not_depend_on_the_others(dtype):
    """Bit for bit, up to 8 rows and beyond; of 16 bits one row adds in an order of its own. (Of bfloat16 a matrix
    library decides.)"""
    alone = () if dtype == torch.float16 else (1,)
    for most, fewer in ((8, (*alone, 2, 3, 7)), (32, (9, 16, 17, 31))):
        given = block(most, 70, 130, 50, dtype, gated=True)
        whole = tfk.ops.ffn(**given, activation="silu", backend="cpu")
        for rows in fewer:
            some = tfk.ops.ffn(**(given | {"x": given["x"][-rows:]}), activation="silu", backend="cpu")
            assert torch.equal(some, whole[-rows:])


def results(given, dy=None):
    """The output, and the gradients of all that is given, from where it lies."""
    leaves = {name: t.requires_grad_() for name, t in given.items() if t is not None}
    y = tfk.ops.ffn(**given, activation="gelu", backend="cpu")
    dy = torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype) if dy is None else dy
    return y.detach(), dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), dy), strict=True))


def assert_same(found, expected):
    assert torch.equal(found[0], expected[0])
    for name, gradient in found[1].items():
        assert torch.equal(gradient, expected[1][name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5, 9, 20, 32])
def test_does_not_depend_on_threads(rows, dtype):
    given, found = block(rows, 70, 1030, 50, dtype, gated=True), []
    for threads in (1, 2, 5):
        with on_threads(threads):
            found.append(results(given))
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])


@pytest.mark.parametrize("rows", [6, 20])
def test_rows_far_apart(rows):
    given = block(rows, 24, 40, 24)
    spread = torch.zeros(rows, 100)
    spread[:, 3:27] = given["x"]
    dy = torch.randn(rows, 24)
    expected = results(given, dy)
    spread_dy = torch.zeros(rows, 100)
    spread_dy[:, 3:27] = dy
    assert_same(results(given | {"x": spread[:, 3:27]}, spread_dy[:, 3:27]), expected)
    turned = given["x"].detach().t().contiguous().t()
    assert_same(results(given | {"x": turned}, dy.t().contiguous().t()), expected)


@pytest.mark.parametrize("rows", [5, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_is_not_finite_stays_in_its_row(dtype, rows):
    given = block(rows, 20, 36, 12, dtype)
    clean, expected = results(given)
    x = given["x"].detach().clone()
    x[rows - 1, 7] = math.nan
    x[2, 0] = math.inf
    y, gradients = results(given | {"x": x})
    sound = [row for row in range(rows) if row not in (2, rows - 1)]
    assert torch.equal(y[sound], clean[sound]) and y[rows - 1].isnan().all()
    assert torch.equal(gradients["x"][sound], expected["x"][sound]) and gradients["x"][rows - 1].isnan().all()
