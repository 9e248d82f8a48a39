"""What automatic choice takes on a GPU that has proven the kernels; none is here, so that nothing is computed."""

import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

import tfm_kernels as tfk
from tfm_kernels import Mask, _backend, _library
from tfm_kernels._backend import OPS

BF16, F32 = torch.bfloat16, torch.float32


@pytest.fixture
def gpu(monkeypatch):
    """Tensors on a GPU that is not there."""
    with FakeTensorMode():
        yield lambda proven=True: monkeypatch.setattr(_backend, "_proven", proven)


def new(*shape, dtype=BF16, train=False):
    return torch.empty(shape, dtype=dtype, device="cuda", requires_grad=train)


def norm(rows, features, train=False, name="layer_norm"):
    return name, (new(rows, features, train=train),), {}


def dropped(rows, features, train=False):
    x = new(rows, features, train=train)
    return "add_layer_norm", (x, x), {"dropout_p": 0.1}


def block(dropout_p=0.0, dtype=BF16, rows=8192):
    x, w1, w2 = (new(*shape, dtype=dtype) for shape in ((rows, 1024), (4096, 1024), (1024, 4096)))
    return "ffn", (x, w1, None, w2, None), {"dropout_p": dropout_p}


def biased_gate(features):
    """With dropout."""
    op, (x, w1, _, w2, b2), options = block(0.1)
    return op, (x, w1, new(4096 + features), w2, b2), options | {"gate": w1}


def loss(rows=8192, width=512, train=False, dtype=BF16, classes=30000):
    x, weight = new(rows, width, dtype=dtype, train=train), new(classes, width, dtype=dtype)
    return "linear_cross_entropy", (x, weight, torch.empty(rows, dtype=torch.int64, device="cuda")), {}


def heads(dtype=BF16, batch=64, **more):
    q = new(batch, 4, 1024, 64, dtype=dtype)
    return "attention", (q, q, q), more


def lengths(batch=64):
    return Mask.lengths(torch.empty(batch, dtype=torch.int64, device="cuda"))


def packed():
    q, ends = new(10**5, 4, 64), torch.empty(65, dtype=torch.int64, device="cuda")
    longest = dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), 2048)
    return "attention_varlen", (q, q, q), {"cu_seqlens_q": ends, "cu_seqlens_k": ends, **longest}


def turned(length):
    return "rotary", (new(1, 32, length, 128), new(length, 64), new(length, 64)), {}


def rounded(rows, out, dynamic=False, dtype=BF16):
    weight = torch.empty(out, 4096, dtype=torch.int8, device="cuda")
    return "int8_linear", (new(rows, 4096, dtype=dtype), weight, new(out, dtype=F32)), {"dynamic": dynamic}


CALLS = {
    "many rows": (lambda: norm(16384, 4096, train=True), "triton"),
    "few rows": (lambda: norm(8192, 1024, train=True), "cuda"),
    "few rows of RMSNorm": (lambda: norm(8192, 1024, name="rms_norm"), "aten"),
    "few long rows": (lambda: norm(64, 4096), "aten"),
    "few rows with dropout": (lambda: dropped(64, 4096), "cuda"),
    "long rows": (lambda: norm(1024, 65536), "triton"),
    "long rows in training": (lambda: norm(1024, 65536, train=True), "aten"),
    "long rows with dropout": (lambda: dropped(1024, 65536), "triton"),
    "long rows with dropout in training": (lambda: dropped(1024, 65536, train=True), "cuda"),
    "a block": (block, "aten"),
    "a block with dropout": (lambda: block(0.1), "triton"),
    "a small block with dropout": (lambda: block(0.1, rows=64), "cuda"),
    "a block whose gate has a bias": (lambda: biased_gate(4096), "aten"),
    "a block whose gate has none": (lambda: biased_gate(0), "triton"),
    "a block of float32 with dropout": (lambda: block(0.1, F32), "aten"),
    "a loss": (lambda: loss(train=True), "triton"),
    "a loss of few rows": (lambda: loss(16), "aten"),
    "a loss of few classes": (lambda: loss(classes=100), "aten"),
    "a loss of wide rows": (lambda: loss(width=4096), "triton"),
    "a loss of wide rows in training": (lambda: loss(width=4096, train=True), "aten"),
    "a loss of float32": (lambda: loss(dtype=F32), "aten"),
    "attention": (heads, "aten"),
    "causal attention": (lambda: heads(mask=Mask.causal()), "aten"),
    "a window": (lambda: heads(mask=Mask.window(8, 8)), "triton"),
    "a small window": (lambda: heads(batch=1, mask=Mask.window(8, 8)), "cuda"),
    "padding": (lambda: heads(mask=lengths()), "triton"),
    "a bias": (lambda: heads(bias=new(1, 4, 1024, 1024)), "triton"),
    "dropout": (lambda: heads(dropout_p=0.1), "triton"),
    "the statistics": (lambda: heads(return_lse=True), "triton"),
    "padding of float32": (lambda: heads(F32, mask=lengths()), "aten"),
    "packed sequences": (packed, "triton"),
    "rotary": (lambda: turned(8192), "triton"),
    "rotary of a token": (lambda: turned(1), "aten"),
    "8 bits": (lambda: rounded(16, 11008), "triton"),
    "few 8 bits": (lambda: rounded(1, 1024), "aten"),
    "many rows of 8 bits": (lambda: rounded(2048, 4096, dynamic=True), "triton"),
    "8 bits beside float32": (lambda: rounded(16, 11008, dtype=F32), "aten"),
}


