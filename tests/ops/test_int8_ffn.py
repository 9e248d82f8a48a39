"""int8_ffn: what a call means, on every backend that has it; the kernel by name."""

import math

import pytest
import torch

import tfm_kernels as tfk
from tests.threads import on_threads
from tfm_kernels.testing import ContractError, assert_contract, invariance, judge
from tfm_kernels.testing.float64 import assert_same_in_float64

BACKENDS = ["reference", "aten", "cpu"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
WAYS = [False, True]  # dynamic
ACTIVATIONS = ["relu", "gelu", "gelu_tanh", "silu"]
# rows, width, hidden, out: few rows go by features, 640 and more by tiles on 5 threads, on one from 128
FEW = [(1, 1, 1, 1), (5, 17, 33, 3), (40, 64, 200, 24)]
TILES = [(128, 33, 101, 20), (150, 64, 256, 64), (333, 40, 97, 130), (700, 513, 30, 5)]


def block(rows, width, hidden, out, dtype=torch.float32, bias=True, gated=False, activation="gelu", dynamic=True):
    generator = torch.Generator().manual_seed(1000 * rows + width)
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype)

    def weight(out, width):
        integers = torch.randint(-127, 128, (out, width), generator=generator).to(torch.int8)
        return integers, (0.5 + torch.rand(out, generator=generator)) / (74 * math.sqrt(max(width, 1)))

    w1, scale1 = weight(hidden, width)
    w2, scale2 = weight(out, hidden)
    given = {"x": draw(rows, width), "w1": w1, "scale1": scale1, "b1": draw(hidden) if bias else None, "w2": w2}
    given |= {"scale2": scale2, "b2": draw(out) if bias else None, "activation": activation}
    given["dynamic"] = dynamic
    if gated:
        given["gate"], given["gate_scale"] = weight(hidden, width)
    return given


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [*FEW, *TILES], ids=str)
def test_contract(dtype, size):
    with on_threads(1):
        for i, activation in enumerate(ACTIVATIONS):
            for gated in (False, True):
                for dynamic in WAYS:
                    given = block(*size, dtype, (i + gated) % 2 == 0, gated, activation, dynamic)
                    assert_contract("int8_ffn", given, "cpu", backward=False)


@pytest.mark.parametrize("backend", ["reference", "aten"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True])
def test_contract_of_the_others(backend, dtype, gated):
    for activation in ACTIVATIONS:
        for dynamic in WAYS:
            given = block(33, 24, 40, 12, dtype, gated=gated, activation=activation, dynamic=dynamic)
            assert_contract("int8_ffn", given, backend, backward=False)


@pytest.mark.parametrize("backend", ["cpu", "aten"])
@pytest.mark.parametrize("gated", [False, True])
def test_the_judge_allows_what_its_own_sums_round(backend, gated):
    """In float64 the kernel's integers are exact and the judge's numbers are not, where long sums come out small."""
    given = block(193, 1030, 3, 9, torch.float64, bias=False, gated=gated, activation="relu")
    assert_contract("int8_ffn", given, backend, backward=False)


@pytest.mark.parametrize("dynamic", WAYS)
@pytest.mark.parametrize("gated", [False, True])
def test_the_judge_sees_what_is_lost(gated, dynamic):
    """A bias, a product, a step of one integer of the hidden activation, and rows rounded or not where they should."""
    given = block(33, 24, 40, 12, gated=gated, dynamic=dynamic)
    y = tfk.ops.int8_ffn(**given, backend="reference")
    judge("int8_ffn", given, {"y": y}).raise_broken()
    x, w1, w2 = given["x"], given["w1"].float() * given["scale1"][:, None], given["w2"] * given["scale2"][:, None]
    hidden = torch.nn.functional.gelu(x @ w1.T + given["b1"])
    hidden = hidden * (x @ (given["gate"].float() * given["gate_scale"][:, None]).T) if gated else hidden
    step = hidden.abs().amax(1, keepdim=True) / 127
    bias = given["b2"] * (torch.arange(12) == 5)
    other = tfk.ops.int8_ffn(**(given | {"dynamic": not dynamic}), backend="reference")
    for wrong in (y - bias, y - hidden[:, -1:] * w2[:, -1], y + step * w2[:, 7], other):
        with pytest.raises(ContractError):
            judge("int8_ffn", given, {"y": wrong}).raise_broken()


