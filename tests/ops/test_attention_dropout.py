"""attention's dropout: one mask for all backends, forward and backward, and as many weights kept as were asked for."""

import pytest
import torch

import tfm_kernels as tfk
from tfm_kernels import dropout

BACKENDS = ["reference", "cpu"]  # aten has no dropout of the shared rule
SEED = torch.tensor(20261121)
BATCH, HEADS, QUERIES, KEYS = 3, 4, 130, 131  # behind a tile's end, and no multiple of Philox's four lanes


def kept(p, backend, dtype):
    """(forward's, backward's) kept weights (B, H, Tq, Tk) of a call whose weights are all equal.

    One-hot values read them off the output; one-hot output gradients read them off the gradient of the values.
    """
    q = torch.zeros(BATCH, HEADS, QUERIES, 8, dtype=dtype)
    k = torch.zeros(BATCH, HEADS, KEYS, 8, dtype=dtype)
    v = torch.eye(KEYS, dtype=dtype).repeat(BATCH, HEADS, 1, 1).requires_grad_()
    out = tfk.ops.attention(q, k, v, dropout_p=p, seed=SEED, backend=backend)
    dout = torch.eye(QUERIES, KEYS, dtype=dtype).expand_as(out)  # query i has a place of its own in dv
    (dv,) = torch.autograd.grad(out, v, dout)
    return out.detach() != 0, dv[..., :QUERIES].transpose(-1, -2) != 0


def assert_rate(hits, rate, axes, what):
    """The mean of ``hits`` over ``axes`` lies within 4.5 sigma of ``rate``, which a binomial of its size has."""
    count = 1
    for axis in axes:
        count *= hits.shape[axis]
    z = (hits.double().mean(axes) - rate) / (rate * (1 - rate) / count) ** 0.5
    assert z.abs().max() < 4.5, f"{what}: off by {z.abs().max():.1f} sigma"


OVER = {"all": (0, 1, 2, 3), "batch": (1, 2, 3), "head": (0, 2, 3), "row": (0, 1, 3), "column": (0, 1, 2)}
OVER |= {"head of a batch": (2, 3), "row of a head": (3,), "column of a head": (2,)}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("p", [0.2, 0.5])
def test_keep_rate(backend, dtype, p):
    keep, back = kept(p, backend, dtype)
    assert torch.equal(keep, back)
    for what, axes in OVER.items():
        assert_rate(keep, 1 - p, axes, what)
    for axis, what in enumerate(("batches", "heads", "rows", "columns")):  # a mask used twice has the right rate too
        for distance in (1, 2, 4, 64):
            if distance < keep.shape[axis]:
                both = keep == keep.roll(distance, axis)
                assert_rate(both, p**2 + (1 - p) ** 2, (0, 1, 2, 3), f"{what} {distance} apart")


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_is_the_shared_rule(backend):
    """q = 0 makes all weights equal; one-hot values read them off the output."""
    keys = 9
    q, v = torch.zeros(2, 3, 4, keys), torch.eye(keys).expand(2, 3, keys, keys)
    out = tfk.ops.attention(q, v, v, dropout_p=0.4, seed=SEED, backend=backend)
    keep = dropout.keep_mask(SEED, 0.4, dropout.attention_rows(2, 3, 4, "cpu"), keys)
    assert torch.equal(out != 0, keep)
    torch.testing.assert_close(out[keep], torch.full_like(out[keep], 1 / keys / 0.6))
    assert (tfk.ops.attention(q, v, v, dropout_p=1.0, seed=SEED, backend=backend) == 0).all()
    plain = tfk.ops.attention(q, v, v, backend=backend)
    assert torch.equal(tfk.ops.attention(q, v, v, dropout_p=0.0, seed=SEED, backend=backend), plain)


def test_the_shown_rows_and_heads_of_the_weights_are_those_that_dropout_left():
    """attention_weights counts rows as the whole call does, whichever of them it is asked for."""
    make = torch.Generator().manual_seed(3)
    q, k = (torch.randn(2, 3, length, 8, generator=make, dtype=torch.float64) for length in (11, 9))
    random, rows, heads = {"dropout_p": 0.4, "seed": SEED}, [7, 0, 10], [2, 0]
    _, lse = tfk.ops.attention(q, k, k, return_lse=True, **random, backend="reference")
    keep = dropout.keep_mask(SEED, 0.4, dropout.attention_rows(2, 3, 11, "cpu"), 9)
    expected = (q @ k.transpose(-1, -2) * 8**-0.5).softmax(-1) * keep / 0.6
    torch.testing.assert_close(tfk.ops.attention_weights(q, k, lse, **random), expected)
    some = tfk.ops.attention_weights(q, k, lse, **random, rows=rows, heads=heads)
    torch.testing.assert_close(some, expected[:, heads][:, :, rows])


def test_checkpointed_recompute_draws_the_same_mask():
    q, k, v = (torch.randn(2, 4, 5, 8, requires_grad=True) for _ in range(3))
    call = lambda q: tfk.ops.attention(q, k, v, dropout_p=0.5, backend="cpu")
    gradients = []
    for runner in (call, lambda q: torch.utils.checkpoint.checkpoint(call, q, use_reentrant=False)):
        torch.manual_seed(5)
        gradients.append(torch.autograd.grad(runner(q).square().sum(), q)[0])
    assert torch.equal(*gradients)
