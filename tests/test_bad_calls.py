"""Thousands of generated bad calls: each is refused with one clear sentence, whatever backend was named.

A case is a valid call with one thing spoilt. What may be spoilt without becoming valid again is written down per
function: sizes that are tied to another argument, tensors that share a dtype or a device, values out of range.
"""

import functools
import itertools
import re

import pytest
import torch

import tfm_kernels as tfk

# PyTorch says that it will not have quantized tensors for ever, and that those of sparse rows are new
pytestmark = pytest.mark.filterwarnings("ignore:.*(deprecated|beta state)")

BACKENDS = [None, *tfk._backend.BACKENDS]  # a bad call is refused before the backend is asked
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
NOT_TENSORS = ["x", 1.5, [1.0], object()]
NOT_FLOATING = [torch.int64, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn]
NUMBERS = ["0.1", [], float("nan"), -0.5, True, 10**400]
PROBABILITIES = [*NUMBERS, None, 1.0001, float("inf"), 10**30]
EPS = [*NUMBERS, float("inf")]
SEEDS = [7, "7", *(torch.tensor(7, **kind) for kind in ({"dtype": torch.int32}, {"device": "meta"}))]
SEEDS += [torch.tensor(7.0), torch.tensor([7])]
FLAGS = [1, None, "yes"]
# tensor -> the arguments that a size of it is tied to, whose sentence it may be
PARTNERS = {"query": ("cu_seqlens_q", "key", "bias"), "key": ("cu_seqlens_k", "value", "query")}
PARTNERS |= {"x": ("w1", "weight", "target"), "w1": ("scale1",), "w2": ("scale2",), "gate": ("gate_scale",)}
BACKEND_NAMES = ["cuda:0", "", 3, "CPU", ("cpu",)]


def norm(dtype, residual, rms):
    arguments = {"x": torch.randn(3, 5, 8).to(dtype)}
    if residual:
        arguments["residual"] = torch.randn(3, 5, 8).to(dtype)
    arguments["weight"] = torch.randn(8).to(dtype)
    if not rms:
        arguments["bias"] = torch.randn(8).to(dtype)
    return arguments


def dense(dtype):
    shapes = {"query": (2, 4, 5, 8), "key": (2, 2, 6, 8), "value": (2, 2, 6, 3)}
    return {name: torch.randn(*shape).to(dtype) for name, shape in shapes.items()}


def dense_with_bias(dtype):
    return dense(dtype) | {"bias": torch.randn(2, 4, 5, 6).to(dtype)}


def varlen(dtype):
    shapes = {"query": (7, 4, 8), "key": (9, 2, 8), "value": (9, 2, 3)}
    packed = {name: torch.randn(*shape).to(dtype) for name, shape in shapes.items()}
    indices = {"cu_seqlens_q": torch.tensor([0, 3, 7]), "cu_seqlens_k": torch.tensor([0, 4, 9])}
    return packed | indices | {"max_seqlen_q": 4, "max_seqlen_k": 5}


def feed_forward(dtype):
    shapes = {"x": (3, 5, 8), "w1": (12, 8), "b1": (12,), "w2": (8, 12), "b2": (8,), "gate": (12, 8)}
    return {name: torch.randn(*shape).to(dtype) for name, shape in shapes.items()}


def linear(dtype):
    return {
        name: torch.randn(*shape).to(dtype)
        for name, shape in {"x": (3, 5, 8), "weight": (12, 8), "bias": (12,)}.items()
    }


def int8_linear(dtype):
    given = linear(dtype)
    weight = (40 * given["weight"].float()).clamp(-127, 127).to(torch.int8)
    return {"x": given["x"], "weight": weight, "scale": torch.full((12,), 0.1), "bias": given["bias"]}


def int8_feed_forward(dtype):
    given = feed_forward(dtype)
    whole = {name: (40 * given[name].float()).clamp(-127, 127).to(torch.int8) for name in ("w1", "w2", "gate")}
    steps = {"scale1": torch.full((12,), 0.1), "scale2": torch.full((8,), 0.1), "gate_scale": torch.full((12,), 0.1)}
    return given | whole | steps


def loss(dtype):
    numbers = torch.arange(15).view(3, 5) % 12
    given = linear(dtype)
    return {"x": given["x"], "weight": given["weight"], "target": numbers, "bias": given["bias"]}


def rotary(dtype):
    shapes = {"x": (3, 2, 5, 8), "cos": (3, 5, 6), "sin": (3, 5, 6)}
    return {name: torch.randn(*shape).to(dtype) for name, shape in shapes.items()}