@pytest.mark.parametrize("dynamic", WAYS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "shape", [(0, 4, 5, 3), (4, 0, 5, 3), (4, 3, 0, 5), (4, 3, 5, 0), (200, 3, 0, 5), (0, 0, 0, 0)]
)
def test_nothing_of_something(backend, shape, dynamic):
    given = block(*shape, activation="relu", dynamic=dynamic)
    y = tfk.ops.int8_ffn(**given, backend=backend)
    assert y.shape == (shape[0], shape[3])
    if shape[2] == 0:
        assert torch.equal(y, given["b2"].expand(shape[0], shape[3]))


@pytest.mark.parametrize("dynamic", WAYS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [6, 300])
def test_any_strides_and_leading_axes(dtype, rows, dynamic):
    """Bit for bit."""
    given = block(rows, 24, 40, 12, dtype, gated=True, dynamic=dynamic)
    expected = tfk.ops.int8_ffn(**given, backend="cpu")
    assert expected.shape == (rows, 12) and expected.dtype == dtype and expected.is_contiguous()
    y = tfk.ops.int8_ffn(**(given | {"x": given["x"].view(2, 3, -1, 24)}), backend="cpu")
    assert y.shape == (2, 3, rows // 6, 12) and torch.equal(y.reshape(rows, 12), expected)
    invariance.assert_view_equals_contiguous("int8_ffn", given, "cpu", backward=False)
    turned = {name: given[name].T.contiguous().T for name in ("w1", "w2", "gate")}
    assert torch.equal(tfk.ops.int8_ffn(**(given | turned), backend="cpu"), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True])
def test_rows_as_they_are_are_those_of_the_layers_apart(dtype, gated):
    """Bit for bit, in the type of the hidden activation, on any number of threads."""
    given = block(40, 70, 53, 40, dtype, gated=gated, activation="relu", dynamic=False)
    wide = {
        name: t.to(torch.promote_types(dtype, torch.float32)) for name, t in given.items() if name in ("x", "b1", "b2")
    }
    linear = lambda x, weight, scale, bias: tfk.ops.int8_linear(x, given[weight], given[scale], bias, backend="cpu")
    hidden = linear(wide["x"], "w1", "scale1", wide["b1"]).relu()
    hidden = hidden * linear(wide["x"], "gate", "gate_scale", None) if gated else hidden
    expected = linear(hidden, "w2", "scale2", wide["b2"]).to(dtype)
    for threads in (1, 2, 5):
        with on_threads(threads):
            assert torch.equal(tfk.ops.int8_ffn(**given, backend="cpu"), expected), threads


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True])
def test_does_not_depend_on_threads_or_the_number_of_rows(dtype, gated):
    """Whether rows go by tiles or by features changes no bit: both round the same float32."""
    given = block(300, 70, 53, 40, dtype, gated=gated)
    with on_threads(1):
        whole = tfk.ops.int8_ffn(**given, backend="cpu")
    for threads, rows in ((2, 300), (5, 300), (1, 1), (1, 7), (1, 40), (1, 129), (2, 257)):
        with on_threads(threads):
            part = tfk.ops.int8_ffn(**(given | {"x": given["x"][:rows]}), backend="cpu")
        assert torch.equal(part, whole[:rows]), (threads, rows)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_in_its_row(value, backend):
    for rows in (5, 45, 300):
        given = block(rows, 20, 36, 11)
        clean = tfk.ops.int8_ffn(**given, backend=backend)
        given["x"][rows - 1, 7] = value
        y = tfk.ops.int8_ffn(**given, backend=backend)
        assert torch.equal(y[:-1], clean[:-1]) and y[-1].isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
def test_a_hidden_activation_far_in_its_tail(activation, backend):
    """Zeros in float64, and in float32 what its own rounding leaves: one row's steps are as small."""
    for shift in range(10, 60, 5):
        given = block(40, 3, 1, 2, torch.bfloat16, bias=False, activation=activation)
        given |= {"x": 3 * given["x"], "scale1": torch.tensor([0.05]), "b1": torch.tensor([-shift]).bfloat16()}
        assert_contract("int8_ffn", given, backend, backward=False)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_hidden_activation_of_zeros(backend):
    given = block(300, 20, 36, 11, activation="relu")
    given["b1"] = torch.full((36,), -1e6)
    assert torch.equal(tfk.ops.int8_ffn(**given, backend=backend), given["b2"].expand(300, 11))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("gated", [False, True])
