"""A Linear that no block runs, in a patched model: its kernel for few rows, and all else as PyTorch has it."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tfm_kernels as tfk
from tfm_kernels import _library, ops
from tfm_kernels.nn._bypass import plain_linear
from tfm_kernels.patching import frozen, onednn

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 200), nn.Tanh(), nn.Linear(200, 3, bias=False)).to(dtype).eval()


def refuse(*args, **kwargs):
    raise AssertionError("F.linear was called")


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_few_rows_take_the_kernel(dtype, monkeypatch):
    patched, x = model(dtype), torch.randn(3, 2, 96).to(dtype)
    expected = ops.linear(x, patched[0].weight, patched[0].bias, backend="cpu")
    monkeypatch.setattr(F, "linear", refuse)
    with tfk.patch(patched) as report, tfk.use_backend("cpu"):
        assert [entry.name for entry in report.replaced] == ["0", "2"]
        assert torch.equal(patched[0](x), expected)


def test_a_gradient_is_pytorchs():
    stock, x = model(), torch.randn(3, 96, requires_grad=True)
    patched = copy.deepcopy(stock)
    tfk.patch(patched)
    for y in (stock(x), patched(x)):
        y.sum().backward()
    for expected, given in zip(stock.parameters(), patched.parameters(), strict=True):
        assert torch.equal(given.grad, expected.grad)


def test_the_model_is_proven():
    report = tfk.prove(model(), torch.randn(3, 96))
    assert report.passed, report.table()


@torch.no_grad()
@pytest.mark.parametrize("bad", [(3, 95), (), (3, 96, torch.int64), (3, 96, torch.float64)], ids=str)
def test_bad_input_is_refused_as_by_pytorch(bad):
    dtype = bad[-1] if bad and isinstance(bad[-1], torch.dtype) else torch.float32
    x = torch.zeros([size for size in bad if isinstance(size, int)], dtype=dtype)
    with pytest.raises(RuntimeError) as expected:
        model()(x)
    patched = model()
    tfk.patch(patched)
    with pytest.raises(RuntimeError) as given:
        patched(x)
    assert str(given.value) == str(expected.value)


ODD = {  # weight and bias that F.linear takes and a kernel cannot
    "sparse csr": lambda weight: (weight.to_sparse_csr(), None),
    "sparse coo": lambda weight: (weight.to_sparse(), None),
    "weight of one dimension": lambda weight: (weight[0], None),
    "bias of one": lambda weight: (weight, torch.ones(1)),
    "bias without dimensions": lambda weight: (weight, torch.tensor(2.0)),
    "bias of a row": lambda weight: (weight, torch.arange(200.0)[None]),
}


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("freeze", [False, True], ids=["", "freeze"])
@pytest.mark.parametrize("rows", [3, 300])
@pytest.mark.parametrize("odd", ODD)
def test_odd_weights_and_biases_stay_pytorchs(odd, rows, freeze, monkeypatch):
    monkeypatch.setattr(_library, "nearest", _library.XEON)
    monkeypatch.setattr(frozen, "_PRODUCTS", 0)
    stock, patched, x = model(), model(), torch.randn(rows, 96)
    tfk.patch(patched, freeze=freeze)
    for each in (stock, patched):
        weight, bias = ODD[odd](each[0].weight.detach())
        each[0].weight = nn.Parameter(weight, requires_grad=False)
        each[0].bias = None if bias is None else nn.Parameter(bias)
    assert torch.equal(patched[0](x), stock[0](x))


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_stay_pytorchs(layout):
    x = torch.nested.nested_tensor([torch.randn(2, 96), torch.randn(5, 96)], layout=layout)
    stock, patched = model(), model()
    tfk.patch(patched)
    for given, expected in zip(patched[0](x).unbind(), stock[0](x).unbind(), strict=True):
        assert torch.equal(given, expected)


@torch.no_grad()
def test_hooks_see_it_and_an_own_forward_stays():
    patched, seen = model(), []
    patched[0].register_forward_hook(lambda module, args, y: seen.append(tuple(y.shape)))
    patched[2].forward = lambda x: x
    with tfk.patch(patched) as report:
        patched(torch.randn(5, 96))
    assert seen == [(5, 200)]
    (kept,) = (entry for entry in report.kept if entry.name == "2")
    assert kept.note == "because it has a forward of its own"


def test_away_from_the_cpu_it_is_left():
    report = tfk.patch(model().to("meta"))
    assert not report.replaced
    assert "because away from the CPU a Linear by itself has nothing to fuse with" in str(report)


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_blocks_that_read_its_weights_go_on_reading_them(twin):
    """As a feed-forward module of ours does, whose layers patch() meets one by one."""
    block = tfk.nn.FeedForward(16, 32).eval()
    tfk.patch(block)
    block = twin(block)
    linears = [inner for inner in block.modules() if isinstance(inner, nn.Linear)]
    assert len(linears) == 2 and all(type(inner) is not nn.Linear and plain_linear(inner) for inner in linears)
    tfk.unpatch(block)
    assert all(type(inner) is nn.Linear and plain_linear(inner) for inner in linears)


@torch.no_grad()
@pytest.mark.skipif(not onednn.AVAILABLE, reason="this build of PyTorch has no oneDNN product")
def test_a_frozen_one_keeps_its_weight_packed(monkeypatch):
    monkeypatch.setattr(_library, "nearest", _library.XEON)
    monkeypatch.setattr(frozen, "_PRODUCTS", 0)
    patched, x = model(), torch.randn(40, 96)
    report = tfk.patch(patched, freeze=True)
    y = patched[0](x)
    assert report.frozen["0"] >= 4 * patched[0].weight.numel() and report.frozen["2"] == 0  # it was not called
    assert torch.equal(y, frozen.product(x, patched[0], patched[0].weight, patched[0].bias))
    with torch.enable_grad(), pytest.raises(RuntimeError, match="freeze=True"):
        patched(x)