def order(name):
    op, args, kwargs = CALLS[name][0]()
    call = OPS[op].describe(*args, **kwargs)
    absent = {None, *_library.kernels().values()}  # a kernel that is not built here is not what these tests are about
    return [backend for backend in OPS[op].prefer(call) if OPS[op].support[backend](call) in absent]


@pytest.mark.parametrize("name", CALLS)
def test_first_choice(name, gpu):
    gpu()
    assert order(name)[0] == CALLS[name][1]


@pytest.mark.parametrize("name", CALLS)
def test_a_gpu_that_has_not_proven_them(name, gpu):
    gpu(proven=False)
    assert set(order(name)) <= {"aten", "reference"}


def test_float32_that_aten_cannot(gpu):
    """csrc/cuda multiplies it in half the time that Triton takes."""
    gpu()
    call = OPS["attention"].describe(*heads(F32, dropout_p=0.1)[1], dropout_p=0.1)
    assert OPS["attention"].prefer(call) == ("aten", "cuda", "triton", "reference")


def test_compiled_graphs_fuse_pytorchs_own_functions(monkeypatch, gpu):
    gpu()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert order("many rows")[0] == "aten" and order("a window")[0] == "triton" and order("dropout")[0] == "triton"
    monkeypatch.setattr(_library, "exporting", lambda: True)
    assert "triton" not in order("a window")


def test_a_dynamic_size_leaves_no_guard(monkeypatch):
    """A graph, or an exported program, is not bound to the sizes that decide where nothing is compiled."""
    monkeypatch.setattr(_backend, "_proven", True)
    sizes = ShapeEnv()
    rows = sizes.create_symbol(8, source=ConstantSource("rows"), dynamic_dim=DimDynamic.DYNAMIC)
    with FakeTensorMode(shape_env=sizes):
        x = new(sizes.create_symintnode(rows, hint=8), 512)
        w1, w2, weight = new(64, 512), new(512, 64), torch.empty(64, 512, dtype=torch.int8, device="cuda")
        angles = new(x.shape[0], 32)
        for op, args, kwargs in (
            ("layer_norm", (x,), {}),
            ("ffn", (x, w1, None, w2, None), {"dropout_p": 0.1}),
            ("rotary", (new(1, 2, x.shape[0], 64), angles, angles), {}),
            ("int8_linear", (x, weight, new(64, dtype=F32)), {}),
        ):
            call, before = OPS[op].describe(*args, **kwargs), len(sizes.guards)
            with monkeypatch.context() as patch:
                patch.setattr(torch.compiler, "is_compiling", lambda: True)
                assert OPS[op].prefer(call)[0] == "aten"
            assert len(sizes.guards) == before, op


def test_compiled_code_takes_the_gpu_for_a_constant():
    assert _backend.proven_gpu._dynamo_marked_constant
    assert torch.compile(lambda x: x + _backend.proven_gpu(), fullgraph=True, backend="eager")(torch.ones(2)).sum() == 2


@pytest.mark.parametrize("kinds, proven", [((), False), ((9,), True), ((9, 9), True), ((9, 8), False), ((10,), False)])
def test_every_gpu_has_to_be_of_the_kind_that_proved(kinds, proven, monkeypatch):
    """Of several kinds in one machine a call's need not be the one that is current first."""
    monkeypatch.setattr(_backend, "_proven", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(kinds))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(kinds))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: (kinds[gpu], 0))
    assert _backend.proven_gpu() is proven


def test_what_is_proven_is_explained(gpu):
    gpu()
    q = new(1, 2, 4, 8)
    words = tfk.explain("attention", q, q, q, dropout_p=0.1)
    assert "can: proven on an H200" in words or "cannot: triton is not installed" in words


def test_a_gate_with_a_bias_is_told(gpu):
    gpu()
    said = [tfk.explain(op, *args, **kwargs) for op, args, kwargs in (biased_gate(4096), biased_gate(0))]
    told = "not proven on a GPU where the gate has a bias; name it explicitly"
    assert told in said[0] or "cannot: triton is not installed" in said[0]
    assert told not in said[1]


def test_what_no_gpu_has_proven_is_not_chosen(gpu, monkeypatch):
    """Not where PyTorch's own functions cannot do it either."""
    gpu()
    monkeypatch.setattr(_library, "missing", lambda *which: None)
    (x,), options = norm(16, 16384, train=True)[1], {"eps": 0.0, "eps_outside": 1e-6}
    assert _backend.chosen("layer_norm", x, **options) == "reference"
    assert _backend.chosen("layer_norm", x.detach(), **options) == "triton"
