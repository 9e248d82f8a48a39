"""Int8Linear and Int8MultiheadAttention: what their weights are, and the life of a module."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import tfm_kernels as tfk
from tfm_kernels.nn.int8 import int8_feed_forward, quantized_weight
from tfm_kernels.testing.float64 import assert_same_in_float64
from tfm_kernels.testing.int8_linear import rounded

WAYS = [False, True]


def linear(dtype=torch.float32, bias=True, width=24, out=40):
    torch.manual_seed(0)
    return nn.Linear(width, out, bias=bias, dtype=dtype)


def from_linear(layer, **options):
    return tfk.nn.Int8Linear.from_weight(layer.weight, layer.bias, **options)


X = torch.randn(3, 5, 24, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_weight_is_within_half_a_step(dtype):
    weight = linear(dtype).weight
    weight.data[7] = 0.0
    integers, scale = quantized_weight(weight)
    assert integers.dtype == torch.int8 and scale.dtype == torch.float32 and scale[7] == 0 and not integers[7].any()
    assert integers.min() >= -127
    largest = integers.abs().amax(1)
    assert (largest[torch.arange(40) != 7] == 127).all()
    error = (integers.double() * scale.double()[:, None] - weight.double()).abs()
    assert (error <= 0.5001 * scale.double()[:, None]).all()


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0)])
def test_a_weight_of_nothing(shape):
    integers, scale = quantized_weight(torch.zeros(shape))
    assert integers.shape == shape and scale.shape == shape[:1]


@pytest.mark.parametrize("dynamic", WAYS)
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_is_the_op_with_its_tensors(bias, dynamic):
    layer = from_linear(linear(bias=bias), dynamic=dynamic)
    expected = tfk.ops.int8_linear(X, layer.weight, layer.scale, layer.bias, dynamic=dynamic)
    assert torch.equal(layer(X), expected)
    assert torch.equal(layer.part(X, 8, 20), expected[..., 8:20])
    assert (layer(X) - linear(bias=bias)(X)).abs().max() < 0.05


def test_casts_keep_the_steps():
    layer = from_linear(linear())
    scale = layer.scale.clone()
    for cast in (torch.Tensor.half, torch.Tensor.bfloat16, torch.Tensor.double, torch.Tensor.float):
        moved = getattr(copy.deepcopy(layer), cast.__name__)()
        assert moved.scale.dtype == torch.float32 and torch.equal(moved.scale, scale)
        assert moved.weight.dtype == torch.int8 and moved.bias.dtype == cast(X).dtype
        assert moved(cast(X)).dtype == cast(X).dtype
    assert layer.to("meta").scale.is_meta


def test_state_dict_copy_and_pickle():
    layer = from_linear(linear(), dynamic=True)
    assert set(layer.state_dict()) == {"weight", "scale", "bias"}
    empty = tfk.nn.Int8Linear(24, 40, dynamic=True)
    empty.load_state_dict(layer.state_dict())
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    assert set(torch.load(buffer)) == {"weight", "scale", "bias"}
    for other in (empty, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(X), layer(X))


def test_autocast_is_followed():
    layer = from_linear(linear(), dynamic=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(X)
    expected = copy.deepcopy(layer).bfloat16()(X.bfloat16())
    assert y.dtype == torch.bfloat16 and torch.equal(y, expected)


@pytest.mark.parametrize("dynamic", WAYS)
def test_a_gradient_flows_to_the_input_alone(dynamic):
    layer, x = from_linear(linear(), dynamic=dynamic), X.clone().requires_grad_()
    assert not any(p.requires_grad for p in layer.parameters())
    layer(x).sum().backward()
    expected = (layer.weight * layer.scale[:, None]).sum(0).expand_as(x)
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.parametrize("dynamic", WAYS)
@torch.no_grad()
def test_a_feed_forward_block_by_one_op(dynamic):
    """With a gate of its own, or in the second half of the first layer's rows; what does not fit is left alone."""
    first, gate, second, both = (
        from_linear(linear(torch.float64, False, width, out), dynamic=dynamic)
        for width, out in ((24, 40), (24, 40), (40, 24), (24, 80))
    )
    x = X.double()
    expected = second(torch.nn.functional.silu(first(x)) * gate(x))
    assert_same_in_float64(int8_feed_forward(x, first, "silu", second, gate), expected)
    left, right = both(x).chunk(2, -1)
    expected = second(torch.nn.functional.silu(left) * right)
    assert_same_in_float64(int8_feed_forward(x, both, "silu", second, both), expected)
    biased, other = (from_linear(linear(width=24, out=80), dynamic=way) for way in (dynamic, not dynamic))
    assert int8_feed_forward(x, biased, "silu", second, biased) is None
    assert int8_feed_forward(x, other, "silu", second) is None
    assert int8_feed_forward(x, nn.Linear(24, 40), "silu", second) is None


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("dynamic", WAYS)
def test_an_exported_block_is_bound_to_no_shape(dynamic, strict):
    layer = tfk.nn.TransformerEncoderLayer(24, 2, 40, batch_first=True).eval()
    tfk.quantize(layer, "int8_dynamic" if dynamic else "int8_weight_only")
    sizes = {0: torch.export.Dim("B", min=1, max=64), 1: torch.export.Dim("T", min=1, max=64)}
    program = torch.export.export(layer, (X,), dynamic_shapes=(sizes,), strict=strict).module()
    other = torch.randn(7, 9, 24, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(program(other), layer(other))


def test_compiles_whole():
    layer = from_linear(linear(), dynamic=True)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert torch.equal(compiled(X), tfk.ops.int8_linear(
            X, layer.weight, layer.scale, layer.bias, dynamic=True, backend="cpu"
        ))  # fmt: skip


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (lambda: tfk.nn.Int8Linear(-1, 2), ValueError, "in_features must be at least 0, got -1"),
        (lambda: tfk.nn.Int8Linear(2, 2.0), TypeError, "out_features must be an int, got float"),
        (lambda: tfk.nn.Int8Linear(2, 2, backend="gpu"), ValueError, "backend must be one of .*, got 'gpu'"),
        (lambda: tfk.nn.Int8Linear(2, 2)(torch.zeros(3, 4)), ValueError, "x must have in_features 2 as its last size"),
        (lambda: quantized_weight(torch.tensor([[1.0, float("nan")]])), ValueError, "weight must be finite"),
        (lambda: quantized_weight(torch.ones(1, 2, device="meta")), ValueError, "got one on the device meta"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_sentence(call, error, sentence):
    with pytest.raises(error, match=sentence):
        call()


ATTENTIONS = {
    "plain": {},
    "no bias": {"bias": False},
    "extra keys": {"add_bias_kv": True, "add_zero_attn": True},
    "time first": {"batch_first": False},
}


def floats_of(given, dynamic):
    """The attention of floats with the numbers that the integers stand for: of weights and, dynamic, of inputs."""
    module = tfk.nn.MultiheadAttention(
        given.embed_dim, given.num_heads, 0.0, given.out_proj.bias is not None, given.bias_k is not None,
        given.add_zero_attn, batch_first=given.batch_first, dtype=torch.float64,
    ).eval()  # fmt: skip
    module.load_state_dict(given.state_dict())
    for weight in (module.in_proj_weight, module.out_proj.weight):
        integers, scale = quantized_weight(weight)
        weight.data = integers.double() * scale.double()[:, None]
    if dynamic:
        module.out_proj.register_forward_pre_hook(lambda layer, args: (left_of(args[0]),))
    return module


def left_of(x):
    """What rounding rows to int8 leaves of them."""
    return rounded(x.flatten(0, -2)).view(x.shape)


@pytest.mark.parametrize("dynamic", WAYS)
@pytest.mark.parametrize("cls", [nn.MultiheadAttention, tfk.nn.MultiheadAttention])
@pytest.mark.parametrize("options", ATTENTIONS.values(), ids=ATTENTIONS)
def test_attention_is_that_of_the_rounded_numbers(cls, options, dynamic):
    torch.manual_seed(0)
    given = cls(16, 4, **{"batch_first": True, **options}, dtype=torch.float64).eval()
    for parameter in given.parameters():
        nn.init.normal_(parameter, std=0.3)
    quantized = tfk.nn.Int8MultiheadAttention.from_attention(given, dynamic=dynamic)
    floats, rounds = floats_of(given, dynamic), left_of if dynamic else lambda x: x
    x, memory, value = (torch.randn(3, 5, 16, dtype=torch.float64) for _ in range(3))
    left, left_memory, left_value = map(rounds, (x, memory, value))
    with torch.no_grad():
        for inputs, expected in (
            ((x, x, x), (left, left, left)),
            ((x, memory, memory), (left, left_memory, left_memory)),
            ((x, memory, value), (left, left_memory, left_value)),
        ):
            for found, wanted in zip(quantized(*inputs), floats(*expected), strict=True):
                assert_same_in_float64(found, wanted)
    assert set(quantized.state_dict()) >= {"in_proj.weight", "in_proj.scale", "out_proj.weight", "out_proj.scale"}
    assert "in_proj_weight" not in quantized.state_dict() and isinstance(quantized, nn.MultiheadAttention)


def test_making_it_draws_no_random_numbers():
    given = nn.MultiheadAttention(16, 4, add_bias_kv=True)
    before = torch.get_rng_state()
    module = tfk.nn.Int8MultiheadAttention.from_attention(given)
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(t.is_meta for t in (*module.parameters(), *module.buffers()))


def test_attention_of_several_widths_is_refused():
    with pytest.raises(ValueError, match="kdim and vdim must be embed_dim"):
        tfk.nn.Int8MultiheadAttention.from_attention(nn.MultiheadAttention(16, 4, kdim=8))


def test_a_floating_weight_that_is_assigned_becomes_integers():
    embedding, layer = nn.Embedding(40, 24), from_linear(linear())
    layer.weight = embedding.weight
    assert torch.equal(layer.weight, quantized_weight(embedding.weight)[0]) and embedding.weight.requires_grad
    assert torch.equal(layer(X), tfk.nn.Int8Linear.from_weight(embedding.weight, layer.bias)(X))
    layer.weight = nn.Parameter(torch.randn(16, 24))
    assert layer.out_features == 16 and layer.scale.shape == (16,)
    with pytest.raises(ValueError, match="weight must be finite"):
        layer.weight = torch.full((16, 24), float("nan"))


@pytest.mark.parametrize("assign", [False, True])
def test_weights_that_are_not_quantized_are_loaded(assign):
    torch.manual_seed(0)
    stock = nn.Sequential(nn.Linear(8, 8), nn.MultiheadAttention(8, 2, batch_first=True)).eval()
    loaded = copy.deepcopy(stock)
    tfk.quantize(loaded)
    for parameter in stock.parameters():
        nn.init.normal_(parameter)
    state = stock.state_dict()
    names = set(state)
    assert loaded.load_state_dict(state, assign=assign) == ([], []) and set(state) == names
    tfk.quantize(stock)
    for name, wanted in stock.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], wanted), name
    with pytest.raises(RuntimeError, match="size mismatch for 0.weight"):
        loaded.load_state_dict({**state, "0.weight": torch.randn(9, 8)})
