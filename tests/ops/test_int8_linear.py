"""int8_linear: what a call means, on every backend that has it; the kernel by name."""

import math

import pytest
import torch
from torch.autograd import gradcheck

import tfm_kernels as tfk
from tests.threads import on_threads
from tfm_kernels.testing import ContractError, assert_contract, invariance, judge

BACKENDS = ["reference", "aten", "cpu"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
WAYS = [False, True]  # dynamic
# rows, width, features: tails of every tile, rows alone, in part of a panel, in panels and in tiles, long sums
SIZES = [
    (1, 1, 1),
    (1, 583, 33),
    (1, 4100, 5),
    (2, 17, 3),
    (3, 130, 41),
    (4, 1040, 5),
    (7, 300, 33),
    (8, 64, 200),
    (9, 70, 13),
    (16, 600, 97),
]
SIZES += [(31, 33, 24), (32, 128, 260), (33, 40, 40), (70, 9, 12), (150, 140, 530), (270, 1040, 20), (600, 513, 37)]
SIZES += [(300, 141, 130), (20, 33, 159)]


def layer(rows, width, out, dtype=torch.float32, bias=True, dynamic=False):
    generator = torch.Generator().manual_seed(1000 * rows + width)
    draw = lambda *shape, scale=1.0: (scale * torch.randn(*shape, dtype=torch.float64, generator=generator)).to(dtype)
    weight = torch.randint(-128, 128, (out, width), generator=generator, dtype=torch.int8)
    scale = (0.5 + torch.rand(out, generator=generator)) / (74 * math.sqrt(max(width, 1)))
    given = {"x": draw(rows, width), "weight": weight, "scale": scale, "bias": draw(out) if bias else None}
    return given | {"dynamic": dynamic}


@pytest.mark.parametrize("dynamic", WAYS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_contract(dtype, size, dynamic):
    for bias in (True, False):
        assert_contract("int8_linear", layer(*size, dtype, bias, dynamic), "cpu", backward=False)


@pytest.mark.parametrize("dynamic", WAYS)
@pytest.mark.parametrize("backend", ["reference", "aten"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_contract_of_the_others(backend, dtype, dynamic):
    assert_contract("int8_linear", layer(33, 24, 40, dtype, dynamic=dynamic), backend)
    for size in ((33, 24, 40), (5, 1, 7)):
        assert_contract("int8_linear", layer(*size, dtype, dynamic=dynamic), backend, backward=False)


@pytest.mark.parametrize("dynamic", WAYS)
def test_the_judge_sees_what_is_lost(dynamic):
    given = layer(9, 24, 40, dynamic=dynamic)
    y = tfk.ops.int8_linear(**given, backend="reference")
    judge("int8_linear", given, {"y": y}).raise_broken()
    x, weight, scale = given["x"], given["weight"], given["scale"]
    product = x[:, -1:] * (weight[:, -1] * scale)
    step = x.abs().amax(1, keepdim=True) / 127 * scale  # the product of integers off by one
    for lost in (given["bias"] * (torch.arange(40) == 17), product, *([step] if dynamic else ())):
        with pytest.raises(ContractError):
            judge("int8_linear", given, {"y": y - lost}).raise_broken()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("size", [(13, 400, 75), (70, 583, 72)], ids=str)
def test_the_judge_takes_one_product_added_after_the_other(size, threads):
    """However the eager formula's BLAS adds, by which it is measured."""
    given = layer(*size)
    y = torch.zeros(size[0], size[2])
    for x, weight in zip(given["x"].T, given["weight"].float().T, strict=True):
        y = torch.addcmul(y, x[:, None], weight)
    y = y * given["scale"] + given["bias"]
    with on_threads(threads):
        judge("int8_linear", given, {"y": y}).raise_broken()
        with pytest.raises(ContractError):  # a factor that is a little wrong
            judge("int8_linear", given, {"y": y * (1 + 2**-19)}).raise_broken()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_product_of_integers_is_exact(backend, size):
    """With steps of 1 the result is the integer product itself, where float32 holds it."""
    given = layer(*size, bias=False, dynamic=True)
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(-127, 128, (size[0], size[1]), generator=generator)
    x[:, 0] = 127
    weight = torch.randint(-9, 10, given["weight"].shape, generator=generator)
    given |= {"x": x.float(), "weight": weight.to(torch.int8), "scale": torch.ones(size[2])}
    assert torch.equal(tfk.ops.int8_linear(**given, backend=backend), (x @ weight.T).float())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [63, 200, 2**17])
def test_the_largest_integers(backend, width, dtype=torch.float64):
    """Rows of 127 by weights of -128 and 127: no sum on the way overflows or saturates."""
    x = torch.full((5, width), 2.0)
    x[1] = -2.0
    weight = torch.full((2, width), -128, dtype=torch.int8)
    weight[1] = 127
    for rows in (x, x.repeat(9, 1)):
        given = {"x": rows.to(dtype), "weight": weight, "scale": torch.ones(2), "dynamic": True}
        y = tfk.ops.int8_linear(**given, backend=backend)
        judge("int8_linear", given, {"y": y}).raise_broken()


@pytest.mark.parametrize("backend", BACKENDS)
def test_halves_round_to_even(backend):
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]])
    y = tfk.ops.int8_linear(x, torch.eye(6, dtype=torch.int8), torch.ones(6), dynamic=True, backend=backend)
    assert y.tolist() == [[127.0, 0.0, 2.0, 2.0, 0.0, -2.0]]