# function -> (valid arguments, {tensor: axes whose size is tied}, tensors whose rank is free, required tensors,
#              tensors that may not be float64 beside others of another dtype, {option: bad values})
FUNCTIONS = {
    "layer_norm": (
        functools.partial(norm, residual=False, rms=False),
        {"x": [2], "weight": [0], "bias": [0]},
        {"x"},
        {"x"},
        {"weight", "bias"},
        {"eps": [*EPS, None], "eps_outside": [*EPS, None], "unbiased": FLAGS},
    ),
    "rms_norm": (
        functools.partial(norm, residual=False, rms=True),
        {"x": [2], "weight": [0]},
        {"x"},
        {"x"},
        {"weight"},
        {"eps": EPS, "eps_outside": [*EPS, None]},
    ),
    "add_layer_norm": (
        functools.partial(norm, residual=True, rms=False),
        {"x": [0, 1, 2], "residual": [0, 1, 2], "weight": [0], "bias": [0]},
        set(),
        {"x", "residual"},
        {"weight", "bias"},
        {
            "eps": [*EPS, None],
            "eps_outside": [*EPS, None],
            "unbiased": FLAGS,
            "dropout_p": PROBABILITIES,
            "seed": SEEDS,
            "dropout_rows": SEEDS,
        },
    ),
    "add_rms_norm": (
        functools.partial(norm, residual=True, rms=True),
        {"x": [0, 1, 2], "residual": [0, 1, 2], "weight": [0]},
        set(),
        {"x", "residual"},
        {"weight"},
        {"eps": EPS, "eps_outside": [*EPS, None], "dropout_p": PROBABILITIES, "seed": SEEDS, "dropout_rows": SEEDS},
    ),
    "attention": (
        dense_with_bias,
        {"query": [0, 1, 2, 3], "key": [0, 2, 3], "value": [0, 1, 2], "bias": [0, 1, 2, 3]},
        set(),
        {"query", "key", "value"},
        {"query", "key", "value", "bias"},
        {
            "scale": ["1", float("nan"), float("inf"), [], True, 10**400],
            "dropout_p": PROBABILITIES,
            "seed": SEEDS,
            "return_lse": FLAGS,
            "deterministic": FLAGS,
            "mask": ["causal", 1, torch.ones(2, 5, 6, dtype=torch.bool), torch.ones(5, 7, dtype=torch.bool)]
            + [torch.ones(5, dtype=torch.bool), torch.ones(5, 6, dtype=torch.int64), torch.ones(3, 1, 1, 6) > 0]
            + [tfk.Mask.lengths(torch.tensor(v)) for v in ([1], [1, 2, 3], [-1, 2], [2, 7], [2, 2**62])]
            + [tfk.Mask.keep(torch.ones(*s, dtype=torch.bool)) for s in ((4, 6), (5, 5), (3, 1, 5, 6), (2, 3, 5, 6))],
        },
    ),
    "attention_varlen": (
        varlen,
        {"query": [0, 1, 2], "key": [0, 2], "value": [0, 1]},
        set(),
        {"query", "key", "value", "cu_seqlens_q", "cu_seqlens_k"},
        {"query", "key", "value"},
        {
            "scale": ["1", float("nan"), float("inf"), [], True, 10**400],
            "dropout_p": PROBABILITIES,
            "seed": SEEDS,
            "return_lse": FLAGS,
            "deterministic": FLAGS,
            "max_seqlen_q": ["4", None, -1, 3, 2.5, True, 2**31, 10**30],
            "max_seqlen_k": ["5", None, -1, 4, 2.5, True, 2**31, 10**30],
            "cu_seqlens_q": [
                torch.tensor(v) for v in ([0, 3], [1, 3, 7], [0, 5, 3], [0, 3, 8], [0, -1, 7], [[0, 3, 7]])
            ]
            + [torch.tensor([0.0, 3.0, 7.0]), torch.tensor([0, 2, 3, 7]), torch.tensor([], dtype=torch.int64)],
            "cu_seqlens_k": [
                torch.tensor(v)
                for v in ([0, 4, 9, 9], [1, 4, 9], [0, 9, 4], [0, 4, 10], [0, -4, 9], [[0, 4, 9]], [0, 2**62, 9])
            ],
            "mask": ["causal", torch.ones(7, 9, dtype=torch.bool), tfk.Mask.lengths(torch.tensor([1, 2]))]
            + [tfk.Mask.keep(torch.ones(7, 9, dtype=torch.bool))],
        },
    ),
    "ffn": (
        feed_forward,
        {"x": [2], "w1": [0, 1], "b1": [0], "w2": [1], "b2": [0], "gate": [0, 1]},
        {"x"},
        {"x", "w1", "w2"},
        {"x", "w1", "b1", "w2", "b2", "gate"},
        {
            "activation": ["tanh", "RELU", None, 3, torch.relu],
            "dropout_p": PROBABILITIES,
            "seed": SEEDS,
            "dropout_rows": SEEDS,
            "recompute": FLAGS,
        },
    ),
    "linear": (
        linear,
        {"x": [2], "weight": [0, 1], "bias": [0]},
        {"x"},
        {"x", "weight"},
        {"x", "weight", "bias"},
        {},
    ),
    "int8_ffn": (
        int8_feed_forward,
        {"x": [2], "w1": [0, 1], "scale1": [0], "b1": [0], "w2": [1], "scale2": [0], "b2": [0], "gate": [0, 1]},
        {"x"},
        {"x", "w1", "scale1", "w2", "scale2"},
        set(),
        {
            "activation": ["tanh", "RELU", None, 3, torch.relu],
            "dynamic": FLAGS,
            **{name: [torch.zeros(12, 8), torch.zeros(12, 8, dtype=torch.uint8)] for name in ("w1", "gate")},
            "w2": [torch.zeros(8, 12), torch.zeros(8, 12, dtype=torch.int32)],
            "scale1": [torch.ones(12, dtype=kind) for kind in (torch.float16, torch.float64)],
        },
    ),
    "int8_linear": (
        int8_linear,
        {"x": [2], "weight": [0, 1], "scale": [0], "bias": [0]},
        {"x"},
        {"x", "weight", "scale"},
        set(),
        {
            "weight": [torch.zeros(12, 8), torch.zeros(12, 8, dtype=torch.uint8)],
            "scale": [torch.ones(12, dtype=kind) for kind in (torch.float16, torch.float64)],
            "bias": [torch.zeros(12, dtype=torch.int8)],
            "dynamic": FLAGS,
        },
    ),
    "linear_cross_entropy": (
        loss,
        {"x": [0, 1, 2], "weight": [0, 1], "target": [0, 1], "bias": [0]},
        set(),
        {"x", "weight", "target"},
        {"x", "weight", "bias"},
        {
            "target": [torch.zeros(3, 5).to(kind) for kind in (torch.int32, torch.uint8, torch.bool, torch.float32)],
            "ignore_index": ["7", None, 1.5, True, [], 10**400, 2**63, -(2**63) - 1],
            "label_smoothing": PROBABILITIES,
            "reduction": ["MEAN", "average", None, 1, True, ["sum"]],
        },
    ),
    "rotary": (
        rotary,
        {"x": [0, 2], "cos": [0, 1], "sin": [0, 1, 2]},
        set(),
        {"x", "cos", "sin"},
        {"cos", "sin"},
        {"interleaved": FLAGS},
    ),
}


