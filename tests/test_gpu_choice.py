"""What automatic choice takes on a GPU that has proven the kernels; none is here, so that nothing is computed."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tfm_kernels as tfk
from tfm_kernels import Mask, _backend
from tfm_kernels._backend import OPS

BF16, F32 = torch.bfloat16, torch.float32


@pytest.fixture
def gpu(monkeypatch):
    """Tensors on a GPU that is not there."""
    with FakeTensorMode():
        yield lambda proven=True: monkeypatch.setattr(_backend, "_proven", proven)


def new(*shape, dtype=BF16, train=False):
    return torch.empty(shape, dtype=dtype, device="cuda", requires_grad=train)


def norm(features, train=False):
    return "layer_norm", (new(64, features, train=train),), {}


def block(dropout_p=0.0, dtype=BF16):
    x, w1, w2 = (new(*shape, dtype=dtype) for shape in ((64, 128), (256, 128), (128, 256)))
    return "ffn", (x, w1, None, w2, None), {"dropout_p": dropout_p}


def loss(rows=1024, width=512, train=False, dtype=BF16):
    target = torch.empty(rows, dtype=torch.int64, device="cuda")
    return (
        "linear_cross_entropy",
        (new(rows, width, dtype=dtype, train=train), new(999, width, dtype=dtype), target),
        {},
    )


def heads(dtype=BF16, **more):
    q = new(2, 4, 100, 64, dtype=dtype)
    return "attention", (q, q, q), more


def packed():
    q, ends = new(100, 4, 64), torch.empty(3, dtype=torch.int64, device="cuda")
    longest = dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), 60)
    return "attention_varlen", (q, q, q), {"cu_seqlens_q": ends, "cu_seqlens_k": ends, **longest}


CALLS = {
    "short rows": (lambda: norm(1024, train=True), "triton"),
    "long rows": (lambda: norm(16384), "triton"),
    "long rows in training": (lambda: norm(16384, train=True), "aten"),
    "a block": (block, "aten"),
    "a block with dropout": (lambda: block(0.1), "triton"),
    "a block of float32 with dropout": (lambda: block(0.1, F32), "aten"),
    "a loss": (lambda: loss(train=True), "triton"),
    "a loss of few rows": (lambda: loss(16), "aten"),
    "a loss of wide rows": (lambda: loss(width=4096), "triton"),
    "a loss of wide rows in training": (lambda: loss(width=4096, train=True), "aten"),
    "a loss of float32": (lambda: loss(dtype=F32), "aten"),
    "attention": (heads, "aten"),
    "causal attention": (lambda: heads(mask=Mask.causal()), "aten"),
    "a window": (lambda: heads(mask=Mask.window(8, 8)), "triton"),
    "padding": (lambda: heads(mask=Mask.lengths(torch.empty(2, dtype=torch.int64, device="cuda"))), "triton"),
    "a bias": (lambda: heads(bias=new(1, 4, 100, 100)), "triton"),
    "dropout": (lambda: heads(dropout_p=0.1), "triton"),
    "the statistics": (lambda: heads(return_lse=True), "triton"),
    "padding of float32": (
        lambda: heads(F32, mask=Mask.lengths(torch.empty(2, dtype=torch.int64, device="cuda"))), "aten"
    ),
    "packed sequences": (packed, "triton"),
    "rotary": (lambda: ("rotary", (new(1, 2, 8, 64), new(8, 32), new(8, 32)), {}), "triton"),
}  # fmt: skip


def order(name):
    op, args, kwargs = CALLS[name][0]()
    call = OPS[op].describe(*args, **kwargs)
    return [backend for backend in OPS[op].prefer(call) if OPS[op].support[backend](call) in (None, MISSING)]


MISSING = "triton is not installed: pip install triton"  # which is not what these tests are about


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
    assert order("short rows")[0] == "aten" and order("a window")[0] == "triton" and order("dropout")[0] == "triton"
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    assert "triton" not in order("a window")


def test_compiled_code_takes_the_gpu_for_a_constant():
    assert _backend.proven_gpu._dynamo_marked_constant
    assert torch.compile(lambda x: x + _backend.proven_gpu(), fullgraph=True, backend="eager")(torch.ones(2)).sum() == 2


def test_what_is_proven_is_explained(gpu):
    gpu()
    q = new(1, 2, 4, 8)
    words = tfk.explain("attention", q, q, q, dropout_p=0.1)
    assert "can: proven on an H200" in words or MISSING in words
