"""LayerNorm and RMSNorm: torch.nn's, option by option, and the sums that the layers fuse with them."""

import pytest
import torch

import tfm_kernels as tfk
from tfm_kernels.nn.layer_norm import add, add_norm
from tfm_kernels.testing.float64 import assert_same_in_float64

from .twins import BACKENDS, assert_same, label, pairwise, randn, twins

LAYER_NORMS = pairwise(
    backend=BACKENDS,
    dtype=[torch.float64, torch.float32],
    shape=[12, [12], (4, 12), torch.Size([2, 4, 12])],
    affine=["full", "no bias", "none"],
    eps=[1e-5, 1e-12],
)


@pytest.mark.parametrize("case", LAYER_NORMS, ids=label)
def test_layer_norm_is_torchs(case):
    affine = {"full": {}, "no bias": {"bias": False}, "none": {"elementwise_affine": False}}[case["affine"]]
    theirs, ours = twins(
        "LayerNorm", case["shape"], eps=case["eps"], **affine, dtype=case["dtype"], backend=case["backend"]
    )
    assert repr(theirs).split("(", 1)[1] == repr(ours).split("(", 1)[1]
    if affine.get("elementwise_affine", True):
        assert_same(theirs, ours, [randn(3, 2, 4, 12)])
    else:
        x = randn(3, 2, 4, 12, dtype=case["dtype"])
        torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{}, {"eps": 1e-3}])