def dtype_name(tensor):
    return str(tensor.dtype).removeprefix("torch.")


def told(value):
    """What a sentence may say of a value: its text, its type; of a tensor its dtype, shape (a mask's 4-D), numbers."""
    if isinstance(value, torch.Tensor):
        words = {str(tuple(value.shape)), str((1, 1, *value.shape)), dtype_name(value), str(value.device), "Tensor"}
        words |= {str(value.shape[0])} if value.dim() == 1 else set()
        return words | ({str(value.tolist())} if value.device.type == "cpu" else set())
    if isinstance(value, tfk.Mask):
        given = [t for t in (value.key_lengths, value.keep_matrix) if t is not None]
        ends = {f"{int(t.min())} to {int(t.max())}" for t in given if t.numel()}
        return ends | {value.explain()} | {word for t in given for word in told(t)}
    if isinstance(value, int) and value.bit_length() > 1023:
        return {f"{value.bit_length()} bits"}
    return {str(value), repr(value), type(value).__name__}


def no_grids(tensor):
    """Tensors of the same shape that are no grid of numbers."""
    yield tensor.to_sparse()
    if tensor.dim() == 2:
        yield tensor.to_sparse_csr()
    if tensor.dtype == torch.float32:
        yield tensor.to_mkldnn()


def spoilt(name, dtype):
    """(what was done, arguments, what the sentence has to say) for every way to spoil one thing of a valid call.

    What it has to say is a list of words: it must hold each, and of a set in it one.
    """
    build, tied, rank_free, required, one_dtype, options = FUNCTIONS[name]
    valid = build(dtype)
    tensors = {key: value for key, value in valid.items() if isinstance(value, torch.Tensor)}
    floating = {key: tensor for key, tensor in tensors.items() if tensor.is_floating_point()}
    for key, tensor in tensors.items():
        for index, bad in enumerate(NOT_TENSORS):
            yield f"{key} not a tensor ({index})", valid | {key: bad}, [key, type(bad).__name__]
        if key in required:
            yield f"{key} None", valid | {key: None}, [key, "NoneType"]
        if key in floating:
            quantized = torch.quantize_per_tensor(tensor.float(), 0.1, 0, torch.qint8)
            for bad in (*(tensor.to(bad) for bad in NOT_FLOATING), quantized):
                yield f"{key} {bad.dtype}", valid | {key: bad}, [key, "got", dtype_name(bad)]
            for bad in no_grids(tensor):
                yield f"{key} {bad.layout}", valid | {key: bad}, [key, "got", str(bad.layout)]
        yield f"{key} on meta", valid | {key: tensor.to("meta")}, [key, "cpu", "meta"]
        if key not in rank_free:
            for bad in (tensor.unsqueeze(0), tensor.select(0, 0)):
                yield f"{key} of {bad.dim()} axes", valid | {key: bad}, [key, str(tuple(bad.shape))]
        for axis in tied.get(key, ()):
            longer = torch.cat([tensor, tensor.narrow(axis, 0, 1)], axis)
            for bad in (longer, *shorter(tensor, axis, key, name)):
                shapes = {str(tuple(t.shape)) for t in (tensors | {key: bad}).values()} | {str(bad.shape[axis])}
                tokens = {str(t.tolist()) for k, t in tensors.items() if k not in floating}
                named = {key, *PARTNERS.get(key, ())}
                yield f"{key} {tuple(bad.shape)}", valid | {key: bad}, [named, "got", shapes | tokens]
        other = tensor.to(torch.float16 if dtype == torch.float64 else torch.float64)
        if key in one_dtype:
            mixed = valid | {key: other}
            alone = name.endswith("norm") or (name == "attention" and key == "bias")  # they may differ from the others
            each = [f"{k} {dtype_name(mixed[k])}" for k in floating if name != "attention" or k != "bias"]
            yield f"{key} {other.dtype}", mixed, [key, "got", dtype_name(other)] if alone else each
    for option, values in options.items():
        for index, bad in enumerate(values):
            random = {"dropout_p": 0.5} if option in ("seed", "dropout_rows") else {}
            yield f"{option} ({index})", valid | random | {option: bad}, [option, told(bad)]


