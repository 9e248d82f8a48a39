"""The layer_norm family: every line of its semantics, on every backend that runs here."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck

import tfm_kernels as tfk
from tests.layer_norm_semantics import (
    assert_constant_row_gives_the_bias,
    assert_eps_outside_of_the_root,
    assert_sum_need_not_be_kept,
    assert_weights_of_any_strides,
)
from tests.threads import on_threads
from tfm_kernels import dropout
from tfm_kernels.ops.layer_norm import BWD, FWD, layer_norm_of_sum

BACKENDS = ["reference", "aten", "cpu"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SEED = torch.tensor(20261121)
NAN = float("nan")


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_of_any_strides(backend, dtype):
    assert_weights_of_any_strides(backend, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_meaning(backend, dtype):
    """Against torch in float64; one rounding of the result is all that may differ."""
    x, w, b = randn(5, 24, dtype=dtype), randn(24, dtype=dtype, seed=1), randn(24, dtype=dtype, seed=2)
    tolerance = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 8 * torch.finfo(dtype).eps}
    y = tfk.ops.layer_norm(x, w, b, backend=backend)
    assert y.dtype == dtype and y.is_contiguous()
    expected = F.layer_norm(x.double(), (24,), w.double(), b.double())
    torch.testing.assert_close(y.double(), expected, **tolerance)
    y = tfk.ops.rms_norm(x, w, 1e-6, backend=backend)
    torch.testing.assert_close(y.double(), F.rms_norm(x.double(), (24,), w.double(), 1e-6), **tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_default_eps_is_torchs(backend, dtype):
    """So small that eps decides: 1.19e-07 for float32 and below, 2.2e-16 for float64."""
    x = (randn(3, 8) * 3e-4).to(dtype)
    y = tfk.ops.rms_norm(x, backend=backend)
    torch.testing.assert_close(y, F.rms_norm(x, (8,)), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    assert y.abs().max() < 1.8 or dtype == torch.float64


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_unbiased_is_the_n_minus_1_form(backend):
    x = randn(4, 6, dtype=torch.float64)
    expected = (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True) + 1e-12)
    y = tfk.ops.layer_norm(x, eps=1e-12, unbiased=True, backend=backend)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_z_is_the_sum_rounded_once_and_y_follows_from_it(backend, dtype):
    x, residual = randn(6, 40, dtype=dtype), randn(6, 40, dtype=dtype, seed=1)
    y, z = tfk.ops.add_layer_norm(x, residual, backend=backend)
    assert torch.equal(z, (x.double() + residual.double()).to(dtype))
    again = tfk.ops.layer_norm(z, backend=backend)
    assert torch.equal(y, again)


@pytest.mark.parametrize("backend", BACKENDS)
def test_y_alone_is_that_of_both(backend):
    """Under no_grad, where the sum is not kept, and with a graph."""
    x, residual, w = torch.randn(6, 40), torch.randn(6, 40), torch.randn(40).requires_grad_()
    options = {"dropout_p": 0.3, "seed": torch.tensor(5), "backend": backend}
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            y = layer_norm_of_sum(x, residual, w, **options)
            assert torch.equal(y, tfk.ops.add_layer_norm(x, residual, w, **options)[0]) and y.requires_grad is grad
    expected = torch.autograd.grad(tfk.ops.add_layer_norm(x, residual, w, **options)[0].sum(), w)
    assert torch.equal(*torch.autograd.grad(y.sum(), w), *expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("width", [7, 64, 130])
def test_the_sum_need_not_be_kept(width, dtype):
    assert_sum_need_not_be_kept("cpu", width, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_is_the_shared_rule(backend):
    x, p = torch.ones(7, 33), 0.25
    _, z = tfk.ops.add_layer_norm(x, torch.zeros_like(x), dropout_p=p, seed=SEED, backend=backend)
    keep = dropout.keep_mask(SEED, p, torch.arange(7), 33)
    torch.testing.assert_close(z, keep / (1 - p), rtol=1e-6, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_gradient_uses_the_same_mask(backend):
    x, residual = randn(7, 33).requires_grad_(), randn(7, 33, seed=1).requires_grad_()
    _, z = tfk.ops.add_rms_norm(x, residual, dropout_p=0.25, seed=SEED, backend=backend)
    dx, dresidual = torch.autograd.grad(z.sum(), (x, residual))
    keep = dropout.keep_mask(SEED, 0.25, torch.arange(7), 33)
    torch.testing.assert_close(dx, keep / 0.75, rtol=1e-6, atol=0)
    assert torch.equal(dresidual, torch.ones_like(dresidual))


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_rows_pick_the_padded_runs_masks(backend):
    x, rows = torch.ones(8, 20), torch.tensor([0, 1, 5, 6])
    zeros = torch.zeros_like(x)
    _, full = tfk.ops.add_layer_norm(x, zeros, dropout_p=0.5, seed=SEED, backend=backend)
    _, packed = tfk.ops.add_layer_norm(
        x[rows], zeros[rows], dropout_p=0.5, seed=SEED, dropout_rows=rows, backend=backend
    )
    assert torch.equal(packed, full[rows])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rms", [False, True])
def test_dropout_rows_may_lie_apart(backend, rms):
    norm = tfk.ops.add_rms_norm if rms else tfk.ops.add_layer_norm
    x, rows = torch.randn(3, 16, requires_grad=True), torch.tensor([5, 0, 9])
    apart = torch.stack([rows, rows + 1], dim=1)[:, 0]
    assert not apart.is_contiguous()
    found = []
    for numbers in (rows, apart):
        options = {"dropout_p": 0.5, "seed": torch.tensor(7), "dropout_rows": numbers, "backend": backend}
        y, z = norm(x, torch.zeros(3, 16), **options)
        found.append([y, z, *torch.autograd.grad(y.square().sum() + z.sum(), x)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_at_the_ends(backend):
    x, residual = randn(3, 8), randn(3, 8, seed=1)
    y, z = tfk.ops.add_layer_norm(x, residual, dropout_p=1.0, seed=SEED, backend=backend)
    assert torch.equal(z, residual)
    x[0, 0] = float("inf")  # a dropped element is dropped, not multiplied by 0
    _, z = tfk.ops.add_layer_norm(x, residual, dropout_p=1.0, seed=SEED, backend=backend)
    assert torch.equal(z, residual)
    x = randn(3, 8)
    plain = tfk.ops.add_layer_norm(x, residual, backend=backend)
    zero = tfk.ops.add_layer_norm(x, residual, dropout_p=0.0, seed=SEED, backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(plain, zero, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("norm", [tfk.ops.add_layer_norm, tfk.ops.add_rms_norm])
@pytest.mark.parametrize("bad", [NAN, float("inf")])
def test_dropped_elements_reach_nothing(norm, bad, backend):
    """Neither what lies there nor the gradient that arrives there; one that 1 / (1 - p) takes out of float16 too."""
    keep = dropout.keep_mask(SEED, 0.5, torch.arange(4), 16)
    clean, residual = randn(4, 16, dtype=torch.float16), randn(4, 16, dtype=torch.float16, seed=1)
    found = []
    for x in (clean, clean.masked_fill(~keep, bad)):
        x.requires_grad_()
        y, z = norm(x, residual, dropout_p=0.5, seed=SEED, backend=backend)
        dz = torch.full_like(z, 1.0).masked_fill(~keep, 6e4)
        found.append((y, z, *torch.autograd.grad((y, z), x, (randn(4, 16, dtype=torch.float16, seed=2), dz))))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    dx = found[0][2]
    assert dx.isfinite().all() and (dx[~keep] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_seed_comes_from_torchs_generator(backend):
    x = torch.ones(4, 64)

    def call():
        return tfk.ops.add_layer_norm(x, torch.zeros_like(x), dropout_p=0.5, backend=backend)[1]

    torch.manual_seed(3)
    first, second = call(), call()
    torch.manual_seed(3)
    assert torch.equal(call(), first) and not torch.equal(first, second)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_constant_row_gives_the_bias(backend, dtype):
    """Of 3.0, whose sums are exact."""
    bias = randn(16, dtype=dtype)
    y = tfk.ops.layer_norm(torch.full((2, 16), 3.0, dtype=dtype), torch.ones(16, dtype=dtype), bias, backend=backend)
    assert torch.equal(y, bias.expand(2, 16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [16, 100, 768, 1031])
def test_any_constant_row_gives_the_bias(dtype, width):
    """Which F.layer_norm's rounded mean does not: 0.01 off at 1000.1."""
    assert_constant_row_gives_the_bias("cpu", dtype, width)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("width", [7, 16, 100, 768, 1031])
