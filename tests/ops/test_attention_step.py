"""attention_step: bit for bit the three ops that it runs past the dispatcher, and where it is not taken."""

import pytest
import torch

import tfm_kernels as tfk
from tests.threads import on_threads
from tfm_kernels.ops.attention_step import attention_step
from tfm_kernels.ops.attention_watch import watching

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
HEADS, WIDTH, ROOM = 3, 8, 20
E = HEADS * WIDTH


def given(rows, per_sentence, dtype, bias=True):
    """(x, the weights and biases, keys and values) of ``rows`` rows."""
    generator = torch.Generator().manual_seed(rows)
    draw = lambda *shape, scale=1.0: (scale * torch.randn(*shape, generator=generator)).to(dtype)
    weights = draw(3 * E, E, scale=E**-0.5), draw(3 * E), draw(16, E, scale=E**-0.5), draw(16)
    weights = weights if bias else (weights[0], None, weights[2], None)
    kept = [draw(rows // per_sentence, HEADS, ROOM, WIDTH) for _ in range(2)]
    return draw(rows, 1, E), weights, kept


def by_three_ops(x, weights, kept, length, grows, keep=None):
    """The same by ops.linear, ops.attention and ops.linear; ``kept`` is written as well."""
    in_weight, in_bias, out_weight, out_bias = weights
    if not grows:
        in_weight, in_bias = in_weight[:E], None if in_bias is None else in_bias[:E]
    parts = tfk.ops.linear(x, in_weight, in_bias, backend="cpu").flatten(0, 1).unflatten(-1, (-1, HEADS, WIDTH))
    sentences = kept[0].shape[0]
    for n, t in enumerate(kept if grows else ()):
        t[:, :, length - 1] = parts[:, n + 1]
    q = parts[:, 0].unflatten(0, (sentences, -1)).transpose(1, 2)
    mask = None if keep is None else tfk.Mask.keep(keep)
    out = tfk.ops.attention(q, *(t[:, :, :length] for t in kept), mask, backend="cpu")
    return tfk.ops.linear(out.transpose(1, 2).reshape(-1, 1, E), out_weight, out_bias, backend="cpu")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "length"), [(4, 1), (9, 7), (16, ROOM)])
@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_a_growing_step(dtype, rows, length, bias):
    x, weights, kept = given(rows, 1, dtype, bias)
    mine, before = [t.clone() for t in kept], [t._version for t in kept]
    expected = by_three_ops(x, weights, mine, length, True)
    with tfk.use_backend("cpu"):
        y = attention_step(x, *weights, *kept, length, True)
    assert torch.equal(y, expected) and y.shape == (rows, 1, 16)
    assert all(torch.equal(a, b) for a, b in zip(kept, mine, strict=True))
    assert all(t._version > version for t, version in zip(kept, before, strict=True))


@pytest.mark.parametrize("length", [1, 7, ROOM])
@torch.no_grad()
def test_a_growing_step_of_kept_ones_that_lie_apart(length):
    """Positions before heads, and parts of more heads, more positions and wider elements."""
    x, weights, kept = given(9, 1, torch.float32)
    layouts = (
        lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        lambda t: t.repeat(1, 2, 2, 2)[:, :HEADS, :ROOM, :WIDTH],
    )
    for lay in layouts:
        mine, theirs = [t.clone() for t in kept], [lay(t) for t in kept]
        expected = by_three_ops(x, weights, mine, length, True)
        y = attention_step(x, *weights, *theirs, length, True)
        assert torch.equal(y, expected)
        assert all(torch.equal(a, b) for a, b in zip(theirs, mine, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "beams"), [(4, 1), (12, 4), (15, 3)])