def shorter(tensor, axis, key, name):
    """The tensor with this axis one shorter, and without any: sizes of 1 broadcast in a bias, no heads are a call."""
    for size in {tensor.shape[axis] - 1, 0}:
        if not (key == "bias" and size == 1 and name == "attention") and not (key == "query" and axis == 1 == 1 - size):
            yield tensor.narrow(axis, 0, size)


CASES = [
    (name, dtype, backend)
    for name, dtype, backend in itertools.product(FUNCTIONS, DTYPES, BACKENDS)
    if name in dir(tfk.ops)
]


def check_refusal(name, what, arguments, backend, wanted):
    try:
        getattr(tfk.ops, name)(**arguments, backend=backend)
    except (TypeError, ValueError) as error:
        sentence = str(error)
        assert sentence.startswith(f"{name}: "), f"{what}: {sentence}"
        assert "\n" not in sentence and len(sentence) < 300 and not sentence.endswith("."), f"{what}: {sentence}"
        for words in wanted:
            any_of = words if isinstance(words, set) else {words}
            found = any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", sentence) for word in any_of)
            assert found, f"{what}: none of {any_of} is said: {sentence}"
    else:
        raise AssertionError(f"{name} accepted: {what}")


@pytest.mark.parametrize("name, dtype, backend", CASES, ids=lambda v: str(v).removeprefix("torch."))
def test_spoilt_calls_are_refused(name, dtype, backend):
    valid = FUNCTIONS[name][0](dtype)
    if backend not in ("triton", "cuda"):
        getattr(tfk.ops, name)(**valid, backend=backend)  # the call that gets spoilt is a good one
    for what, arguments, wanted in spoilt(name, dtype):
        check_refusal(name, what, arguments, backend, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_more_positions_than_can_be_counted_are_refused(backend):
    shapes = {"query": (1, 1, 5, 8), "key": (1, 1, 2**31, 8), "value": (1, 1, 2**31, 8)}
    endless = {name: torch.zeros(1).expand(shape) for name, shape in shapes.items()}  # one number each
    check_refusal("attention", "2**31 keys", endless, backend, ["Tk", "got", str(2**31)])
    endless |= {"query": endless["key"], "key": endless["query"], "value": endless["query"]}
    check_refusal("attention", "2**31 queries", endless, backend, ["Tq", "got", str(2**31)])


def test_unknown_backends_are_refused():
    for name, (build, *_) in FUNCTIONS.items():
        for bad in BACKEND_NAMES:
            check_refusal(name, f"backend={bad!r}", build(torch.float32), bad, ["backend", repr(bad)])


def test_there_are_thousands():
    count = sum(1 for name, dtype, _ in CASES for _ in spoilt(name, dtype))
    assert count >= 2000, count
