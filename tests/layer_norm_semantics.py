"""What the norms' GPU kernels have to do wherever they run: imported by the tests of each backend, which say which.

A module that imports these tests has a fixture ``backend``; those that refuse calls also ``refusal``.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tfm_kernels as tfk
from tests.cases import CASES
from tfm_kernels import dropout
from tfm_kernels.ops.layer_norm import BWD, FWD, layer_norm_of_sum
from tfm_kernels.testing import invariance
from tfm_kernels.testing.derivative import assert_opcheck

OPS = ("layer_norm", "add_layer_norm", "rms_norm", "add_rms_norm")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SEED = torch.tensor(2**40 + 20261121)
NORMS = [case for case in CASES if case.op in OPS and case.levels["dtype"] != "f64"]
PROBABILITIES = (2.0**-33, 0.1, 0.5, 0.9999, 1.0)


def randn(*shape, dtype=torch.float32, seed=0):
    """Normal numbers of a seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def calls(width, dtype, rows):
    """A call of each op, as (op, inputs)."""
    x, w = randn(rows, width, dtype=dtype), randn(width, dtype=dtype, seed=1)
    residual = randn(rows, width, seed=2)
    yield "rms_norm", {"x": x, "weight": w}
    yield "layer_norm", {"x": x, "bias": w, "unbiased": True, "eps": 0.0, "eps_outside": 1e-3}
    yield "add_rms_norm", {"x": x, "residual": residual.to(dtype), "weight": w.float()}
    yield "add_layer_norm", {"x": x, "residual": residual, "weight": w.float(), "dropout_p": 0.3, "seed": SEED}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_of_any_strides(backend, dtype):
    assert_weights_of_any_strides(backend, dtype)


def assert_weights_of_any_strides(backend, dtype):
    x, (w, b) = randn(5, 66, dtype=dtype), randn(66, 2, dtype=dtype, seed=1).unbind(1)
    for op, given in (("layer_norm", (w, b)), ("rms_norm", (w,))):
        leaves = [t.clone().requires_grad_() for t in (x, *(t.contiguous() for t in given))]
        turned = [x.clone().requires_grad_(), *(t.detach().requires_grad_() for t in given)]
        assert not any(t.is_contiguous() for t in turned[1:])
        results = []
        for tensors in (leaves, turned):
            y = getattr(tfk.ops, op)(*tensors, backend=backend)
            results.append((y, *torch.autograd.grad(y.square().sum(), tensors)))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), op


@pytest.mark.parametrize("width", [7, 64, 130])
@pytest.mark.parametrize("p", PROBABILITIES)
def test_dropout_masks_are_those_of_the_other_backends(backend, width, p):
    """Forward and backward drop what every backend drops, far row numbers too."""
    x, zeros = torch.ones(70, width), torch.zeros(70, width)
    rows = torch.cat([torch.arange(69), torch.tensor([2**33 + 7])])
    keep = dropout.keep_mask(SEED, p, rows, width)

    def masks(backend):
        leaves = x.clone().requires_grad_(), zeros.clone().requires_grad_()
        options = {"dropout_p": p, "seed": SEED, "dropout_rows": rows, "backend": backend}
        _, z = tfk.ops.add_layer_norm(*leaves, **options)
        dx, dresidual = torch.autograd.grad(z.sum(), leaves)
        assert torch.equal(dresidual, x)
        return z != 0, dx != 0

    for name in (backend, "cpu", "reference"):
        assert all(torch.equal(mask, keep) for mask in masks(name)), name


