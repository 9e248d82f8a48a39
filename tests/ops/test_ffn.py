"""ffn: what a call means, on every backend that runs here."""

import itertools
import math

import pytest
import torch

import tfm_kernels as tfk
from tests.threads import on_threads
from tfm_kernels import dropout
from tfm_kernels.testing import assert_contract

BACKENDS = ["reference", "aten", "cpu"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
ACTIVATIONS = ["relu", "gelu", "gelu_tanh", "silu"]
SEED = torch.tensor(20261121)


def draw(*shape, seed=0, scale=1.0, dtype=torch.float32):
    return (scale * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))).to(dtype)


def block(rows, width, hidden, out, dtype=torch.float32, bias=True, gated=False):
    """The arguments of a block whose preactivations have a spread of about 1.5."""
    spread = 1.5 / math.sqrt(max(width, 1))
    return {
        "x": draw(rows, width, seed=1, dtype=dtype),
        "w1": draw(hidden, width, seed=2, scale=spread, dtype=dtype),
        "b1": draw(hidden, seed=3, dtype=dtype) if bias else None,
        "w2": draw(out, hidden, seed=4, scale=1 / math.sqrt(max(hidden, 1)), dtype=dtype),
        "b2": draw(out, seed=5, dtype=dtype) if bias else None,
        "gate": draw(hidden, width, seed=6, scale=spread, dtype=dtype) if gated else None,
    }


def sigmoid(v):
    return 1 / (1 + math.exp(-v)) if v > -700 else 0.0


def act(p, name):
    """In plain mathematics, element by element, exact far out too: 0.5 (1 + tanh(u)) = sigmoid(2 u)."""
    functions = {
        "relu": lambda v: max(v, 0.0),
        "gelu": lambda v: 0.5 * v * math.erfc(-v / math.sqrt(2)),
        "gelu_tanh": lambda v: v * sigmoid(2 * math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)),
        "silu": lambda v: v * sigmoid(v),
    }
    return p.double().clone().apply_(functions[name])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_meaning(backend, dtype, activation):
    gated = activation in ("silu", "gelu")
    given = block(7, 12, 20, 9, dtype, bias=not gated, gated=gated)
    exact = {name: None if t is None else t.double() for name, t in given.items()}
    preact = exact["x"] @ exact["w1"].T + (0 if gated else exact["b1"])
    hidden = act(preact, activation) * (exact["x"] @ exact["gate"].T if gated else 1)
    expected = hidden @ exact["w2"].T + (0 if gated else exact["b2"])
    y = tfk.ops.ffn(**given, activation=activation, backend=backend)
    assert y.dtype == dtype and y.is_contiguous() and y.shape == (7, 9)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), expected, rtol=4 * eps, atol=16 * eps)


# rows, width, hidden, out: one of each, primes, one less and one more than a tile and than a panel, several strips of
# rows and several blocks of them
SIZES = [
    (1, 1, 1, 1), (31, 17, 129, 13), (129, 48, 63, 65), (65, 127, 257, 31), (513, 33, 70, 40), (700, 40, 130, 70),
    (1100, 24, 40, 24),
]  # fmt: skip
CONTRACT = [
    (SIZES[i % len(SIZES)], dtype, activation, gated, p, recompute)
    for i, (dtype, activation, (gated, p, recompute)) in enumerate(
        itertools.product(DTYPES, ACTIVATIONS, [(False, 0.0, False), (True, 0.25, True), (True, 0.0, False)])
    )
]


@pytest.mark.parametrize(("size", "dtype", "activation", "gated", "p", "recompute"), CONTRACT)
def test_contract(size, dtype, activation, gated, p, recompute):
    given = block(*size, dtype, bias=not gated or p > 0, gated=gated)
    given |= {"activation": activation, "dropout_p": p, "recompute": recompute}
    assert_contract("ffn", given | ({"seed": SEED} if p else {}), "cpu")


@pytest.mark.parametrize("dtype", DTYPES)
def test_contract_bigger(dtype):
    """Enough elements for the rule against a leaning error, more than one chunk of hidden features."""
    assert_contract("ffn", block(192, 192, 768, 192, dtype) | {"activation": "gelu"}, "cpu")


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("width", [960, 1024, 2048])
def test_long_sums_are_as_exact_as_a_blas(width, gated):
    """Of float32, of more rows than the kernels of few take: at these widths one sum of them all would not be."""
    assert_contract("ffn", block(64, width, 256, 128, gated=gated), "cpu")
    assert_contract("ffn", block(64, 128, 256, width, gated=gated), "cpu")


@pytest.mark.parametrize("backend", ["reference", "aten"])
def test_contract_of_the_others(backend):
    given = block(33, 24, 40, 24, torch.bfloat16, gated=True)
    assert_contract("ffn", given | {"activation": "silu", "dropout_p": 0.5, "seed": SEED}, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", [4, 40])  # few, and a tile of them
@pytest.mark.parametrize("shape", [(0, 4, 5, 6), (4, 0, 5, 6), (4, 3, 0, 6), (4, 3, 5, 0), (0, 0, 0, 0)])
@pytest.mark.parametrize("gated", [False, True])
def test_nothing_of_something(backend, shape, rows, gated):
    """Sums over nothing are 0, and so are their gradients."""
    shape = (rows if shape[0] else 0, *shape[1:])
    given = {name: None if t is None else t.requires_grad_() for name, t in block(*shape, gated=gated).items()}
    y = tfk.ops.ffn(**given, activation="gelu", backend=backend)
    leaves = [t for t in given.values() if t is not None]
    grads = torch.autograd.grad(y.sum(), leaves)
    assert y.shape == (shape[0], shape[3])
    if 0 in shape[1:3]:
        hidden = act(given["b1"].detach(), "gelu").float() * (0 if gated else 1)
        expected = given["b2"] + hidden @ given["w2"].detach().T
        torch.testing.assert_close(y, expected.expand_as(y), rtol=1e-6, atol=1e-6)
    for t, grad in zip(leaves, grads, strict=True):
        assert grad.shape == t.shape and grad.isfinite().all()
    if shape[0] == 0:
        assert all((grad == 0).all() for grad in grads)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [40, 200])
