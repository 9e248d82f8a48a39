"""linear: what a call means, on every backend that has it; the kernel for few rows by name."""

import math

import pytest
import torch
from torch.autograd import gradgradcheck

import tfm_kernels as tfk
from tests.threads import on_threads
from tfm_kernels import _library
from tfm_kernels.testing import ContractError, assert_contract, invariance, judge

BACKENDS = ["reference", "aten", "cpu"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
# rows, width, features: tails of every tile, more than one block of rows, sums in more than one part
SIZES = [
    (1, 1, 1),
    (1, 583, 33),
    (1, 4100, 5),
    (1, 70, 23),
    (1, 250, 17),
    (2, 17, 3),
    (4, 1040, 5),
    (7, 300, 33),
    (8, 64, 200),
    (9, 70, 13),
    (16, 600, 97),
    (31, 33, 24),
]
SIZES += [(32, 128, 260), (33, 40, 40), (70, 9, 12), (150, 140, 530), (270, 1040, 20)]


def layer(rows, width, out, dtype=torch.float32, bias=True):
    generator = torch.Generator().manual_seed(1000 * rows + width)
    draw = lambda *shape, scale=1.0: (scale * torch.randn(*shape, dtype=torch.float64, generator=generator)).to(dtype)
    x, weight = draw(rows, width), draw(out, width, scale=1 / math.sqrt(max(width, 1)))
    return {"x": x, "weight": weight, "bias": draw(out) if bias else None}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_contract(dtype, size):
    for bias in (True, False):
        assert_contract("linear", layer(*size, dtype, bias), "cpu", backward=False)


@pytest.mark.parametrize("backend", ["reference", "aten"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_contract_of_the_others(backend, dtype):
    assert_contract("linear", layer(33, 24, 40, dtype), backend)


def test_the_judge_sees_a_lost_bias_and_a_lost_product():
    given = layer(9, 24, 40)
    y = tfk.ops.linear(**given, backend="reference")
    judge("linear", given, {"y": y}).raise_broken()
    x, weight = given["x"], given["weight"]
    for lost in (given["bias"] * (torch.arange(40) == 17), x[:, -1:] * weight[:, -1]):
        with pytest.raises(ContractError):
            judge("linear", given, {"y": y - lost}).raise_broken()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0, 4, 5), (4, 0, 5), (20, 0, 5), (40, 0, 5), (4, 3, 0), (40, 3, 0), (0, 0, 0)])