def assert_constant_row_gives_the_bias(backend, dtype, width):
    """Also where the mean of so many equal numbers is not that number, to the last bit; and dx is as it should be."""
    numbers = torch.tensor([3.0, 0.1, -1000.1, 12345.678, 3.3e7 if dtype != torch.float16 else 65504.0], dtype=dtype)
    x = numbers.unsqueeze(1).expand(-1, width).clone().requires_grad_()
    weight, bias, dy = (randn(*shape, dtype=dtype, seed=i) for i, shape in enumerate(((width,), (width,), x.shape)))
    y = tfk.ops.layer_norm(x, weight, bias, backend=backend)
    assert torch.equal(y, bias.expand_as(y))
    (dx,) = torch.autograd.grad(y, x, dy)
    g = dy.double() * weight.double()
    expected = (g - g.mean(1, keepdim=True)) / 1e-5**0.5
    torch.testing.assert_close(
        dx.double(), expected, rtol=8 * torch.finfo(dtype).eps, atol=2e3 * torch.finfo(dtype).eps
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [16, 100, 768, 1031, 9000])
def test_constant_row_gives_the_bias(backend, dtype, width):
    assert_constant_row_gives_the_bias(backend, dtype, width)


@pytest.mark.parametrize("width", [100, 6000])
def test_a_row_too_far_from_zero_for_its_factor(backend, width):
    """Equal numbers of 2^110: mean times 1 / sqrt(eps) is inf in float32, the gradient is not."""
    found = []
    for name in (backend, "reference"):
        x = torch.full((3, width), 2.0**110, dtype=torch.float64 if name == "reference" else None).requires_grad_()
        y = tfk.ops.layer_norm(x, eps=1e-12, backend=name)
        found.append(torch.autograd.grad(y, x, randn(3, width, seed=1).to(y.dtype))[0])
    torch.testing.assert_close(found[0].double(), found[1], rtol=1e-5, atol=5.0)  # of some 1e6


def assert_eps_outside_of_the_root(backend, width):
    """Norms that divide by (std + eps), as The Annotated Transformer's: rows of any size, one of them of zeros."""
    x = randn(6, width) * torch.tensor([1.0, 1e3, 1e-3, 1e-6, 1e-25, 0.0])[:, None]
    w, dy = randn(width, seed=1), randn(6, width, seed=2)
    for rms in (False, True):
        leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
        options = {"eps": 0.0, "eps_outside": 1e-4, "backend": backend}
        y = tfk.ops.rms_norm(*leaves, **options) if rms else tfk.ops.layer_norm(*leaves, unbiased=True, **options)
        found = y, *torch.autograd.grad(y, leaves, dy)
        leaves = x.double().requires_grad_(), w.double().requires_grad_()
        centred = leaves[0] - (0 if rms else leaves[0].mean(1, keepdim=True))
        # std's gradient is 0 where it is 0; sqrt has none
        spread = leaves[0].norm(dim=1, keepdim=True) / width**0.5 if rms else leaves[0].std(1, keepdim=True)
        y = centred / (spread + 1e-4) * leaves[1]
        expected = y, *torch.autograd.grad(y, leaves, dy.double())
        for name, got, exact in zip(("y", "dx", "dweight"), found, expected, strict=True):
            size = exact.abs().amax(-1, keepdim=True)  # of each row
            wrong = ((got.double() - exact).abs() / size.clamp(min=1e-30)).max()
            assert wrong < 1e-5, (name, rms, wrong)


@pytest.mark.parametrize("width", [7, 48, 768, 1031, 9000])
def test_eps_outside_of_the_root(backend, width):
    assert_eps_outside_of_the_root(backend, width)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_views_give_the_bits_of_contiguous_tensors(backend, op, dtype):
    """Views give the bits of contiguous tensors."""
    inputs = {"x": randn(9, 40, dtype=dtype), "weight": randn(40, dtype=dtype, seed=1)}
    if op.startswith("add"):
        inputs["residual"] = randn(9, 40, dtype=dtype, seed=2)
    invariance.assert_view_equals_contiguous(op, inputs, backend)


