"""ffn's dropout: one mask for all backends, forward and backward, packed and padded."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tfm_kernels as tfk
from tfm_kernels import dropout

BACKENDS = ["reference", "aten", "cpu"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SEED = torch.tensor(-7)


def probe(rows, hidden, dtype=torch.float32):
    """Everything 1 up to the hidden activation, and the identity behind it: y shows what dropout left."""
    ones = {"x": torch.ones(rows, 1), "w1": torch.ones(hidden, 1), "w2": torch.eye(hidden)}
    return {name: t.to(dtype) for name, t in ones.items()} | {"b1": None, "b2": None}


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "hidden"), [(1, 1), (3, 66), (130, 70), (40, 515)])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.999])
def test_masks_are_the_same_bits(dtype, rows, hidden, p):
    given = probe(rows, hidden, dtype)
    found = [tfk.ops.ffn(**given, dropout_p=p, seed=SEED, backend=backend) for backend in BACKENDS]
    expected = dropout.keep_mask(SEED, p, torch.arange(rows), hidden)
    for y in found:
        assert torch.equal(y != 0, expected)
        torch.testing.assert_close(y[expected].double(), torch.full_like(y[expected], 1 / (1 - p)).double())


@pytest.mark.parametrize("backend", BACKENDS)
def test_backward_draws_the_forwards_mask(backend):
    """dp = dy * keep / (1 - p) where the activation is the identity and w2 too; a gate's gradient alike."""
    keep = dropout.keep_mask(SEED, 0.25, torch.arange(130), 70)
    x = torch.ones(130, 70).requires_grad_()
    eye = torch.eye(70)
    y = tfk.ops.ffn(x, eye, None, eye, None, dropout_p=0.25, seed=SEED, backend=backend)
    (dx,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(dx, keep / 0.75)
    gate = eye.clone().requires_grad_()
    y = tfk.ops.ffn(x.detach(), eye, None, eye, None, gate=gate, dropout_p=0.25, seed=SEED, backend=backend)
    (dgate,) = torch.autograd.grad(y.sum(), gate)
    torch.testing.assert_close(dgate, (keep.sum(0) / 0.75).view(-1, 1).expand(70, 70))


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_every_block_have_their_numbers(backend):
    """The CPU's backward takes the rows in blocks, here in two."""
    numbers, eye = torch.randperm(1100, generator=torch.Generator().manual_seed(3)), torch.eye(20)
    x = torch.ones(1100, 20).requires_grad_()
    options = {"dropout_p": 0.25, "seed": SEED, "dropout_rows": numbers, "backend": backend}
    (dx,) = torch.autograd.grad(tfk.ops.ffn(x, eye, None, eye, None, **options).sum(), x)
    torch.testing.assert_close(dx, dropout.keep_mask(SEED, 0.25, numbers, 20) / 0.75)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [3, 130])