def test_nothing_of_something(backend, shape):
    given = layer(*shape)
    y = tfk.ops.linear(**given, backend=backend)
    assert torch.equal(y, given["bias"].expand(shape[0], shape[2]) if shape[1] == 0 else y.new_zeros(y.shape))
    assert y.shape == (shape[0], shape[2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [6, 12, 60])
@pytest.mark.parametrize("width", [1, 2, 24])
def test_any_strides_and_leading_axes(dtype, rows, width):
    """Bit for bit; columns that lie apart, however few, and rows of an odd number of them, which form no pairs."""
    given = layer(rows, width, 40, dtype)
    expected = tfk.ops.linear(**given, backend="cpu")
    assert expected.shape == (rows, 40) and expected.dtype == dtype and expected.is_contiguous()
    three = given["x"].view(2, 3, -1, width)
    y = tfk.ops.linear(**(given | {"x": three}), backend="cpu")
    assert y.shape == (2, 3, rows // 6, 40) and torch.equal(y.reshape(rows, 40), expected)
    invariance.assert_view_equals_contiguous("linear", given, "cpu", backward=False)
    for weight in (given["weight"].T.contiguous().T, torch.cat([given["weight"]] * 2, 1)[:, :width]):
        assert torch.equal(tfk.ops.linear(**(given | {"weight": weight}), backend="cpu"), expected)


def test_one_vector_is_a_row():
    given = layer(1, 24, 40)
    y = tfk.ops.linear(given["x"][0], given["weight"], given["bias"], backend="cpu")
    assert torch.equal(y, tfk.ops.linear(**given, backend="cpu")[0])


@pytest.mark.parametrize("rows", [3, 8, 9, 32, 40, 260])
def test_does_not_depend_on_threads(rows):
    given, found = layer(rows, 70, 530), []
    for threads in (1, 2, 5):
        with on_threads(threads):
            found.append(tfk.ops.linear(**given, backend="cpu"))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_what_is_not_finite_stays_in_its_row():
    for rows in (5, 17, 45, 140):
        given = layer(rows, 20, 36)
        clean = tfk.ops.linear(**given, backend="cpu")
        given["x"][rows - 1, 7] = math.nan
        y = tfk.ops.linear(**given, backend="cpu")
        assert torch.equal(y[:-1], clean[:-1]) and y[-1].isnan().all()


def test_gradients_are_refused_by_name_and_left_to_pytorch_otherwise():
    given = layer(8, 24, 40)
    given["weight"].requires_grad_()
    with pytest.raises(tfk.BackendError, match="linear: backend 'cpu' cannot run this call: computes no gradients"):
        tfk.ops.linear(**given, backend="cpu")
    assert "-> aten" in tfk.explain("linear", **given)
    tfk.ops.linear(**given).sum().backward()
    torch.testing.assert_close(given["weight"].grad, given["x"].sum(0).expand(40, 24))
    with torch.no_grad():
        assert "-> cpu" in tfk.explain("linear", **given)


def test_the_operator_refuses_by_itself_what_its_kernel_would_misread():
    """Traced and exported programs call it past ops.linear."""
    given = layer(5, 12, 9)
    bad = {
        "weight must have shape": {"weight": given["weight"][:, 1:]},
        "weight must have the dtype of x": {"weight": given["weight"].double()},
        "bias must have shape": {"bias": given["bias"][1:]},
        "bias must have the dtype of x": {"bias": given["bias"].double()},
        "must have 2 dimensions": {"x": given["x"][0]},
    }
    for words, some in bad.items():
        with pytest.raises(RuntimeError, match=f"linear_fwd_cpu: .*{words}"):
            torch.ops.tfm_kernels.linear_fwd_cpu(*(given | some).values())


@pytest.mark.parametrize("backend", ["reference", "aten"])
def test_double_backward(backend):
    given = tuple(t.requires_grad_() for t in layer(3, 2, 4, torch.float64).values())
    assert gradgradcheck(lambda *t: tfk.ops.linear(*t, backend=backend), given)


MANY = {_library.XEON: 64, _library.ZEN3: None, _library.ZEN4: 384}  # rows of float32 up to which; None: all
ONE = {_library.XEON: 1 << 17, _library.ZEN3: 1 << 16, _library.ZEN4: 1 << 16}  # elements of the weight for one row


@pytest.mark.parametrize("nearest", MANY)
def test_few_rows_are_chosen_and_many_where_the_library_is_slow(nearest, monkeypatch):
    monkeypatch.setattr(_library, "nearest", nearest)
    few = 4 if nearest == _library.XEON else 2
    emulated = {torch.bfloat16: nearest == _library.ZEN3, torch.float16: nearest != _library.XEON}
    last = MANY[nearest]
    expected = {(torch.float32, rows): False for rows in (0, 1, few - 1)} | {(torch.float64, 8): False}
    expected |= {(torch.float32, rows): True for rows in (few, last or 9000)}
    expected |= {} if last is None else {(torch.float32, last + 1): False}
    for dtype, many in emulated.items():
        expected |= {(dtype, 0): False, (dtype, 1): True, (dtype, 128): True, (dtype, 129): many, (dtype, 9000): many}
    for (dtype, rows), kernel in expected.items():
        x, weight = torch.ones(rows, 8, dtype=dtype), torch.ones(4, 8, dtype=dtype)
        assert ("-> cpu" in tfk.explain("linear", x, weight)) is kernel, (dtype, rows)
    row, large = torch.ones(1, 256), torch.ones(ONE[nearest] // 256, 256)
    assert "-> cpu" in tfk.explain("linear", row, large)
    assert "-> cpu" not in tfk.explain("linear", row, large[1:])


def test_opcheck():
    given = layer(5, 12, 9)
    torch.library.opcheck(torch.ops.tfm_kernels.linear_fwd_cpu.default, (given["x"], given["weight"], given["bias"]))


def test_traced_whole():
    given = layer(5, 12, 9)
    step = torch.compile(
        lambda x: tfk.ops.linear(x, given["weight"], backend="cpu") * 2, fullgraph=True, backend="eager"
    )
    assert torch.equal(step(given["x"]), tfk.ops.linear(given["x"], given["weight"], backend="cpu") * 2)


@pytest.mark.parametrize("width", [7, 63, 72])
@pytest.mark.parametrize("backend", ["aten", "cpu", None])
def test_nothing_between_rows_is_read(backend, width):
    """oneDNN reads on behind short rows of bfloat16, and multiplies what it finds by 0."""
    rows, dtype = 300, torch.bfloat16
    x = torch.full((rows, width + 8), torch.nan, dtype=dtype)[:, :width]
    x.copy_(torch.randn(rows, width, generator=torch.Generator().manual_seed(0)))
    w1, w2 = torch.ones(40, width, dtype=dtype).requires_grad_(), torch.ones(width, 40, dtype=dtype)
    target = torch.zeros(rows, dtype=torch.int64)
    calls = {
        "linear": lambda x: tfk.ops.linear(x, w1.detach(), backend=backend),
        "ffn": lambda x: tfk.ops.ffn(x, w1, None, w2, None, backend=backend),
        "linear_cross_entropy": lambda x: tfk.ops.linear_cross_entropy(x, w1, target, backend=backend),
    }
    for name, call in calls.items():
        y = call(x)
        assert torch.isfinite(y).all(), name
        torch.testing.assert_close(y, call(x.contiguous()))
        if y.requires_grad:
            assert torch.isfinite(torch.autograd.grad(y.sum(), w1)[0]).all(), name
