"""linear_cross_entropy: what a call means, on every backend that has it, and how the op lives in torch."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradgradcheck

import tfm_kernels as tfk
from tests.peak import growth
from tests.threads import on_threads
from tfm_kernels import _library
from tfm_kernels.testing import assert_contract
from tfm_kernels.testing.float64 import assert_same_in_float64

BACKENDS = ["reference", "aten", "cpu"]
EXACT = ["reference", "cpu"]  # where what is ignored is not read; PyTorch's own lets NaN through
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
REDUCTIONS = ["mean", "sum", "none"]
NAMES = ("x", "weight", "bias")


def call(shape=(9,), width=6, classes=11, dtype=torch.float64, ignored=3, seed=0, **options):
    """Arguments; every ``ignored``-th target is ignore_index."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, dtype=torch.float64, generator=g).to(dtype).requires_grad_()
    given = {"x": draw(*shape, width), "weight": draw(classes, width), "bias": draw(classes)}
    target = torch.randint(classes, shape, generator=g)
    if ignored:
        target.view(-1)[::ignored] = options.get("ignore_index", -100)
    return given | {"target": target} | options


def run(given, backend, names=NAMES, function=tfk.ops.linear_cross_entropy):
    """The loss, and gradients of it, times numbers that differ by row where it is not reduced."""
    options = {"backend": backend} if backend else {}
    loss = function(**given, **options)
    dloss = torch.randn(loss.shape, generator=torch.Generator().manual_seed(99), dtype=loss.dtype)
    return [loss.detach(), *torch.autograd.grad(loss, [given[name] for name in names], dloss)]


def pytorch(x, weight, target, bias=None, **options):
    logits = F.linear(x, weight, bias).reshape(target.numel(), -1)
    loss = F.cross_entropy(logits, target.reshape(-1), **options)
    return loss.view(target.shape) if options.get("reduction") == "none" else loss


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("ignore_index", [-100, 4, 11, 2**40])
def test_means_what_pytorchs_loss_means(backend, reduction, label_smoothing, ignore_index):
    """Also where ignore_index is a class, and where it is the number behind the last one."""
    options = {"reduction": reduction, "label_smoothing": label_smoothing, "ignore_index": ignore_index}
    for shape in ((9,), (2, 3, 5), (1,), ()):
        given = call(shape, ignored=3 * (shape not in ((1,), ())), **options)
        found, expected = run(given, backend), run(given, None, function=pytorch)
        for name, a, b in zip(("loss", *NAMES), found, expected, strict=True):
            assert a.shape == b.shape
            assert_same_in_float64(a, b, f"{name} of {shape}")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_contract(backend, dtype):
    """Tails of every tile: (rows, width, classes)."""
    for rows, width, classes in ((1, 1, 1), (2, 17, 3), (7, 300, 33), (33, 65, 1000), (70, 64, 130), (270, 40, 257)):
        given = call((rows,), width, classes, dtype, reduction="none", label_smoothing=0.2)
        given["weight"] = given["weight"].detach() / math.sqrt(width)
        assert_contract("linear_cross_entropy", given, backend)