@pytest.mark.parametrize("shape", [12, (4, 12)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rms_norm_is_torchs(backend, options, shape, dtype):
    theirs, ours = twins("RMSNorm", shape, **options, dtype=dtype, backend=backend)
    assert_same(theirs, ours, [randn(3, 2, 4, 12) * 1e-3])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rms_norm_without_affine_takes_torchs_eps(backend, dtype):
    theirs, ours = twins("RMSNorm", 8, elementwise_affine=False, backend=backend)
    x = torch.full((2, 8), 1e-3, dtype=dtype)  # eps of bfloat16 would more than halve the output
    torch.testing.assert_close(ours(x), theirs(x))


def test_non_contiguous_and_empty_inputs():
    theirs, ours = twins("LayerNorm", (4, 6), backend="cpu", dtype=torch.float64)
    x = randn(6, 4, 5).permute(2, 1, 0)
    torch.testing.assert_close(ours(x), theirs(x))
    assert ours(x[:0]).shape == (0, 4, 6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_on_the_cpu_is_torchs(backend, dtype):
    """Also with the float32 weights of a mixed-precision run."""
    theirs, ours = twins("LayerNorm", 16, backend=backend)
    for x in (randn(4, 16, dtype=torch.float32), randn(4, 16, dtype=dtype)):
        with torch.autocast("cpu", dtype=dtype):
            torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_an_rms_norm_takes_weights_narrower_than_its_input(backend, weights, dtype):
    theirs, ours = twins("RMSNorm", 16, dtype=weights, backend=backend)
    with torch.no_grad():
        for norm in (theirs, ours):
            norm.weight.copy_(torch.linspace(-2, 2, 16))
    x = randn(4, 16, dtype=dtype)
    expected, found = theirs(x), ours(x)
    assert found.dtype == expected.dtype == dtype
    torch.testing.assert_close(found, expected)
    y, z = add_norm(x, x.flip(0), torch.nn.Dropout(0.0), ours)
    torch.testing.assert_close(y, theirs(z))
    for norm, out in ((theirs, expected), (ours, found)):
        out.backward(randn(4, 16, dtype=dtype, seed=1))
        assert norm.weight.grad.dtype == weights
    # torch rounds the products of 16-bit inputs before it sums them
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_16_bit_norms_under_autocast_on_a_gpu(kind, backend, monkeypatch):
    """There autocast widens input, weight and bias; here the input alone is widened before, as on a GPU."""
    from tfm_kernels.nn import layer_norm

    _, ours = twins(kind, 16, dtype=torch.bfloat16, backend=backend)
    x = randn(4, 16, dtype=torch.bfloat16)
    monkeypatch.setattr(layer_norm, "_widened", lambda dtype, device: dtype == torch.bfloat16)
    y = ours(x)
    assert y.dtype == torch.float32
    monkeypatch.undo()
    torch.testing.assert_close(y, ours.float()(x.float()))


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_torch_fx_traces_norms(kind):
    theirs, ours = twins(kind, (2, 8), dtype=torch.float32, backend=None)
    x = randn(4, 2, 8, dtype=torch.float32)
    for model in (ours, torch.nn.Sequential(torch.nn.Linear(8, 8), ours)):
        traced = torch.fx.symbolic_trace(model)
        torch.testing.assert_close(traced(x), model(x))
    torch.testing.assert_close(torch.fx.symbolic_trace(ours)(x), theirs(x))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_default_eps_is_that_of_the_sum(backend):
    x, residual = torch.full((2, 8), 1e-5), 1e-5 * torch.arange(8.0).double().expand(2, 8)
    y, z = tfk.ops.add_rms_norm(x, residual, backend=backend)
    assert_same_in_float64(y, torch.nn.functional.rms_norm(z, (8,)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_residual_of_another_shape_is_broadcast(backend):
    x, residual, dropout = randn(3, 5, 12), randn(1, 5, 12, seed=1), torch.nn.Dropout(0.5)
    norm = tfk.nn.LayerNorm(12, dtype=torch.float64, backend=backend)
    assert torch.equal(add(x, residual, dropout.eval(), backend), x + residual)
    assert torch.equal(add_norm(x, residual, dropout, norm)[0], norm(x + residual))
    assert add(x, residual, dropout.train(), backend).shape == x.shape


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", [tfk.nn.LayerNorm, tfk.nn.RMSNorm, torch.nn.LayerNorm, torch.nn.RMSNorm])
@pytest.mark.parametrize("dtypes", [(torch.float64, torch.float64), (torch.bfloat16, torch.float32)])
def test_add_norm_equals_its_parts(backend, kind, dtypes):
    norm = kind(12, eps=1e-5, dtype=dtypes[1])
    if hasattr(norm, "backend"):
        norm.backend = backend
    x, residual = randn(5, 12, dtype=dtypes[0]), randn(5, 12, dtype=dtypes[1], seed=1)
    y, z = add_norm(x, residual, torch.nn.Dropout(0.0), norm)
    assert torch.equal(z, residual + x)
    torch.testing.assert_close(y, norm(z), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_both_sums_drop_by_the_projects_rule(backend):
    """The same seed drops the same elements, in the plain sum as in the one before a norm, and as ops drops them."""
    x, residual, dropout = randn(6, 12), randn(6, 12, seed=1), torch.nn.Dropout(0.4)
    norm = tfk.nn.LayerNorm(12, dtype=torch.float64, backend=backend)
    torch.manual_seed(5)
    y, z = add_norm(x, residual, dropout, norm)
    torch.manual_seed(5)
    plain = add(x, residual, dropout, backend)
    torch.manual_seed(5)
    seed = tfk.dropout.draw_seed("cpu")
    keep = tfk.dropout.keep_mask(seed, 0.4, torch.arange(6), 12)
    torch.testing.assert_close(z, residual + x * keep / 0.6)
    assert torch.equal(plain, z)
    torch.testing.assert_close(y, norm(z))
    for child in (dropout.eval(), torch.nn.Dropout(0.0), torch.nn.Identity()):
        assert torch.equal(add(x, residual, child, backend), residual + x)


def test_a_dropout_of_another_class_is_called():
    class Halve(torch.nn.Dropout):
        def forward(self, input):
            return input / 2

    x, residual, norm = randn(6, 12), randn(6, 12, seed=1), tfk.nn.LayerNorm(12, dtype=torch.float64)
    assert torch.equal(add(x, residual, Halve(0.5), "cpu"), residual + x / 2)
    y, z = add_norm(x, residual, Halve(0.5), norm)
    assert torch.equal(z, residual + x / 2) and torch.equal(y, norm(z))


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_root_mean_square_norm_in_float64_takes_narrower_rows(dtype):
    """As torch's does, in its own dtype."""
    theirs, ours = twins("RMSNorm", 16, backend="cpu", dtype=torch.float64)
    x = randn(4, 16, dtype=dtype)
    assert ours(x).dtype == dtype and torch.equal(ours(x), theirs(x))