def test_no_features(gated, backend):
    """What is multiplied by a gate of no features is 0, whatever b1 is."""
    given = block(700, 0, 5, 3, gated=gated, activation="silu")
    given["w2"] = torch.full((3, 5), 100, dtype=torch.int8)
    y = tfk.ops.int8_ffn(**given, backend=backend)
    if gated:
        assert torch.equal(y, given["b2"].expand(700, 3))
    else:
        torch.testing.assert_close(y, tfk.ops.int8_ffn(**given, backend="reference"))


def test_gradients_are_refused_by_name_and_left_to_pytorch_otherwise():
    given = block(8, 24, 40, 12)
    given["x"].requires_grad_()
    message = "int8_ffn: backend 'cpu' cannot run this call: computes no gradients"
    with pytest.raises(tfk.BackendError, match=message):
        tfk.ops.int8_ffn(**given, backend="cpu")
    assert "-> aten" in tfk.explain("int8_ffn", **given)
    with torch.no_grad():
        assert "-> cpu" in tfk.explain("int8_ffn", **given)


@pytest.mark.parametrize("backend", ["reference", "aten"])
@pytest.mark.parametrize("gated", [False, True])
def test_gradients_pass_the_roundings(backend, gated):
    """They are those of the block of floats at the rounded numbers, in float64."""
    given = block(9, 24, 40, 12, torch.float64, gated=gated)
    leaves = {name: given[name].requires_grad_() for name in ("x", "b1", "b2")}
    y = tfk.ops.int8_ffn(**given, backend=backend)
    found = torch.autograd.grad(y.square().sum(), list(leaves.values()))
    weight = lambda name, steps: given[name].double() * given[steps].double()[:, None]
    left = lambda t: t + (tfk.testing.int8_linear.rounded(t.detach()) - t).detach()
    x = left(leaves["x"])
    hidden = torch.nn.functional.gelu(x @ weight("w1", "scale1").T + leaves["b1"])
    hidden = hidden * (x @ weight("gate", "gate_scale").T) if gated else hidden
    y = left(hidden) @ weight("w2", "scale2").T + leaves["b2"]
    expected = torch.autograd.grad(y.square().sum(), list(leaves.values()))
    for name, gradient, wanted in zip(leaves, found, expected, strict=True):
        assert_same_in_float64(gradient, wanted, name)


def test_opcheck():
    for rows in (5, 300):
        given = block(rows, 12, 9, 7, gated=True)
        names = ["x", "w1", "scale1", "b1", "w2", "scale2", "b2", "gate", "gate_scale"]
        arguments = *(given[name] for name in names), 1, True
        torch.library.opcheck(torch.ops.tfm_kernels.int8_ffn_fwd_cpu.default, arguments)


@pytest.mark.parametrize("dynamic", WAYS)
@pytest.mark.parametrize("backend", ["aten", "cpu"])
def test_traced_whole(backend, dynamic):
    given = block(25, 16, 8, 8, dynamic=dynamic)
    x = given.pop("x")
    step = torch.compile(lambda x: tfk.ops.int8_ffn(x, **given, backend=backend) * 2, fullgraph=True, backend="eager")
    assert torch.equal(step(x), tfk.ops.int8_ffn(x, **given, backend=backend) * 2)


def test_tensors_of_the_wrong_kind_are_one_sentence():
    """What tests/test_bad_calls.py cannot make of a valid call."""
    given = block(5, 8, 12, 8)
    gate = {"gate": given["w1"], "gate_scale": given["scale1"]}
    for change, sentence in [
        ({"w2": given["w2"].to_sparse()}, "w2 must be a dense tensor, got layout torch.sparse_coo"),
        ({"b1": given["b1"].double()}, "x, b1 and b2 must have one dtype, got x float32, b1 float64, b2 float32"),
        ({"gate": given["w1"]}, "gate_scale must be given with gate, got None"),
        ({"gate_scale": given["scale1"]}, "gate must be given with gate_scale, got None"),
        (gate | {"gate": given["w1"].float()}, "gate must be int8, got float32"),
        (gate | {"gate_scale": given["scale1"][1:]}, r"gate_scale must have shape \(12,\) to match gate \(12, 8\)"),
    ]:
        with pytest.raises(ValueError, match=f"int8_ffn: {sentence}"):
            tfk.ops.int8_ffn(**(given | change))