def assert_sum_need_not_be_kept(backend, width, dtype, rows=5):
    """Without z the other outputs are the same, bit for bit; the operator's results and layer_norm_of_sum's."""
    given = {"x": randn(rows, width, dtype=dtype), "residual": randn(rows, width, dtype=dtype, seed=2)}
    w, b = randn(width, dtype=dtype, seed=1), randn(width, dtype=dtype, seed=3)
    for rms, p in ((False, 0.0), (False, 0.3), (True, 0.0)):
        options = {
            "eps": 1e-5,
            "eps_outside": 1e-3,
            "rms": rms,
            "unbiased": False,
            "dropout_p": p,
            "seed": SEED,
            "dropout_rows": None,
        }
        kept, left = (
            FWD[backend](**given, weight=w, bias=None if rms else b, **options, keep_sum=keep) for keep in (True, False)
        )
        assert left[1].shape == (0,) and left[1].dtype == kept[1].dtype and kept[1].shape == (rows, width)
        assert torch.equal(left[0], kept[0]) and torch.equal(left[2], kept[2]) and torch.equal(left[3], kept[3])
    options = {"dropout_p": 0.3, "seed": SEED, "backend": backend}
    y, _ = tfk.ops.add_layer_norm(**given, weight=w, bias=b, **options)
    assert torch.equal(layer_norm_of_sum(**given, weight=w, bias=b, **options), y)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [7, 64, 130])
def test_the_sum_need_not_be_kept(backend, width, dtype):
    """Where y alone is wanted."""
    assert_sum_need_not_be_kept(backend, width, dtype)


def test_the_sum_is_kept_for_a_backward(backend):
    """Gradients of layer_norm_of_sum are those of add_layer_norm's y."""
    leaves = [randn(4, 16).requires_grad_(), randn(4, 16, seed=1).requires_grad_(), randn(16, seed=2).requires_grad_()]
    y, _ = tfk.ops.add_layer_norm(*leaves, backend=backend)
    expected = torch.autograd.grad(y.square().sum(), leaves)
    found = torch.autograd.grad(layer_norm_of_sum(*leaves, backend=backend).square().sum(), leaves)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("op", OPS)
def test_opcheck(backend, op):
    """torch.library.opcheck of both operators."""
    inputs = {"x": randn(9, 36), "weight": randn(36, seed=1)}
    if op.startswith("add"):
        inputs |= {"residual": randn(9, 36, seed=2), "dropout_p": 0.25, "seed": SEED}
    checked = assert_opcheck(op, inputs, backend)
    assert checked == [f"tfm_kernels::layer_norm_fwd_{backend}", f"tfm_kernels::layer_norm_bwd_{backend}"]


def _step(backend):
    def step(x, residual, weight):
        seed = torch.full((), 3, device=x.device)
        y, z = tfk.ops.add_layer_norm(x, residual, weight, dropout_p=0.1, seed=seed, backend=backend)
        return tfk.ops.rms_norm(y, backend=backend) + z

    return step


def test_compiled(backend):
    """fullgraph=True, forward and backward; an inductor graph calls the operators as they are."""
    step = _step(backend)
    leaves = randn(4, 16).requires_grad_(), randn(4, 16, seed=1), randn(16, seed=2).requires_grad_()
    eager = step(*leaves)
    graph = torch.compile(step, fullgraph=True, backend="aot_eager")(*leaves)
    torch.testing.assert_close(graph, eager)
    torch.testing.assert_close(
        torch.autograd.grad(graph.sum(), leaves[::2]), torch.autograd.grad(eager.sum(), leaves[::2])
    )