def test_targets_may_lie_apart():
    given = call((40,), label_smoothing=0.1)
    apart = given | {"target": torch.stack([given["target"], torch.zeros(40, dtype=torch.int64)], 1)[:, 0]}
    assert not apart["target"].is_contiguous()
    assert all(torch.equal(a, b) for a, b in zip(run(given, "cpu"), run(apart, "cpu"), strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("width", [9, 10])
def test_more_rows_than_are_taken_at_a_time(dtype, reduction, width):
    """Blocks of 1024 of them add to the gradients, in the forward that saves them and in the backward that does not."""
    given = call((1100,), width, 21, dtype, ignored=0, reduction=reduction, label_smoothing=0.2)
    given["weight"] = given["weight"].detach() / 3
    given["x"] = given["x"].detach().repeat(1, 2)[:, :width]
    assert_contract("linear_cross_entropy", given, "cpu")


def test_saved_gradients_serve_those_whose_rows_weigh_the_same():
    """Of the operator itself; the losses of the public function that saves them always do."""
    given = call(dtype=torch.float32)
    leaves, dloss = [given[name] for name in NAMES], torch.arange(9.0)
    found = []
    for saves in (True, False):
        loss = torch.ops.tfm_kernels.linear_cross_entropy_fwd_cpu(*leaves, given["target"], -100, 0.1, *[saves] * 3)[0]
        found.append(torch.autograd.grad(loss, leaves, dloss))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_a_bias(backend):
    given = {name: t for name, t in call().items() if name != "bias"}
    for a, b in zip(run(given, backend, NAMES[:2]), run(given, None, NAMES[:2], pytorch), strict=True):
        assert_same_in_float64(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_leading_axes_are_rows(backend, dtype):
    """Bit for bit; the loss has at least float32."""
    given = call((2, 3, 5), dtype=dtype, reduction="none")
    flat = given | {"x": given["x"].detach().view(30, 6).requires_grad_(), "target": given["target"].view(30)}
    for a, b in zip(run(given, backend), run(flat, backend), strict=True):
        assert a.is_contiguous() and torch.equal(a.view(b.shape), b)
    loss = tfk.ops.linear_cross_entropy(**given, backend=backend)
    assert loss.shape == (2, 3, 5) and loss.dtype == torch.promote_types(dtype, torch.float32)
    one = given | {"x": given["x"][0, 0, 1], "target": given["target"][0, 0, 1]}
    for reduction in REDUCTIONS:
        assert_contract("linear_cross_entropy", one | {"reduction": reduction}, backend)


@pytest.mark.parametrize("backend", EXACT)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_what_is_ignored_is_not_read(backend, dtype, reduction):
    given = call((70,), 33, 130, dtype, reduction=reduction, label_smoothing=0.1)
    ignored = given["target"] == -100
    clean = run(given, backend)
    assert not clean[1][ignored].any()
    if reduction == "none":
        assert not clean[0][ignored].any()
    for number in (math.nan, math.inf, -math.inf):
        x = given["x"].detach().masked_fill(ignored.unsqueeze(1), number).requires_grad_()
        for a, b in zip(run(given | {"x": x}, backend), clean, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_all_rows_ignored(backend, dtype, label_smoothing):
    for reduction, loss in (("mean", math.nan), ("sum", 0.0), ("none", 0.0)):
        given = call(dtype=dtype, ignored=1, reduction=reduction, label_smoothing=label_smoothing)
        found, *grads = run(given, backend)
        torch.testing.assert_close(found, torch.full_like(found, loss), rtol=0, atol=0, equal_nan=True)
        assert not any(bool(grad.any()) for grad in grads)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_no_rows(backend, shape):
    for reduction, loss in (("mean", math.nan), ("sum", 0.0), ("none", None)):
        given = call(shape, dtype=torch.float32, ignored=0, reduction=reduction)
        found, dx, dweight, dbias = run(given, backend)
        assert found.shape == (shape if loss is None else ())
        torch.testing.assert_close(found, torch.full_like(found, loss or 0.0), rtol=0, atol=0, equal_nan=True)
        assert dx.shape == given["x"].shape and not dweight.any() and not dbias.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_width(backend):
    """Logits are the bias."""
    given = call((4,), width=0, ignored=0)
    for a, b in zip(run(given, backend), run(given, None, function=pytorch), strict=True):
        assert_same_in_float64(a, b)


@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize("number", [11, -1, -101, 2**40, -(2**63)])
def test_targets_that_are_no_class_are_refused(backend, number):
    given = call((2, 3))
    given["target"][1, 2] = number
    words = rf"linear_cross_entropy: target must lie in \[0, 11\) or be ignore_index -100, got {number} at \[1, 2\]$"
    for _ in range(2):  # also where the choice is known
        with pytest.raises(ValueError, match=words):
            tfk.ops.linear_cross_entropy(**given, backend=backend)
    others = torch.where(given["target"] == -100, 0, given["target"])
    assert tfk.ops.linear_cross_entropy(**given | {"target": others}, ignore_index=number, backend=backend) > 0
    one = given | {"x": given["x"][1, 2], "target": given["target"][1, 2]}
    with pytest.raises(ValueError, match=r"got -?\d+ at \[\]$"):
        tfk.ops.linear_cross_entropy(**one, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_huge_logits_do_not_overflow(backend, sign):
    """exp(1e4) would: the largest logit is subtracted first, and where all are far below 0, it is no 0."""
    given = call((70,), 33, 130, torch.float32, ignored=5, reduction="none", label_smoothing=0.1)
    given["x"] = (given["x"].detach() * 2e3).requires_grad_()
    given["bias"] = (given["bias"].detach() + sign * 1e4).requires_grad_()
    found = run(given, backend)
    assert all(bool(t.isfinite().all()) for t in found) and float(found[0].max()) > 1e4
    assert_contract("linear_cross_entropy", given, backend)


@pytest.mark.parametrize("backend", EXACT)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_in_its_row(backend, dtype, number):
    given = call((70,), 33, 130, dtype, ignored=0, reduction="none")
    clean_loss, clean_dx, *_ = run(given, backend)
    x = given["x"].detach().clone()
    x[40, 7] = number
    loss, dx, *_ = run(given | {"x": x.requires_grad_()}, backend)
    others = torch.arange(70) != 40
    assert torch.equal(loss[others], clean_loss[others]) and torch.equal(dx[others], clean_dx[others])
    assert bool(dx[40].isnan().all())
    assert bool(loss[40].isnan() if math.isnan(number) else not loss[40].isfinite())


@pytest.mark.parametrize("backend", EXACT)
def test_classes_that_cannot_be(backend):
    """A bias of -inf takes a class out, as in PyTorch; the last tile may hold nothing else."""
    given = call((9,), 6, 200)
    bias = given["bias"].detach().clone()
    bias[190:] = -math.inf
    bias[:3] = -math.inf
    given |= {"bias": bias.requires_grad_(), "target": given["target"].clamp(max=150)}
    given["target"] = torch.where(given["target"] == -100, -100, given["target"].clamp(min=5))
    for a, b in zip(run(given, backend), run(given, None, function=pytorch), strict=True):
        assert_same_in_float64(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(3, 70, 530), (40, 33, 1100), (300, 64, 130), (700, 20, 65)], ids=str)
def test_does_not_depend_on_threads(dtype, size):
    rows, width, classes = size
    given, found = call((rows,), width, classes, dtype, label_smoothing=0.1), []
    for threads in (1, 2, 5):
        with on_threads(threads):
            found += [run(given, "cpu"), run(given, "cpu")]
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("backend", ["cpu"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_subset_of_gradients(backend, dtype):
    """What is not asked for changes nothing."""
    given = call((70,), 33, 130, dtype)
    everything = dict(zip(NAMES, run(given, backend)[1:], strict=True))
    for count in (1, 2):
        for names in itertools.combinations(NAMES, count):
            some = {key: t.detach() if key in NAMES and key not in names else t for key, t in given.items()}
            for name, t in zip(names, run(some, backend, names)[1:], strict=True):
                assert torch.equal(t, everything[name]), f"{name} of {names}"


@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_compiles_whole(backend, reduction):
    torch.compiler.reset()  # each call has options of its own, and eight graphs are the most
    compiled = torch.compile(tfk.ops.linear_cross_entropy, fullgraph=True, backend="eager")
    given = call((3, 5), reduction=reduction, label_smoothing=0.1)
    for a, b in zip(run(given, backend, function=compiled), run(given, backend), strict=True):
        assert_same_in_float64(a, b)


def test_an_exported_program_can_train():
    given = call((9,))

    class Head(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(given["weight"].detach().clone())

        def forward(self, x, target):
            return tfk.ops.linear_cross_entropy(x, self.weight, target, backend="cpu")

    head, arguments = Head(), (given["x"].detach(), given["target"])
    exported = torch.export.export(head, arguments).module()
    for module in (head, exported):
        module(*arguments).backward()
    assert_same_in_float64(dict(exported.named_parameters())["weight"].grad, head.weight.grad)


def test_double_backward_works_or_refuses():
    given = call((4,), 2, 5, reduction="sum", label_smoothing=0.1)
    leaves = tuple(given[name] for name in NAMES)
    for backend in ("reference", "aten"):
        assert gradgradcheck(
            lambda x, w, b, k=backend: tfk.ops.linear_cross_entropy(
                x, w, given["target"], b, label_smoothing=0.1, backend=k
            ),
            leaves,
        )
    loss = tfk.ops.linear_cross_entropy(**given, backend="cpu")
    (dx,) = torch.autograd.grad(loss, given["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="linear_cross_entropy: the cpu backend is differentiable once"):
        dx.sum().backward()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_weight_that_is_the_embedding_too(backend):
    """Its gradient is the sum of both uses."""
    ids = torch.tensor([[1, 4, 4, 0], [7, 2, 1, 9]])
    found = []
    for function in (lambda *t: tfk.ops.linear_cross_entropy(*t, backend=backend), pytorch):
        weight = call((1,))["weight"].detach().requires_grad_()
        loss = function(F.embedding(ids, weight).tanh(), weight, ids.roll(-1, 1))
        found.append((loss.detach(), *torch.autograd.grad(loss, weight)))
    for a, b in zip(*found, strict=True):
        assert_same_in_float64(a, b)


def test_the_backend_asked_for_is_used():
    given = call((9,), dtype=torch.float32)
    for backend in BACKENDS:
        named = run(given, backend)
        with tfk.use_backend(backend):
            assert f"-> {backend} (use_backend() asks for it)" in tfk.explain("linear_cross_entropy", **given)
            for a, b in zip(run(given, None), named, strict=True):
                assert torch.equal(a, b)
    assert "-> reference" not in tfk.explain("linear_cross_entropy", **given)
    with pytest.raises(tfk.BackendError, match="linear_cross_entropy: backend 'triton' cannot run this call"):
        tfk.ops.linear_cross_entropy(**given, backend="triton")


@pytest.mark.parametrize(("nearest", "few"), [(_library.XEON, 512), (_library.ZEN3, 1024), (_library.ZEN4, 1024)])
@pytest.mark.parametrize("f16_products", [False, True])
def test_few_classes_are_left_to_pytorch(f16_products, nearest, few, monkeypatch):
    """But in 16 bits that PyTorch emulates."""
    monkeypatch.setattr(_library, "f16_products", f16_products)
    monkeypatch.setattr(_library, "bf16_tiles", tiles := nearest != _library.ZEN3)
    monkeypatch.setattr(_library, "nearest", nearest)
    for dtype, training, rows, least in (
        (torch.float32, False, 3, 65),
        (torch.float32, True, 255, 2048),
        (torch.float32, True, 256, 512),
        (torch.bfloat16, False, 3, 65 if tiles else 1),
        (torch.bfloat16, True, few, 1),
        (torch.bfloat16, True, few + 1, 256 if tiles else 1),
        (torch.float16, False, 3, 1),
        (torch.float16, True, few, 1),
        (torch.float16, True, few + 1, 256 if f16_products else 1),
        (torch.float64, False, 3, None),
    ):
        for classes in {least or 3, (least or 3000) - 1} - {0}:
            x, weight = torch.ones(rows, 8, dtype=dtype), torch.ones(classes, 8, dtype=dtype)
            target = torch.zeros(rows, dtype=torch.int64)
            told = tfk.explain("linear_cross_entropy", x.requires_grad_(training), weight, target)
            expected = "cpu" if least is not None and classes >= least else "aten"
            assert f"-> {expected} (" in told, (dtype, training, rows, classes)


def test_what_is_saved_for_the_backward_has_no_logits():
    saved = []
    given = call((64,), 8, 160, torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        tfk.ops.linear_cross_entropy(**given, backend="cpu")
    assert saved and max(shape.numel() for shape in saved) == 160 * 8


PEAK = """
rows, width, classes = 12000, 32, 20000
weight = torch.randn(classes, width).requires_grad_({grad})
x, target = torch.randn(rows, width).requires_grad_({grad}), torch.randint(classes, (rows,))
def run(x, target):
    loss = tfk.ops.linear_cross_entropy(x, weight, target, reduction="{reduction}", backend="{backend}")
    if {grad}:
        torch.autograd.grad(loss.sum(), (x, weight))
run(x[:64], target[:64])
"""


@pytest.mark.parametrize("grad, reduction", [(False, "mean"), (True, "mean"), (True, "none")])
def test_memory_does_not_grow_with_the_logits(grad, reduction):
    """The logits would take 916 MiB; x takes 1.5 and the weight 2.4, a block of logits and its gradient 64 each."""
    before = PEAK.format(grad=grad, reduction=reduction, backend="cpu")
    assert growth(before, "run(x, target)") < (160 if grad else 20)


def test_memory_that_grows_is_seen():
    """However much this process has held itself."""
    torch.ones(2**27)
    assert growth(PEAK.format(grad=False, reduction="mean", backend="aten"), "run(x[:2500], target[:2500])") > 180
