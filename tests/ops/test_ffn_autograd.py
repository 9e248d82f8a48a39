"""ffn's gradients, and how the op lives in torch: compiled, exported, repeated, recomputed, in little memory."""

import itertools

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import tfm_kernels as tfk
from tests.peak import growth
from tests.threads import on_threads
from tfm_kernels.testing import assert_contract

BACKENDS = ["reference", "aten", "cpu"]
ACTIVATIONS = ["relu", "gelu", "gelu_tanh", "silu"]
SEED = torch.tensor(11)
FWD, BWD = torch.ops.tfm_kernels.ffn_fwd_cpu.default, torch.ops.tfm_kernels.ffn_bwd_cpu.default


def draw(*shape, seed, dtype):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def leaves(rows=5, width=6, hidden=11, out=4, dtype=torch.float64, gated=False):
    shapes = {"x": (rows, width), "w1": (hidden, width), "b1": (hidden,), "w2": (out, hidden), "b2": (out,)}
    shapes |= {"gate": (hidden, width)} if gated else {}
    return {name: draw(*s, seed=i, dtype=dtype).requires_grad_() for i, (name, s) in enumerate(shapes.items())}


def run(given, names=None, **options):
    """y, and the gradients of the leaves in ``names``."""
    y = tfk.ops.ffn(**given, **options)
    dy = draw(*y.shape, seed=99, dtype=y.dtype)
    return [y, *torch.autograd.grad(y, [given[name] for name in names or given], dy)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("activation", "gated", "p", "recompute"),
    [
        ("relu", False, 0.0, True),
        ("gelu", True, 0.4, False),
        ("gelu_tanh", False, 0.4, True),
        ("silu", True, 0.0, False),
    ],
)
def test_gradcheck(backend, activation, gated, p, recompute):
    given = leaves(gated=gated)
    options = {"activation": activation, "dropout_p": p, "seed": SEED, "recompute": recompute, "backend": backend}
    assert gradcheck(
        lambda *t: tfk.ops.ffn(**dict(zip(given, t, strict=True)), **options), tuple(given.values()), nondet_tol=0.0
    )