def test_eps_outside_of_the_root(backend, width):
    assert_eps_outside_of_the_root(backend, width)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_with_inf_is_nan_and_the_others_are_not_touched(backend):
    x = randn(3, 16)
    clean = tfk.ops.layer_norm(x, backend=backend)
    x[1, 4] = float("inf")
    y = tfk.ops.layer_norm(x, backend=backend)
    assert y[1].isnan().all() and torch.equal(y[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("backend", BACKENDS)
def test_mean_far_from_zero_does_not_cancel(backend):
    """The one-pass formula E[x^2] - E[x]^2 has no correct digit here."""
    x = randn(4, 512) + 1e4
    y = tfk.ops.layer_norm(x, backend=backend)
    expected = F.layer_norm(x.double(), (512,))
    assert (y.double() - expected).abs().max() < 4e-3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (1, 1), (8,), (2, 3, 4, 5), (3, 1), (5, 1023)])
def test_shapes(backend, shape):
    x, residual = randn(*shape).requires_grad_(), randn(*shape, seed=1).requires_grad_()
    weight = randn(shape[-1], seed=2).requires_grad_()
    y, z = tfk.ops.add_layer_norm(x, residual, weight, backend=backend)
    assert y.shape == z.shape == x.shape
    gradients = torch.autograd.grad((y.sum(), z.sum()), (x, residual, weight))
    assert [g.shape for g in gradients] == [x.shape, x.shape, weight.shape]
    assert all(g.isfinite().all() for g in gradients)


