"""ffn on the CPU with at most 32 rows, where kernels of their own stream the weights: backend "cpu", named."""

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
        (2, 17, 3, 5),
        (3, 1, 1, 1),
        (5, 1040, 70, 9),
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
    """Bit for bit, up to 8 rows and beyond. (Of bfloat16 a matrix library decides.)"""
    for most, fewer in ((8, (1, 2, 3, 7)), (32, (9, 16, 17, 31))):
        given = block(most, 70, 130, 50, dtype, gated=True)
        whole = tfk.ops.ffn(**given, activation="silu", backend="cpu")
        for rows in fewer:
            some = tfk.ops.ffn(**(given | {"x": given["x"][-rows:]}), activation="silu", backend="cpu")
            assert torch.equal(some, whole[-rows:])


@pytest.mark.parametrize("rows", [5, 9])
def test_does_not_depend_on_threads(rows):
    given, found = block(rows, 70, 530, 50), []
    for threads in (1, 2, 5):
        with on_threads(threads):
            found.append(tfk.ops.ffn(**given, backend="cpu"))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("rows", [6, 20])
def test_rows_far_apart(rows):
    given = block(rows, 24, 40, 24)
    spread = torch.zeros(rows, 100)
    spread[:, 3:27] = given["x"]
    expected = tfk.ops.ffn(**given, backend="cpu")
    assert torch.equal(tfk.ops.ffn(**(given | {"x": spread[:, 3:27]}), backend="cpu"), expected)
    turned = given["x"].t().contiguous().t()
    assert torch.equal(tfk.ops.ffn(**(given | {"x": turned}), backend="cpu"), expected)


@pytest.mark.parametrize("rows", [5, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_is_not_finite_stays_in_its_row(dtype, rows):
    given = block(rows, 20, 36, 12, dtype)
    clean = tfk.ops.ffn(**given, backend="cpu")
    given["x"][rows - 1, 7] = math.nan
    given["x"][2, 0] = math.inf
    y = tfk.ops.ffn(**given, backend="cpu")
    sound = [row for row in range(rows) if row not in (2, rows - 1)]
    assert torch.equal(y[sound], clean[sound]) and y[rows - 1].isnan().all()