def test_double_backward_works_or_refuses():
    given = leaves(rows=2, width=3, hidden=4, out=2)
    for backend in ("reference", "aten"):
        assert gradgradcheck(
            lambda *t, b=backend: tfk.ops.ffn(*t, activation="silu", backend=b), tuple(given.values()), nondet_tol=0.0
        )
    y = tfk.ops.ffn(**given, backend="cpu")
    (dx,) = torch.autograd.grad(y.square().sum(), given["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="ffn: the cpu backend is differentiable once"):
        dx.sum().backward()


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_any_subset_of_gradients(gated, dtype):
    """What is not asked for costs nothing and changes nothing."""
    given = leaves(rows=33, width=20, hidden=70, out=18, dtype=dtype, gated=gated)
    everything = dict(zip(["y", *given], run(given, activation="gelu", backend="cpu"), strict=True))
    for count in (1, 2):
        for names in itertools.combinations(given, count):
            some = {name: t if name in names else t.detach() for name, t in given.items()}
            found = run(some, names, activation="gelu", backend="cpu")
            for name, t in zip(["y", *names], found, strict=True):
                assert torch.equal(t, everything[name]), f"{name} of {names}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("gated", [False, True])
def test_recomputed_is_saved_bit_for_bit(dtype, gated):
    for size in ((5, 7, 13, 9), (70, 130, 150, 40), (20, 1100, 40, 24)):
        given = leaves(*size, dtype=dtype, gated=gated)
        options = {"activation": "gelu_tanh", "dropout_p": 0.2, "seed": SEED, "backend": "cpu"}
        for a, b in zip(run(given, **options), run(given, **options, recompute=True), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("rows", "dtype"), [(700, torch.float32), (1500, torch.float32), (1500, torch.bfloat16)], ids=str
)
def test_gradients_do_not_depend_on_threads(rows, dtype, gated):
    """Rows of two strips, and of three, which are one block or two."""
    given = leaves(rows, 40, 300, 24, dtype=dtype, gated=gated)
    found = []
    for threads in (1, 2, 3, 7):
        with on_threads(threads):
            found.append(run(given, activation="silu", dropout_p=0.1, seed=SEED, backend="cpu"))
            again = run(given, activation="silu", dropout_p=0.1, seed=SEED, backend="cpu")
            assert all(torch.equal(a, b) for a, b in zip(found[-1], again, strict=True)), threads
    for other in found[1:]:
        torch.testing.assert_close(other[0], found[0][0])  # y's sum over features may be split
        assert all(torch.equal(a, b) for a, b in zip(other[1:], found[0][1:], strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("recompute", [False, True])
def test_rows_of_every_block_may_lie_apart(dtype, recompute):
    """1100 of them are two blocks; x and the gradient of y are parts of wider rows."""
    given, dy, found = leaves(1100, 24, 40, 16, dtype=dtype), draw(1100, 16, seed=9, dtype=dtype), []
    for lay in (lambda t: t, lambda t: torch.cat([t, t], 1)[:, : t.shape[1]]):
        args = given | {"x": lay(given["x"].detach()).requires_grad_()}
        y = tfk.ops.ffn(**args, activation="relu", recompute=recompute, backend="cpu")
        found.append(torch.autograd.grad(y, [t for t in args.values() if t is not None], lay(dy)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("out", [1, 37, 300])
def test_the_sum_over_rows_does_not_depend_on_threads(out, dtype):
    """db2, also of one number, is exact to a rounding and the same on any number of threads and for any strides."""
    dy = draw(40000, out, seed=1, dtype=dtype)
    x, w1, w2 = (draw(*sizes, seed=2, dtype=dtype) for sizes in ((40000, 2), (3, 2), (out, 3)))
    given = x, w1, None, w2, None, torch.empty(0, dtype=dtype), 0, 0.0, None, None
    needs = False, False, False, False, True, False
    found = []
    for threads in (1, 2, 3):
        with on_threads(threads):
            found.append(BWD(dy, *given, *needs)[4])
            found.append(BWD(dy.T.contiguous().T, *given, *needs)[4])
    assert all(torch.equal(found[0], again) for again in found)
    exact = dy.double().sum(0)
    limit = torch.finfo(dtype).eps * exact.abs() + 1e-7 * dy.double().abs().sum(0)
    assert ((found[0].double() - exact).abs() <= limit).all()


def test_a_few_rows_on_many_threads():
    """Fewer row tiles than threads: the hidden features are split, their shares joined."""
    for rows in (20, 40):  # the first by the kernels for few rows
        given = leaves(rows, 24, 530, 70, dtype=torch.float32)
        for threads in (2, 5, 16):
            with on_threads(threads):
                assert_contract("ffn", given, "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("save_preact", [False, True])
def test_opcheck(dtype, gated, save_preact):
    given = {name: t.detach() for name, t in leaves(rows=7, dtype=dtype, gated=gated).items()}
    x, w1, b1, w2, b2, gate = *list(given.values())[:5], given.get("gate")
    rows, dy = torch.arange(7) * 3, draw(7, 4, seed=9, dtype=dtype)
    arguments = (x, w1, b1, w2, b2, gate, 1, 0.25, SEED, rows, save_preact)
    tracked = tuple(a.clone().requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a
                    for a in arguments)  # fmt: skip
    torch.library.opcheck(FWD, tracked)
    _, preact = FWD(*arguments)
    assert preact.shape == ((7, 22 if gated else 11) if save_preact else (0,))
    for needs in ((True,) * 5 + (gated,), (False, True, False, True, False, False)):
        torch.library.opcheck(BWD, (dy, x, w1, b1, w2, gate, preact, 1, 0.25, SEED, rows, *needs))


def test_a_direct_call_is_checked():
    x, w1, w2 = torch.randn(3, 4), torch.randn(5, 4), torch.randn(4, 5)
    for bad in (
        (x, torch.randn(5, 3), None, w2, None, None, 0, 0.0, None, None, False),
        (x, w1, None, torch.randn(4, 6), None, None, 0, 0.0, None, None, False),
        (x, w1, torch.randn(4), w2, None, None, 0, 0.0, None, None, False),
        (x, w1, None, w2, torch.randn(5), None, 0, 0.0, None, None, False),
        (x, w1, None, w2, None, torch.randn(5, 5), 0, 0.0, None, None, False),
        (x, w1.double(), None, w2, None, None, 0, 0.0, None, None, False),
        (x, w1, None, w2, None, None, 4, 0.0, None, None, False),
        (x, w1, None, w2, None, None, -1, 0.0, None, None, False),
        (x, w1, None, w2, None, None, 0, 0.5, None, None, False),
        (x, w1, None, w2, None, None, 0, 0.5, SEED, torch.arange(2), False),
        (x[0], w1, None, w2, None, None, 0, 0.0, None, None, False),
    ):
        with pytest.raises(RuntimeError, match="ffn_fwd_cpu"):
            FWD(*bad)
    for dy, preact, needs in (
        (torch.randn(3, 5), torch.empty(0), (True,) * 5 + (False,)),
        (torch.randn(3, 4), torch.empty(3, 6), (True,) * 5 + (False,)),
        (torch.randn(3, 4), torch.empty(0), (True,) * 6),
    ):
        with pytest.raises(RuntimeError, match="ffn_bwd_cpu"):
            BWD(dy, x, w1, None, w2, None, preact, 0, 0.0, None, None, *needs)


@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize("recompute", [False, True])
def test_compiles_whole(backend, recompute):
    given = leaves(9, 8, 24, 8, dtype=torch.float32, gated=True)
    options = {"activation": "gelu", "dropout_p": 0.3, "seed": SEED, "recompute": recompute, "backend": backend}
    compiled = torch.compile(lambda kw: tfk.ops.ffn(**kw, **options), fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (9, 17):
        given["x"] = draw(rows, 8, seed=rows, dtype=torch.float32).requires_grad_()
        y = compiled(given)
        found = [y, *torch.autograd.grad(y, list(given.values()), draw(*y.shape, seed=99, dtype=y.dtype))]
        for a, b in zip(found, run(given, **options), strict=True):
            torch.testing.assert_close(a, b)


def test_an_exported_program_can_train():
    given = leaves(9, 8, 24, 8, dtype=torch.float32)

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w1, self.w2 = (torch.nn.Parameter(given[name].detach().clone()) for name in ("w1", "w2"))

        def forward(self, x):
            return tfk.ops.ffn(x, self.w1, None, self.w2, None, activation="gelu", backend="cpu")

    block = Block()
    exported = torch.export.export(block, (given["x"].detach(),)).module()
    for module in (block, exported):
        module(given["x"].detach()).square().sum().backward()
    trained = dict(exported.named_parameters())
    for name, parameter in block.named_parameters():
        torch.testing.assert_close(trained[name].grad, parameter.grad)


def test_recompute_saves_no_hidden_tensor():
    for recompute, expected in ((False, 1), (True, 0)):
        saved = []
        given = leaves(64, 8, 160, 8, dtype=torch.float32)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
            tfk.ops.ffn(**given, recompute=recompute, backend="cpu")
        assert saved.count((64, 160)) == expected


PEAK = """
rows, width, hidden = 30000, 64, 2048
x, w1, w2 = torch.randn(rows, width), torch.randn(hidden, width), torch.randn(width, hidden)
run = lambda x: tfk.ops.ffn(x, w1, None, w2, None, activation="gelu", backend="cpu")
if {grad}:
    run = lambda x: tfk.ops.ffn(x.requires_grad_(), w1, None, w2, None, recompute=True, backend="cpu").sum().backward()
run(torch.randn(700, width))
"""


@pytest.mark.parametrize("grad", [False, True])
def test_memory_does_not_grow_with_the_hidden_tensor(grad):
    """The hidden activation would take 234 MiB; y takes 7.3, dx and dy as much again."""
    assert growth(PEAK.format(grad=grad), "run(x)") < (60 if grad else 20)