LAYOUTS = {
    "transposed": lambda x: x.t().contiguous().t(),
    "sliced": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "every second": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "misaligned": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layout_changes_no_bit(backend, layout, dtype):
    x, residual, dy = (randn(9, 36, dtype=dtype, seed=s) for s in range(3))

    def run(lay):
        args = [lay(t).detach().requires_grad_() for t in (x, residual)]
        y, z = tfk.ops.add_layer_norm(*args, backend=backend)
        return y, z, *torch.autograd.grad((y, z), args, (lay(dy), lay(dy)))

    if backend == "aten" and dtype == torch.bfloat16:
        pytest.skip("F.layer_norm's own CPU kernel sums strided bfloat16 rows in another order")
    assert all(torch.equal(a, b) for a, b in zip(run(lambda t: t), run(LAYOUTS[layout]), strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("more", [0, 4], ids=["rows on whole vectors", "rows between vectors"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_rows_of_a_large_result_are_those_of_small_ones(dtype, more, dropout_p):
    """Results of 32 MB and more are stored past the caches, where their rows lie on whole vectors."""
    width = 1024 + more
    count = 2**25 // (width * dtype.itemsize) + 3
    x, residual, dy = (torch.randn(count, width).to(dtype) for _ in range(3))
    weight = torch.randn(width)

    def run(rows):
        args = [t[rows].requires_grad_() for t in (x, residual)]
        options = {"dropout_p": dropout_p, "seed": SEED, "dropout_rows": torch.arange(count)[rows], "backend": "cpu"}
        y, z = tfk.ops.add_layer_norm(*args, weight, **options)
        alone = tfk.ops.layer_norm(args[0].detach(), weight, backend="cpu")
        return alone, y, z, *torch.autograd.grad((y, z), args, (dy[rows], dy[rows]))

    halves = [run(slice(0, 1001)), run(slice(1001, count))]
    assert all(torch.equal(torch.cat(parts), whole) for whole, *parts in zip(run(slice(count)), *halves, strict=True))


def test_expanded_rows():
    x = randn(36).expand(5, 36)
    assert torch.equal(tfk.ops.layer_norm(x, backend="cpu"), tfk.ops.layer_norm(x.contiguous(), backend="cpu"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_mixed_dtypes_as_under_autocast(backend):
    """A sublayer in bfloat16, a residual stream and parameters in float32."""
    x, residual = randn(4, 32, dtype=torch.bfloat16).requires_grad_(), randn(4, 32, seed=1).requires_grad_()
    weight = randn(32, seed=2).requires_grad_()
    y, z = tfk.ops.add_layer_norm(x, residual, weight, backend=backend)
    assert y.dtype == z.dtype == torch.float32
    y.sum().backward()
    assert (x.grad.dtype, residual.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    low = randn(4, 32, dtype=torch.bfloat16).requires_grad_()
    out = tfk.ops.layer_norm(low, weight, backend=backend)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(
        out.double(), F.layer_norm(low.double(), (32,), weight.double()), rtol=2.0**-7, atol=2.0**-7
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("unbiased", [False, True])
def test_gradcheck(backend, unbiased):
    if backend == "aten" and unbiased:
        pytest.skip("aten cannot: it has no N - 1 variance")
    x, residual, weight, bias = (
        randn(*s, dtype=torch.float64, seed=i).requires_grad_() for i, s in enumerate([(3, 5), (3, 5), (5,), (5,)])
    )
    options = {"dropout_p": 0.3, "seed": SEED, "backend": backend}
    assert gradcheck(
        lambda *a: tfk.ops.add_layer_norm(*a, unbiased=unbiased, **options), (x, residual, weight, bias), nondet_tol=0
    )
    assert gradcheck(lambda *a: tfk.ops.add_rms_norm(*a, **options), (x, residual, weight), nondet_tol=0)
    assert gradcheck(lambda x: tfk.ops.rms_norm(x, backend=backend), (x,), nondet_tol=0)


def test_gradcheck_through_the_registered_operator():
    """Exported programs differentiate the operator itself."""
    x, weight = (
        randn(3, 5, dtype=torch.float64).requires_grad_(),
        randn(5, dtype=torch.float64, seed=1).requires_grad_(),
    )
    call = lambda x, w: FWD["cpu"](x, None, w, None, 1e-5, 0.0, False, False, 0.0, None, None)[0]
    assert gradcheck(call, (x, weight), nondet_tol=0)


def test_double_backward():
    x = randn(2, 4, dtype=torch.float64).requires_grad_()
    weight = randn(4, dtype=torch.float64, seed=1).requires_grad_()
    for name in ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"):
        sums = (x.detach().flip(0),) if name.startswith("add") else ()
        call = lambda x, w, backend, name=name, sums=sums: getattr(tfk.ops, name)(x, *sums, weight=w, backend=backend)
        for backend in ("reference", "aten"):
            assert gradgradcheck(lambda *a, f=call, b=backend: f(*a, b), (x, weight))
        y = call(x, weight, "cpu")
        (dx,) = torch.autograd.grad((y[0] if sums else y).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="layer_norm: the cpu backend is differentiable once"):
            dx.sum().backward()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("residual", [True, False])
def test_opcheck(dtype, residual):
    x, weight = randn(3, 8, dtype=dtype).requires_grad_(), randn(8, dtype=dtype, seed=1).requires_grad_()
    tail = (1e-3, not residual, False, 0.3 * residual, SEED, None)
    args = (x, x.detach() if residual else None, weight, None, 1e-5, *tail)
    torch.library.opcheck(FWD["cpu"], args)
    y, z, mean, rstd = FWD["cpu"](*args)
    parameters = weight.detach(), weight.detach() if residual else None
    args = (y.detach(), None, x.detach(), mean, rstd, *parameters, *tail)
    torch.library.opcheck(BWD["cpu"], (*args, True, residual))


@pytest.mark.parametrize("shape", [(65, 48), (700, 96)])
def test_forward_and_backward_are_repeatable(shape):
    x, dy = randn(*shape).requires_grad_(), randn(*shape, seed=1)
    weight = randn(shape[1], seed=2).requires_grad_()

    def run(threads):
        with on_threads(threads):
            y, z = tfk.ops.add_layer_norm(x, dy, weight, dropout_p=0.1, seed=SEED, backend="cpu")
            return y, z, *torch.autograd.grad((y, z), (x, weight), (dy, dy))

    first = run(2)
    for threads in (2, 1, 2):
        assert all(torch.equal(a, b) for a, b in zip(first, run(threads), strict=True))


def test_compiles_to_one_graph_and_trains():
    @torch.compile(fullgraph=True)
    def step(x, residual, weight):
        y, z = tfk.ops.add_layer_norm(x, residual, weight, dropout_p=0.1, seed=SEED, backend="cpu")
        return tfk.ops.rms_norm(y, backend="cpu") + z

    x, residual, weight = randn(4, 16).requires_grad_(), randn(4, 16, seed=1), randn(16, seed=2).requires_grad_()
    out = step(x, residual, weight)
    gradients = torch.autograd.grad(out.square().sum(), (x, weight))
    y, z = tfk.ops.add_layer_norm(x, residual, weight, dropout_p=0.1, seed=SEED, backend="cpu")
    eager = tfk.ops.rms_norm(y, backend="cpu") + z
    torch.testing.assert_close(out, eager)
    for a, b in zip(gradients, torch.autograd.grad(eager.square().sum(), (x, weight)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_recompute_draws_the_same_mask(reentrant):
    x = randn(4, 32).requires_grad_()

    def block(x):
        return tfk.ops.add_layer_norm(x, x, dropout_p=0.5, backend="cpu")[0]

    def gradient(run):
        torch.manual_seed(5)
        return torch.autograd.grad(run().square().sum(), x)[0]

    plain = gradient(lambda: block(x))
    saved = (
        gradient(lambda: torch.utils.checkpoint.checkpoint(block, x, use_reentrant=reentrant))
        if not reentrant
        else None
    )
    if reentrant:
        torch.manual_seed(5)
        x.grad = None
        torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True).square().sum().backward()
        saved = x.grad
    assert torch.equal(plain, saved)


X = torch.randn(4, 8)
BAD = [
    (lambda: tfk.ops.layer_norm([1.0]), TypeError, "layer_norm: x must be a tensor, got list"),
    (lambda: tfk.ops.layer_norm(None), TypeError, "layer_norm: x must be a tensor, got NoneType"),
    (lambda: tfk.ops.layer_norm(torch.ones(4, 8, dtype=torch.int64)), ValueError, "x must be float16, .* got int64"),
    (lambda: tfk.ops.layer_norm(torch.ones(4, 8, dtype=torch.bool)), ValueError, "x must be float16, .* got bool"),
    (lambda: tfk.ops.layer_norm(torch.ones(4, 8, dtype=torch.complex64)), ValueError, "got complex64"),
    (lambda: tfk.ops.layer_norm(torch.tensor(1.0)), ValueError, r"last dimension of at least 1, got shape \(\)"),
    (lambda: tfk.ops.layer_norm(torch.ones(4, 0)), ValueError, r"at least 1, got shape \(4, 0\)"),
    (lambda: tfk.ops.layer_norm(torch.ones(4, 1), unbiased=True), ValueError, "at least 2"),
    (lambda: tfk.ops.layer_norm(X, unbiased=1), TypeError, "unbiased must be a bool, got int"),
    (
        lambda: tfk.ops.layer_norm(X, torch.ones(7)),
        ValueError,
        r"weight must have shape \(8,\) to match x \(4, 8\), got \(7,\)",
    ),
    (lambda: tfk.ops.layer_norm(X, torch.ones(1, 8)), ValueError, r"weight must have shape \(8,\)"),
    (lambda: tfk.ops.layer_norm(X, 1.0), TypeError, "weight must be a tensor or None, got float"),
    (lambda: tfk.ops.layer_norm(X, torch.ones(8), torch.ones(4)), ValueError, r"bias must have shape \(8,\)"),
    (lambda: tfk.ops.layer_norm(X, None, 0), TypeError, "bias must be a tensor or None, got int"),
    (
        lambda: tfk.ops.layer_norm(X, torch.ones(8).double()),
        ValueError,
        "weight must be float32 to go with x, got float64",
    ),
    (lambda: tfk.ops.layer_norm(X.half(), torch.ones(8).bfloat16()), ValueError, "weight must be float16 or float32"),
    (
        lambda: tfk.ops.layer_norm(X, torch.ones(8, dtype=torch.int32)),
        ValueError,
        "weight must be float16, .* got int32",
    ),
    (lambda: tfk.ops.layer_norm(X, torch.ones(8, device="meta")), ValueError, "x and weight must be on one device"),
    (lambda: tfk.ops.layer_norm(X, eps=-1e-5), ValueError, "eps must be a finite number >= 0, got -1e-05"),
    (lambda: tfk.ops.layer_norm(X, eps=float("nan")), ValueError, "eps must be a finite number >= 0, got nan"),
    (lambda: tfk.ops.layer_norm(X, eps=float("inf")), ValueError, "eps must be a finite number >= 0, got inf"),
    (lambda: tfk.ops.layer_norm(X, eps="1e-5"), TypeError, "eps must be a number, got str"),
    (lambda: tfk.ops.layer_norm(X, eps=None), TypeError, "eps must be a number, got NoneType"),
    (lambda: tfk.ops.layer_norm(X, backend="cuda0"), ValueError, "backend must be one of"),
    (lambda: tfk.ops.layer_norm(X, backend=1), ValueError, "backend must be one of"),
    (lambda: tfk.ops.rms_norm("x"), TypeError, "rms_norm: x must be a tensor, got str"),
    (lambda: tfk.ops.rms_norm(torch.ones(4, 8, dtype=torch.int32)), ValueError, "rms_norm: x must be float16"),
    (lambda: tfk.ops.rms_norm(X, torch.ones(9)), ValueError, r"rms_norm: weight must have shape \(8,\)"),
    (lambda: tfk.ops.rms_norm(X, eps=-1), ValueError, "rms_norm: eps must be"),
    (lambda: tfk.ops.rms_norm(X, eps=[]), TypeError, "rms_norm: eps must be a number"),
    (lambda: tfk.ops.rms_norm(torch.ones(0)), ValueError, "rms_norm: x must have a last dimension"),
    (lambda: tfk.ops.add_layer_norm(X, None), TypeError, "add_layer_norm: residual must be a tensor, got NoneType"),
    (lambda: tfk.ops.add_layer_norm(X, torch.ones(4, 9)), ValueError, r"residual must have shape \(4, 8\)"),
    (lambda: tfk.ops.add_layer_norm(X, torch.ones(8)), ValueError, r"residual must have shape \(4, 8\) to match x"),
    (lambda: tfk.ops.add_layer_norm(X, torch.ones(4, 8, dtype=torch.int64)), ValueError, "residual must be float16"),
    (lambda: tfk.ops.add_layer_norm(X, torch.ones(4, 8, device="meta")), ValueError, "must be on one device"),
    (lambda: tfk.ops.add_layer_norm(X, X, dropout_p=-0.1), ValueError, r"dropout_p must lie in \[0, 1\], got -0.1"),
    (lambda: tfk.ops.add_layer_norm(X, X, dropout_p=1.5), ValueError, r"dropout_p must lie in \[0, 1\]"),
    (lambda: tfk.ops.add_layer_norm(X, X, dropout_p=float("nan")), ValueError, r"dropout_p must lie in \[0, 1\]"),
    (lambda: tfk.ops.add_layer_norm(X, X, dropout_p=None), TypeError, "dropout_p must be a number"),
    (lambda: tfk.ops.add_layer_norm(X, X, dropout_p=True), TypeError, "dropout_p must be a number"),
    (lambda: tfk.ops.add_layer_norm(X, X, dropout_p=0.1, seed=3), TypeError, "seed must be a tensor or None, got int"),
    (lambda: tfk.ops.add_layer_norm(X, X, dropout_p=0.1, seed=torch.tensor(3.0)), ValueError, "seed must be an int64"),
    (lambda: tfk.ops.add_layer_norm(X, X, dropout_p=0.1, seed=torch.tensor([3])), ValueError, r"of shape \(1,\)"),
    (
        lambda: tfk.ops.add_layer_norm(X, X, dropout_p=0.1, seed=torch.tensor(3, device="meta")),
        ValueError,
        "seed must be on cpu",
    ),
    (lambda: tfk.ops.add_layer_norm(X, X, dropout_rows=[0, 1, 2, 3]), TypeError, "dropout_rows must be a tensor"),
    (
        lambda: tfk.ops.add_layer_norm(X, X, dropout_rows=torch.arange(3)),
        ValueError,
        r"dropout_rows must be an int64 tensor of shape \(4,\)",
    ),
    (lambda: tfk.ops.add_layer_norm(X, X, dropout_rows=torch.zeros(4)), ValueError, "dropout_rows must be an int64"),
    (lambda: tfk.ops.add_rms_norm(X, 0), TypeError, "add_rms_norm: residual must be a tensor"),
    (lambda: tfk.ops.add_rms_norm(X, X.t()), ValueError, r"add_rms_norm: residual must have shape \(4, 8\)"),
    (lambda: tfk.ops.add_rms_norm(X, X, dropout_p="0.1"), TypeError, "add_rms_norm: dropout_p must be a number"),
    (lambda: tfk.ops.add_rms_norm(X, X, torch.ones(8, 1)), ValueError, "add_rms_norm: weight must have shape"),
]


@pytest.mark.parametrize("index", range(len(BAD)))
def test_refuses(index):
    call, error, message = BAD[index]
    with pytest.raises(error, match=message) as info:
        call()
    assert "\n" not in str(info.value) and len(str(info.value)) < 200


DIRECT = [
    lambda: FWD["cpu"](X, X[:2], None, None, 1e-5, 0.0, False, False, 0.0, None, None),
    lambda: FWD["cpu"](X, None, torch.ones(3), None, 1e-5, 0.0, False, False, 0.0, None, None),
    lambda: FWD["cpu"](X.long(), None, None, None, 1e-5, 0.0, False, False, 0.0, None, None),
    lambda: FWD["cpu"](X, X, None, None, 1e-5, 0.0, False, False, 0.5, None, None),
    lambda: FWD["cpu"](X, X, None, None, 1e-5, 0.0, False, False, 1.5, SEED, None),
    lambda: FWD["cpu"](X, X, None, None, 1e-5, 0.0, False, False, 0.5, SEED, torch.arange(2)),
    lambda: FWD["cpu"](torch.ones(()), None, None, None, 1e-5, 0.0, False, False, 0.0, None, None),
    lambda: BWD["cpu"](X, None, X, X[0], X[0], None, None, 0.0, False, False, 0.0, None, None, True, True),
    lambda: BWD["cpu"](X[:2], None, X, X[:, 0], X[:, 0], None, None, 0.0, False, False, 0.0, None, None, True, True),
    lambda: BWD["cpu"](X, None, X, X[:, 0], X[:, 0], X[0], X[0, :2], 0.0, False, False, 0.0, None, None, True, True),
    lambda: BWD["cpu"](X, None, X, X[:, 0], X[:, 0], X[0].long(), None, 0.0, False, False, 0.0, None, None, True, True),
    lambda: BWD["cpu"](
        X, None, X, X[:, 0].double(), X[:, 0], None, None, 0.0, False, False, 0.0, None, None, True, True
    ),
]


@pytest.mark.parametrize("index", range(len(DIRECT)))
def test_the_operators_themselves_refuse_what_would_read_outside(index):
    with pytest.raises(RuntimeError, match="layer_norm_[fb]wd_cpu: "):
        DIRECT[index]()