@pytest.mark.parametrize("recompute", [False, True])
def test_what_is_dropped_reaches_nothing(backend, dtype, rows, recompute):
    """An activation that overflows where it is dropped changes no bit, and a gradient of inf not those of features
    that were dropped in its row."""
    keep = dropout.keep_mask(SEED, 0.5, torch.arange(rows), 66)
    large = 2.0 ** {torch.float16: 8, torch.float64: 600}.get(dtype, 70)
    w1, w2 = large * torch.eye(66, dtype=dtype), draw(8, 66).detach().to(dtype)
    dy = torch.full((rows, 8), 2.0**-6, dtype=dtype)
    options = {"dropout_p": 0.5, "seed": SEED, "recompute": recompute, "backend": backend}
    found = []
    for dropped in (1 / large, large):  # preactivations of 1, or of inf
        x = torch.full((rows, 66), 1 / large, dtype=dtype).masked_fill(~keep, dropped)
        leaves = [t.clone().requires_grad_() for t in (x, w1, w2)]
        y = tfk.ops.ffn(leaves[0], leaves[1], None, leaves[2], None, activation="relu", **options)
        _, dw1, dw2 = torch.autograd.grad(y, leaves, dy, retain_graph=True)
        found.append((y.detach(), dw2))
        assert y.isfinite().all() and dw1.isfinite().all()
        infinite = dy.clone()
        infinite[1] = torch.inf
        (dw1,) = torch.autograd.grad(y, leaves[1], infinite)
        assert dw1[~keep[1]].isfinite().all() and not dw1[keep[1]].isfinite().all(1).any()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_rows_get_the_padded_runs_masks(backend):
    """dropout_rows names the rows' places in the padded run, forward and backward; any int64 will do."""
    # in float64, because few rows and many are summed by different kernels
    given = {"w1": draw(40, 8, seed=1), "b1": draw(40, seed=2), "w2": draw(8, 40, seed=3)}
    given = {"b2": None, **{name: t.double() for name, t in given.items()}}
    x, kept = draw(50, 8).double(), torch.tensor([0, 1, 4, 9, 17, 30, 31, 32, 48])
    padded = tfk.ops.ffn(x, **given, dropout_p=0.3, seed=SEED, backend=backend)
    packed = tfk.ops.ffn(x[kept], **given, dropout_p=0.3, seed=SEED, dropout_rows=kept, backend=backend)
    torch.testing.assert_close(packed, padded[kept])
    (expected,) = torch.autograd.grad(padded[kept].square().sum(), x, retain_graph=True)
    (found,) = torch.autograd.grad(packed.square().sum(), x)
    torch.testing.assert_close(found, expected)
    far = torch.tensor([0, 2**40 + 5, 2**62, 2, 2, 7, 8, 9, 10])
    spaced = torch.stack([far, far], 1)[:, 0]
    y = tfk.ops.ffn(**probe(9, 33), dropout_p=0.5, seed=SEED, dropout_rows=spaced, backend=backend)
    assert torch.equal(y != 0, dropout.keep_mask(SEED, 0.5, far, 33))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_ends_of_p(backend, dtype):
    given = probe(20, 20, dtype)
    plain = tfk.ops.ffn(**given, backend=backend)
    assert torch.equal(tfk.ops.ffn(**given, dropout_p=0.0, seed=SEED, backend=backend), plain)
    b2 = torch.arange(20).to(dtype)
    y = tfk.ops.ffn(**(given | {"b2": b2}), dropout_p=1.0, seed=SEED, backend=backend)
    assert torch.equal(y, b2.expand(20, 20))
    x = given["x"].clone().requires_grad_()
    tfk.ops.ffn(**(given | {"x": x}), dropout_p=1.0, seed=SEED, backend=backend).sum().backward()
    assert torch.equal(x.grad, torch.zeros_like(x))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_dropped_infinity_is_dropped(backend):
    given = probe(64, 16) | {"x": torch.full((64, 1), torch.inf)}
    y = tfk.ops.ffn(**(given | {"w2": torch.ones(1, 16)}), dropout_p=1.0, seed=SEED, backend=backend)
    assert torch.equal(y, torch.zeros(64, 1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_seeds(backend):
    given = probe(30, 40)
    torch.manual_seed(5)
    first = tfk.ops.ffn(**given, dropout_p=0.5, backend=backend)
    second = tfk.ops.ffn(**given, dropout_p=0.5, backend=backend)
    torch.manual_seed(5)
    again = tfk.ops.ffn(**given, dropout_p=0.5, backend=backend)
    assert torch.equal(first, again) and not torch.equal(first, second)
    before = torch.get_rng_state()
    tfk.ops.ffn(**given, backend=backend)
    tfk.ops.ffn(**given, dropout_p=0.5, seed=SEED, backend=backend)
    tfk.explain("ffn", **given, dropout_p=0.5)
    assert torch.equal(torch.get_rng_state(), before), "a seed was drawn where none was needed"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_checkpointing_repeats_the_mask(backend, use_reentrant, recompute):
    leaves = [draw(9, 8), draw(24, 8, seed=1), draw(24, seed=2), draw(8, 24, seed=3), draw(8, seed=4)]

    def run(*arguments):
        return tfk.ops.ffn(*arguments, dropout_p=0.5, activation="silu", recompute=recompute, backend=backend)

    torch.manual_seed(3)
    expected = torch.autograd.grad(run(*leaves).square().sum(), leaves)
    torch.manual_seed(3)
    y = checkpoint(run, *leaves, use_reentrant=use_reentrant)
    y.square().sum().backward()
    for leaf, grad in zip(leaves, expected, strict=True):
        assert torch.equal(leaf.grad, grad)