@pytest.mark.parametrize("dynamic", WAYS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0, 4, 5), (4, 0, 5), (40, 0, 5), (4, 3, 0), (0, 0, 0)])
def test_nothing_of_something(backend, shape, dynamic):
    given = layer(*shape, dynamic=dynamic)
    y = tfk.ops.int8_linear(**given, backend=backend)
    assert torch.equal(y, given["bias"].expand(shape[0], shape[2]) if shape[1] == 0 else y.new_zeros(y.shape))
    assert y.shape == (shape[0], shape[2])


@pytest.mark.parametrize("dynamic", WAYS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [6, 12, 60])
def test_any_strides_and_leading_axes(dtype, rows, dynamic):
    """Bit for bit."""
    given = layer(rows, 24, 40, dtype, dynamic=dynamic)
    expected = tfk.ops.int8_linear(**given, backend="cpu")
    assert expected.shape == (rows, 40) and expected.dtype == dtype and expected.is_contiguous()
    three = given["x"].view(2, 3, -1, 24)
    y = tfk.ops.int8_linear(**(given | {"x": three}), backend="cpu")
    assert y.shape == (2, 3, rows // 6, 40) and torch.equal(y.reshape(rows, 40), expected)
    invariance.assert_view_equals_contiguous("int8_linear", given, "cpu", backward=False)
    weight, scale = given["weight"], torch.stack([given["scale"]] * 2, 1)[:, 0]
    for lay in (weight.T.contiguous().T, torch.cat([weight, weight], 1)[:, :24]):
        y = tfk.ops.int8_linear(**(given | {"weight": lay, "scale": scale}), backend="cpu")
        assert torch.equal(y, expected)


@pytest.mark.parametrize("dynamic", WAYS)
def test_one_vector_is_a_row(dynamic):
    given = layer(1, 24, 40, dynamic=dynamic)
    y = tfk.ops.int8_linear(**(given | {"x": given["x"][0]}), backend="cpu")
    assert torch.equal(y, tfk.ops.int8_linear(**given, backend="cpu")[0])


@pytest.mark.parametrize("dynamic", WAYS)
@pytest.mark.parametrize("rows", [3, 8, 9, 32, 40, 260, 700])
def test_does_not_depend_on_threads(rows, dynamic):
    given, found = layer(rows, 70, 530, dynamic=dynamic), []
    for threads in (1, 2, 5):
        with on_threads(threads):
            found.append(tfk.ops.int8_linear(**given, backend="cpu"))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_do_not_depend_on_their_number(dtype):
    """A product of integers is exact, whichever way it takes."""
    given = layer(300, 70, 53, dtype, dynamic=True)
    whole = tfk.ops.int8_linear(**given, backend="cpu")
    for rows in (1, 2, 4, 7, 8, 9, 17, 33, 100):
        part = tfk.ops.int8_linear(**(given | {"x": given["x"][:rows]}), backend="cpu")
        assert torch.equal(part, whole[:rows]), rows


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_in_its_row(value, backend):
    for rows in (5, 17, 45, 140):
        for dynamic in WAYS:
            given = layer(rows, 20, 36, dynamic=dynamic)
            clean = tfk.ops.int8_linear(**given, backend=backend)
            given["x"][rows - 1, 7] = value
            y = tfk.ops.int8_linear(**given, backend=backend)
            assert torch.equal(y[:-1], clean[:-1])
            assert not y[-1].isfinite().any() and (not dynamic or y[-1].isnan().all())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_small_rows(backend, dtype):
    """A row below 2**-119 counts as zeros, down to 0 itself; one above is as good as any."""
    given = layer(40, 33, 20, dtype, dynamic=True)
    given["x"][3] = 0.0
    given["x"][9] = 2.0**-125 if dtype != torch.float16 else 0.0
    y = tfk.ops.int8_linear(**given, backend=backend)
    assert torch.equal(y[3], given["bias"]) and torch.equal(y[9], given["bias"])
    if dtype != torch.float16:
        small = given | {"x": given["x"] * 2.0**-100, "scale": given["scale"] * 2.0**100}
        small["x"][9] = 2.0**-119 * (1 - torch.finfo(dtype).eps)
        assert torch.equal(tfk.ops.int8_linear(**small, backend=backend), y)


@pytest.mark.parametrize("dynamic", WAYS)
def test_gradients_are_refused_by_name_and_left_to_pytorch_otherwise(dynamic):
    given = layer(8, 24, 40, dynamic=dynamic)
    given["x"].requires_grad_()
    message = "int8_linear: backend 'cpu' cannot run this call: computes no gradients"
    with pytest.raises(tfk.BackendError, match=message):
        tfk.ops.int8_linear(**given, backend="cpu")
    assert "-> aten" in tfk.explain("int8_linear", **given)
    tfk.ops.int8_linear(**given).sum().backward()
    expected = (given["weight"] * given["scale"][:, None]).sum(0)
    torch.testing.assert_close(given["x"].grad, expected.expand(8, 24))
    with torch.no_grad():
        assert "-> cpu" in tfk.explain("int8_linear", **given)


@pytest.mark.parametrize("backend", ["reference", "aten"])
def test_gradcheck(backend):
    given = layer(3, 2, 4, torch.float64)
    x, bias = given["x"].requires_grad_(), given["bias"].requires_grad_()
    function = lambda x, bias: tfk.ops.int8_linear(x, given["weight"], given["scale"], bias, backend=backend)
    assert gradcheck(function, (x, bias))


def test_opcheck():
    for dynamic in WAYS:
        torch.library.opcheck(
            torch.ops.tfm_kernels.int8_linear_fwd_cpu.default, tuple(layer(5, 12, 9, dynamic=dynamic).values())
        )


@pytest.mark.parametrize("backend", ["aten", "cpu"])
@pytest.mark.parametrize("dynamic", WAYS)
def test_traced_whole(dynamic, backend):
    given = layer(25, 16, 8, dynamic=dynamic)
    x = given.pop("x")
    step = torch.compile(
        lambda x: tfk.ops.int8_linear(x, **given, backend=backend) * 2, fullgraph=True, backend="eager"
    )
    assert torch.equal(step(x), tfk.ops.int8_linear(x, **given, backend=backend) * 2)


def test_tensors_of_the_wrong_kind_are_one_sentence():
    """What tests/test_bad_calls.py cannot make of a valid call."""
    given = layer(5, 8, 12)
    for change, sentence in [
        ({"weight": given["weight"].to_sparse()}, "weight must be a dense tensor, got layout torch.sparse_coo"),
        ({"bias": given["bias"].double()}, "x and bias must have one dtype, got x float32, bias float64"),
    ]:
        with pytest.raises(ValueError, match=f"int8_linear: {sentence}"):
            tfk.ops.int8_linear(**(given | change))
    wide = torch.zeros(1).expand(1, 2**17 + 1)
    weight = torch.zeros(1, dtype=torch.int8).expand(1, 2**17 + 1)
    with pytest.raises(ValueError, match="x must have at most 131,072 columns, got 131,073"):
        tfk.ops.int8_linear(wide, weight, torch.ones(1), dynamic=True)
    assert tfk.ops.int8_linear(wide, weight, torch.ones(1)).item() == 0.0