def test_traced_for_a_gpu_that_is_not_there(backend):
    """Without gradients: torch's autograd ends the process where a CPU build meets a CUDA device."""
    with FakeTensorMode():
        shapes = (4, 16), (4, 16), (16,)
        x, residual, weight = (torch.empty(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
        out = torch.compile(_step(backend), fullgraph=True, backend="eager")(x, residual, weight)
        assert out.device.type == "cuda" and out.shape == x.shape and out.dtype == torch.bfloat16
        row = torch.empty(4, device="cuda")
        options = (0.0, False, False, 0.0, None, None, True, False)
        dx, _, dweight, dbias = BWD[backend](x, None, x, row, row, weight, None, *options)
        assert dx.device.type == dweight.device.type == "cuda" and (dx.shape, dweight.shape) == (x.shape, weight.shape)
        assert dweight.dtype == weight.dtype and dbias.shape == (0,)


def test_backward_of_another_backend(backend):
    """What the forward saves means the same to every backend."""
    x, dy, weight = randn(40, 100), randn(40, 100, seed=1), randn(100, seed=2)
    saved = {
        name: FWD[name](x, None, weight, None, 1e-5, 0.0, False, False, 0.0, None, None) for name in ("cpu", backend)
    }
    options = (weight, weight, 0.0, False, False, 0.0, None, None, True, True)
    expected = BWD["cpu"](dy, None, x, *saved["cpu"][2:], *options)
    for forward, backward in (("cpu", backend), (backend, "cpu"), (backend, backend)):
        found = BWD[backward](dy, None, x, *saved[forward][2:], *options)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [0, 1, 300])
@pytest.mark.parametrize("bias_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_sums_are_rounded_once_to_the_parameters_type(backend, weight_dtype, bias_dtype, rows):
    """dweight and dbias come as the parameters are, and are the float32 ones rounded."""
    x, dy, row = randn(rows, 100).bfloat16(), randn(rows, 100, seed=1).bfloat16(), torch.ones(rows)
    weight = randn(100, seed=2).bfloat16()

    def sums(*parameters):
        return BWD[backend](dy, None, x, row, row, *parameters, 0.0, False, False, 0.0, None, None, True, True)[2:]

    exact = sums(weight.float(), weight.float())
    found = sums(weight.to(weight_dtype), weight.to(bias_dtype))
    for all32, some, dtype in zip(exact, found, (weight_dtype, bias_dtype), strict=True):
        assert all32.dtype == torch.float32 and some.dtype == dtype and torch.equal(some, all32.to(dtype))


X = torch.randn(4, 8)
ROW = torch.ones(4)


def forward(x=X, residual=None, weight=None, p=0.0, seed=None, rows=None):
    """Backend -> a call of the forward operator itself."""
    return lambda backend: FWD[backend](x, residual, weight, None, 1e-5, 0.0, False, False, p, seed, rows)


def _backward(dy=X, mean=ROW, rstd=ROW):
    return lambda backend: BWD[backend](
        dy, None, X, mean, rstd, None, None, 0.0, False, False, 0.0, None, None, True, True
    )


# what csrc/cuda says of a call of the operators themselves that would read outside -> that call on a backend
REFUSED = {
    "residual has the wrong shape": forward(residual=X[:2]),
    "weight has the wrong": forward(weight=torch.ones(3)),
    "float32, got Long": forward(X.long()),
    "float32, got Double": forward(X.double()),
    "seed must be an int64 tensor": forward(residual=X, p=0.5),
    "dropout_p must lie in": forward(residual=X, p=1.5, seed=SEED),
    "dropout_rows has the wrong shape": forward(residual=X, p=0.5, seed=SEED, rows=torch.arange(2)),
    "features, got 0": forward(torch.ones(())),
    "features, got 65537": forward(torch.ones(1, 65537)),
    "mean has the wrong shape": _backward(mean=X[0], rstd=X[0]),
    "dy has the wrong shape": _backward(dy=X[:2]),
    "mean must be Float": _backward(mean=ROW.double()),
}


@pytest.mark.parametrize("words", REFUSED)
def test_the_operators_themselves_refuse_what_would_read_outside(backend, words, refusal):
    with pytest.raises(refusal, match=f"layer_norm_[fb]wd_{backend}: " + (f".*{words}" if backend == "cuda" else "")):
        REFUSED[words](backend)