@pytest.mark.parametrize("hidden", [True, False])
@torch.no_grad()
def test_a_look_at_the_memory(dtype, rows, beams, hidden):
    x, weights, kept = given(rows, beams, dtype)
    keep = torch.arange(ROOM) < torch.arange(1, rows // beams + 1).view(-1, 1, 1, 1) if hidden else None
    before = [t.clone() for t in kept]
    expected = by_three_ops(x, weights, kept, ROOM, False, keep)
    with tfk.use_backend("cpu"):
        y = attention_step(x, *weights, *kept, ROOM, False, keep)
    assert torch.equal(y, expected)
    assert all(torch.equal(a, b) for a, b in zip(kept, before, strict=True))


@torch.no_grad()
def test_does_not_depend_on_threads():
    found = []
    for threads in (1, 2, 5):
        x, weights, kept = given(16, 1, torch.float32)
        with on_threads(threads):
            found.append(attention_step(x, *weights, *kept, ROOM, True))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_not_taken_where_the_projections_are_not_run_by_cpu():
    """And then nothing is written."""
    x, weights, kept = given(8, 1, torch.float32)
    before = [t.clone() for t in kept]
    needs_gradients = (weights[0].clone().requires_grad_(), *weights[1:])
    assert attention_step(x, *needs_gradients, *kept, 5, True) is None
    with torch.no_grad():
        assert attention_step(x, *needs_gradients, *kept, 5, True) is not None
        kept = [t.clone() for t in before]
        for backend in ("aten", "reference", "triton", "cuda"):
            with tfk.use_backend(backend):
                assert attention_step(x, *weights, *kept, 5, True) is None
        wide = [t.double() for t in (x, *weights, *kept)]
        assert attention_step(*wide, 5, True) is None
    assert all(torch.equal(a, b) for a, b in zip(kept, before, strict=True))


@torch.no_grad()
def test_a_watcher_is_told_of_every_attention():
    x, weights, kept = given(8, 1, torch.float32)
    with watching(lambda call, lse: None):
        assert attention_step(x, *weights, *kept, 5, True) is None
    assert attention_step(x, *weights, *kept, 5, True) is not None


@torch.no_grad()
def test_what_does_not_fit_is_refused():
    x, weights, (keys, values) = given(8, 1, torch.float32)
    bad = {
        "length must lie in .* got 21": (keys, values, ROOM + 1, True, None),
        "length must lie in .* got 0": (keys, values, 0, True, None),
        "values must have shape": (keys, values[:, :, :-1], 5, True, None),
        "x must have a row": (keys[:4], values[:4], 5, True, None),
        "several, for each of the 3 .*": (keys[:3], values[:3], 5, False, None),
        "x must have .* for each of the 0 of keys": (keys[:0], values[:0], 5, False, None),
        "keys and values must .* of x's dtype": (keys.double(), values, 5, True, None),
        "keys and values must be .* of x's dtype": (keys, values.double(), 5, True, None),
        "must lie side by side": (keys.mT.contiguous().mT, values, 5, True, None),
        "of a value must lie side by side": (keys, values.mT.contiguous().mT, 5, True, None),
        "in_weight must have shape": (keys[:, :2], values[:, :2], 5, True, None),
        "keep must broadcast": (keys, values, 5, True, torch.ones(8, 1, 1, 4, dtype=torch.bool)),
        "keep must broadcast .* got": (keys, values, 5, True, torch.ones(2, 1, 1, 5, dtype=torch.bool)),
        "keep must .* bool": (keys, values, 5, True, torch.ones(8, 1, 1, 5)),
    }
    before = keys.clone(), values.clone()
    for words, arguments in bad.items():
        with pytest.raises(RuntimeError, match=words):
            attention_step(x, *weights, *arguments)
    in_weight, in_bias, out_weight, out_bias = weights
    longer = torch.cat([in_bias, in_bias])
    for words, some in {
        "in_bias must have shape": (longer, out_weight, out_bias),
        "out_weight must have shape": (in_bias, out_weight[:, 1:].contiguous(), out_bias),
        "out_bias must have shape": (in_bias, out_weight, out_bias[1:]),
        "must have x's dtype": (in_bias, out_weight.double(), None),
        "out_bias must have x's dtype": (in_bias, out_weight, out_bias.double()),
    }.items():
        with pytest.raises(RuntimeError, match=words):
            torch.ops.tfm_kernels.attention_step_cpu(x, in_weight, *some, keys, values, 5, True, None)
    assert torch.equal(keys, before[0]) and torch.equal(values, before[1]), "a refused step writes nothing"


@pytest.mark.parametrize("grows", [True, False])
def test_opcheck(grows):
    x, weights, kept = given(8, 1, torch.float32)
    torch.library.opcheck(torch.ops.tfm_kernels.attention_step_cpu.default, (x, *weights, *kept, 5, grows, None))