def test_more_threads_than_tiles_of_rows(dtype, rows):
    """One tile or two, whose hidden features the threads share: 5 chunks of 80 for 6 threads, or 3 for 3."""
    with on_threads(6):
        assert_contract("ffn", block(rows, 24, 400, 70, dtype=dtype), "cpu")


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_strides_and_leading_axes(backend):
    given = block(30, 16, 24, 16)
    expected = tfk.ops.ffn(**given, backend=backend)
    x, wide = given["x"], torch.zeros(30, 40)
    wide[:, 3:35:2] = x
    views = {
        "transposed": x.T.contiguous().T,
        "every other column": wide[:, 3:35:2],
        "a slice": torch.cat([x, x], 1)[:, :16],
        "three leading axes": x.view(2, 3, 5, 16),
        "permuted axes": x.view(2, 15, 16).transpose(0, 1).contiguous().transpose(0, 1),
    }
    for name, view in views.items():
        y = tfk.ops.ffn(**(given | {"x": view}), backend=backend)
        assert y.shape == (*view.shape[:-1], 16) and torch.equal(y.reshape(30, 16), expected), name
    weights = {name: given[name].T.contiguous().T for name in ("w1", "w2")}
    assert torch.equal(tfk.ops.ffn(**(given | weights), backend=backend), expected)
    row = x[:1].expand(30, 16)
    repeated = tfk.ops.ffn(**(given | {"x": row}), backend=backend)
    torch.testing.assert_close(repeated, expected[:1].expand(30, 16), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_vector_is_a_row(backend):
    given = block(1, 16, 24, 8)
    y = tfk.ops.ffn(**(given | {"x": given["x"][0]}), backend=backend)
    assert y.shape == (8,) and torch.equal(y, tfk.ops.ffn(**given, backend=backend)[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_poisoned_row_stays_alone(backend, activation, poison):
    given = block(20, 8, 24, 8)
    clean = tfk.ops.ffn(**given, activation=activation, backend=backend)
    given["x"] = given["x"].clone()
    given["x"][3, 2] = poison
    y = tfk.ops.ffn(**given, activation=activation, backend=backend)
    assert y[3].isnan().any()
    rest = torch.arange(20) != 3
    torch.testing.assert_close(y[rest], clean[rest], rtol=0, atol=0)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_far_out(activation):
    """Where e^p overflows, underflows, or leaves only the last bits: a relative error of a few units, never NaN."""
    points = [0.0, 1e-30, 1e-4, 0.5, 1, 3, 5.5, 8, 13, 15, 40, 87, 88.5, 89, 104, 1e4, 3e38]
    p = torch.tensor([*points, *(-v for v in points)], dtype=torch.float32)
    eye = torch.eye(1)
    y = tfk.ops.ffn(p.view(-1, 1), eye, None, eye, None, activation=activation, backend="cpu").flatten()
    # e^88.5 is more than float holds, so what is left of p e^p there, 4e-37, may be 0
    tolerance = {"rtol": 4e-5 if activation == "gelu_tanh" else 1e-6, "atol": 4e-37}
    torch.testing.assert_close(y.double(), act(p, activation), **tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_far_out(activation, dtype, backend):
    """Where e^p leaves float32, and where it leaves float64: y = p and dx = 1 on the right, both 0 on the left."""
    points = torch.tensor(
        [40.0, 87, 88.5, 89, 104, 708, 710, 800, 1e4, 6e4, 1e10, 1e14, 1e20, 3e38, 1e160], dtype=torch.float64
    )
    most = torch.finfo(dtype).max
    # PyTorch's own tanh form gives NaN where the square of p overflows
    points = points[points < (most if backend == "cpu" else min(most, 1e15))].to(dtype)
    for sign in (1.0, -1.0):
        x = (sign * points).view(-1, 1).requires_grad_()
        eye = torch.eye(1, dtype=dtype)
        y = tfk.ops.ffn(x, eye, None, eye, None, activation=activation, backend=backend)
        (dx,) = torch.autograd.grad(y.sum(), x)
        torch.testing.assert_close(y, x.clamp(min=0), rtol=0, atol=1e-12)
        torch.testing.assert_close(dx, torch.full_like(dx, max(sign, 0.0)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whole_numbers_are_exact(dtype):
    """Products of small whole numbers have one right answer, whatever the order of the sums."""
    shapes = {"x": (37, 40), "w1": (70, 40), "w2": (33, 70)}
    whole = {
        name: torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(7)) for name, shape in shapes.items()
    }
    expected = torch.clamp(whole["x"] @ whole["w1"].T, min=0) @ whole["w2"].T
    assert expected.abs().max() <= 256  # what bfloat16 holds
    y = tfk.ops.ffn(**{name: t.to(dtype) for name, t in whole.items()}, b1=None, b2=None, backend="cpu")
    assert torch.equal(y, expected.to(dtype))


def test_keep_mask_is_the_documented_rule():
    keep = dropout.keep_mask(SEED, 0.25, torch.arange(37), 130)
    ones = {"x": torch.ones(37, 1), "w1": torch.ones(130, 1), "b1": None, "w2": torch.eye(130), "b2": None}
    y = tfk.ops.ffn(**ones, dropout_p=0.25, seed=SEED, backend="cpu")
    assert torch.equal(y, keep * torch.tensor(1 / 0.75))
