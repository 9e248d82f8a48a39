"""LinearCrossEntropyLoss: cross entropy of linear, torch.nn's option by option where torch has it, and its life."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tfm_kernels as tfk
from tfm_kernels.nn import loss as module_file
from tfm_kernels.testing.float64 import assert_same_in_float64

from .test_honesty import LoRA
from .twins import BACKENDS, assert_same, label, pairwise, randn, results

E, V = 12, 7
TORCH_HAS_IT = hasattr(nn, "LinearCrossEntropyLoss")
torchs = pytest.mark.skipif(not TORCH_HAS_IT, reason="torch.nn has LinearCrossEntropyLoss since 2.13")


class Composed(nn.Module):
    """The loss as its formula says it, on the parameters of ours."""

    def __init__(self, loss):
        super().__init__()
        self.linear, self.num_classes, self.out_features = loss.linear, loss.num_classes, loss.out_features
        self.reduction, self.label_smoothing = loss.reduction, loss.label_smoothing
        self.ignore_index = -100 if loss.ignore_index is None else loss.ignore_index
        self.register_buffer("weight", loss.weight)

    def forward(self, input, target):
        batch, places = input.shape[:-1], self.out_features
        logits = self.linear(input).reshape(-1, self.num_classes, *places)
        target = target.reshape(-1, *target.shape[len(batch) :])
        options = {name: getattr(self, name) for name in ("ignore_index", "label_smoothing", "reduction")}
        loss = F.cross_entropy(logits, target, self.weight, **options)
        return loss.reshape((*batch, *places)) if self.reduction == "none" else loss


class Aimed(nn.Module):
    """A loss and its target, so that the input is all that is given."""

    def __init__(self, loss, target):
        super().__init__()
        self.loss, self.target = loss, target

    def forward(self, input):
        target = self.target if self.target.dtype == torch.int64 else self.target.to(input.dtype)
        return self.loss(input, target)


def numbers(*shape, ignored=None):
    target = torch.randint(V, shape, generator=torch.Generator().manual_seed(5))
    if ignored is not None and shape:
        target[0] = ignored
    return target


def made(case):
    """Ours by the options in ``case``, these options, and input and target for it, float64."""
    (kind, ignore_index), (batch, places) = case["target"], case["shape"]
    options = {name: case[name] for name in ("bias", "reduction", "label_smoothing", "dtype")}
    options.update(out_features=places, ignore_index=ignore_index)
    options["weight"] = randn(V, dtype=case["dtype"]).exp() if case["weighted"] else None
    ours = tfk.nn.LinearCrossEntropyLoss(E, V, **options, backend=case["backend"])
    for seed, parameter in enumerate(ours.parameters()):
        parameter.data.copy_(randn(*parameter.shape, seed=100 + seed) * 0.3)
    if kind == "numbers":
        target = numbers(*batch, *places, ignored=-100 if ignore_index is None else ignore_index)
    else:
        target = randn(*batch, V, *places, seed=3).softmax(len(batch))
    return ours, options, randn(*batch, E), target


CHOICES = {
    "backend": BACKENDS,
    "dtype": [torch.float64, torch.float32],
    "bias": [False, True],
    "reduction": ["mean", "sum", "none"],
    "label_smoothing": [0.0, 0.1, 1.0],
}
NUMBERS = [("numbers", ignored) for ignored in (None, 2, -1, V + 5)]
TARGETS = [*NUMBERS, ("probabilities", None)]
BATCHES = [(), (5,), (2, 3), (2, 1, 3)]
PLACES = [((5,), (3,)), ((5,), (2, 3)), ((2, 3), (3,))]  # behind a batch
PLAIN = pairwise(**CHOICES, weighted=[False], target=NUMBERS, shape=[(batch, ()) for batch in BATCHES])
OTHER = pairwise(
    **CHOICES, weighted=[False, True], target=TARGETS, shape=[*((batch, ()) for batch in BATCHES), *PLACES]
)
TORCHS = pairwise(**CHOICES, weighted=[False, True], target=TARGETS, shape=[((), ()), ((5,), ()), *PLACES[:2]])


@pytest.mark.parametrize("case", PLAIN + OTHER, ids=label)
def test_formula(case):
    ours, _, x, target = made(case)
    assert_same(Aimed(Composed(ours), target), Aimed(ours, target), [x])


@torchs
@pytest.mark.parametrize("case", TORCHS, ids=label)
def test_is_torchs(case):
    ours, options, x, target = made(case)
    theirs = nn.LinearCrossEntropyLoss(E, V, **options)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    assert list(theirs.state_dict()) == list(ours.state_dict())
    assert repr(theirs) == repr(ours)
    assert_same(Aimed(theirs, target), Aimed(ours, target), [x])


@torchs
@pytest.mark.parametrize("bias", [False, True])
def test_starts_as_torchs(bias):
    """Same numbers drawn, same generator afterwards, in an order of keys that both load."""
    states = []
    for room in (nn, tfk.nn):
        torch.manual_seed(1)
        loss = room.LinearCrossEntropyLoss(E, V, out_features=(3,), bias=bias, weight=torch.ones(V))
        states.append((list(loss.state_dict()), torch.random.get_rng_state()))
        states[-1] += tuple(loss.state_dict().values())
    (names, after, *theirs), (found, then, *ours) = states
    assert names == found == ["weight", "linear.weight"] + ["linear.bias"] * bias
    assert torch.equal(after, then) and all(map(torch.equal, theirs, ours))


def test_state_has_nothing_of_ours():
    plain = tfk.nn.LinearCrossEntropyLoss(E, V, backend="cpu")
    assert list(plain.state_dict()) == ["linear.weight"]
    assert dict(plain.named_buffers()) == {} and plain.weight is None
    assert [name for name, _ in plain.named_modules()] == ["", "linear"]


@torchs
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_options_change_nothing(backend, reduction):
    """torch computes in chunks then, and the numbers are the same."""
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=2, allow_retain_graph=True)
    given = {"reduction": reduction, "dtype": torch.float64}
    theirs = nn.LinearCrossEntropyLoss(E, V, options=options, **given)
    ours = tfk.nn.LinearCrossEntropyLoss(E, V, options=options, backend=backend, **given)
    ours.load_state_dict(theirs.state_dict())
    assert ours.options is options and repr(theirs) == repr(ours)
    assert_same(Aimed(theirs, numbers(5)), Aimed(ours, numbers(5)), [randn(5, E)])


@pytest.fixture
def fused(monkeypatch):
    """The calls of ops.linear_cross_entropy."""
    calls, original = [], tfk.ops.linear_cross_entropy

    def linear_cross_entropy(*arguments, **options):
        calls.append(options)
        return original(*arguments, **options)

    monkeypatch.setattr(module_file.ops, "linear_cross_entropy", linear_cross_entropy)
    return calls


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_fused(fused, backend):
    """Class numbers; all else calls the linear layer, on whatever backend, as other modules do."""
    x, loss = randn(5, E), lambda **o: tfk.nn.LinearCrossEntropyLoss(E, V, dtype=torch.float64, backend=backend, **o)
    loss(bias=True, label_smoothing=0.1, ignore_index=3, reduction="none")(x, numbers(5))
    assert fused == [{"ignore_index": 3, "label_smoothing": 0.1, "reduction": "none", "backend": backend}]
    loss(weight=torch.ones(V).double())(x, numbers(5))
    loss(out_features=(3,))(x, numbers(5, 3))
    loss()(x, randn(5, V).softmax(1))
    assert len(fused) == 1


def test_named_backend_runs_or_says_why():
    loss = tfk.nn.LinearCrossEntropyLoss(E, V, backend="cuda")
    with pytest.raises(tfk.BackendError, match="linear_cross_entropy"):
        loss(randn(5, E, dtype=torch.float32), numbers(5))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_loss_has_the_dtype_of_the_input(backend, dtype, reduction):
    loss = tfk.nn.LinearCrossEntropyLoss(E, V, dtype=dtype, reduction=reduction, backend=backend)
    x = randn(5, E, dtype=dtype).requires_grad_()
    found, expected = loss(x, numbers(5)), Composed(loss)(x, numbers(5))
    assert found.dtype == expected.dtype == dtype
    exact = Composed(copy.deepcopy(loss).double())(x.double(), numbers(5))
    assert (found - exact).norm() <= (expected - exact).norm() + 2 * torch.finfo(dtype).eps * exact.norm()
    found.sum().backward()
    assert x.grad.dtype == loss.linear.weight.grad.dtype == dtype


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("given", [torch.float32, "low", torch.float64])
@pytest.mark.parametrize("more", [{}, {"weight": torch.arange(1.0, V + 1)}, {"bias": True, "reduction": "none"}])
def test_autocast_is_torchs(backend, low, given, more):
    loss = tfk.nn.LinearCrossEntropyLoss(E, V, **more, backend=backend)
    x = randn(6, E, dtype=low if given == "low" else given)
    if given == torch.float64:  # never cast
        loss.double()
    with torch.autocast("cpu", dtype=low):
        x.requires_grad_()
        found, expected = loss(x, numbers(6)), Composed(loss)(x, numbers(6))
    assert found.dtype == expected.dtype == (torch.float64 if given == torch.float64 else torch.float32)
    exact = Composed(copy.deepcopy(loss).double())(x.double(), numbers(6))
    eps = torch.finfo(torch.float64 if given == torch.float64 else low).eps  # of the logits, which are below 4
    assert (found - exact).abs().max() <= 8 * eps
    found.sum().backward()
    assert x.grad.dtype == x.dtype and loss.linear.weight.grad.dtype == loss.linear.weight.dtype


class Doubled(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("batch", [(), (5,), (2, 3)])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_children_of_other_classes_are_called(fused, backend, batch, reduction):
    loss = tfk.nn.LinearCrossEntropyLoss(E, V, reduction=reduction, dtype=torch.float64, backend=backend)
    x, target = randn(*batch, E).requires_grad_(), numbers(*batch)
    for child in (Doubled(E, V, dtype=torch.float64), LoRA(loss.linear)):
        loss.linear = child
        y = loss(x, target)
        assert_same_in_float64(y, Composed(loss)(x, target))
        y.sum().backward()
        assert all(parameter.grad.any() for parameter in child.parameters())
        assert str(E) in repr(loss)
    assert not fused


@pytest.mark.parametrize("hook", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_hooks_of_the_linear_layer_run(hook):
    loss = tfk.nn.LinearCrossEntropyLoss(E, V, dtype=torch.float64)
    x, seen = randn(5, E).requires_grad_(), []
    expected = loss(x, numbers(5))
    getattr(loss.linear, f"register_{hook}_hook")(lambda *args: seen.append(1))
    y = loss(x, numbers(5))
    y.backward()
    assert seen == [1]
    assert_same_in_float64(y, expected)


def test_a_forward_of_the_instance_and_a_parametrized_weight_are_used(fused):
    loss, x = tfk.nn.LinearCrossEntropyLoss(E, V, dtype=torch.float64), randn(5, E)
    forward = loss.linear.forward
    loss.linear.forward = lambda x: 2 * forward(x)
    assert_same_in_float64(loss(x, numbers(5)), F.cross_entropy(2 * forward(x), numbers(5)))
    del loss.linear.forward
    nn.utils.parametrizations.weight_norm(loss.linear)
    loss(x, numbers(5)).backward()
    assert loss.linear.parametrizations.weight.original0.grad.any()
    assert not fused


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tied_weight_learns_from_both_its_uses(fused, backend):
    embedding = tfk.nn.TokenEmbedding(V, E, dtype=torch.float64)
    loss = tfk.nn.LinearCrossEntropyLoss(E, V, dtype=torch.float64, backend=backend)
    loss.linear.weight = embedding.weight
    ids, target = numbers(2, 3), numbers(2, 3, ignored=-100)
    loss(embedding(ids), target).backward()
    found, embedding.weight.grad = embedding.weight.grad, None
    F.cross_entropy(F.linear(embedding(ids), embedding.weight).flatten(0, 1), target.flatten()).backward()
    assert_same_in_float64(found, embedding.weight.grad)
    assert len(fused) == 1
    loss.linear.weight = nn.Parameter(randn(V + 1, E))  # a vocabulary that was padded is another softmax
    with pytest.raises(ValueError, match=r"linear.weight must have shape \(7, 12\) to match num_classes and in_feat"):
        loss(embedding(ids), target)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("more", [{}, {"weight": torch.ones(V)}])
@pytest.mark.parametrize("shape", [(0,), (2, 0), (3,), (2, 3)])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_where_nothing_counts(backend, more, shape, reduction):
    """No rows, or all of them ignored: NaN for the mean, 0 for the rest."""
    loss = tfk.nn.LinearCrossEntropyLoss(E, V, reduction=reduction, ignore_index=2, backend=backend, **more)
    found = loss(randn(*shape, E, dtype=torch.float32), torch.full(shape, 2))
    assert found.shape == (shape if reduction == "none" else ())
    assert torch.isnan(found).all() if reduction == "mean" else not found.any()


KINDS = {
    "plain": {},
    "weighted": {"weight": torch.arange(1.0, V + 1)},
    "places": {"out_features": (3,), "bias": True},
}


def loss_and_inputs(kind, **options):
    torch.manual_seed(0)
    loss = tfk.nn.LinearCrossEntropyLoss(E, V, **KINDS[kind], **options)
    return loss, randn(2, 3, E, dtype=torch.float32), numbers(2, 3, *loss.out_features)


def in_float64(kind, backend):
    loss, x, target = loss_and_inputs(kind, backend=backend)
    return loss.double(), x.double(), target


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_copied_pickled_and_saved(kind, backend):
    loss, x, target = loss_and_inputs(kind, backend=backend)
    expected = loss(x, target)
    file = io.BytesIO()
    torch.save(loss, file)
    file.seek(0)
    for again in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss)), torch.load(file, weights_only=False)):
        assert torch.equal(again(x, target), expected) and again.backend == backend
        again.linear.weight.data.zero_()  # the copy's own weights count, and only there
        assert not torch.equal(again(x, target), expected)
    assert torch.equal(loss(x, target), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_meta_device(kind):
    loss, x, target = loss_and_inputs(kind, device="meta")
    assert loss.linear.weight.is_meta
    loss.weight = None if loss.weight is None else loss.weight.to("meta")
    y = loss(x.to("meta"), target.to("meta"))
    assert y.is_meta and y.shape == ()
    filled, (again, *_) = loss.to_empty(device="cpu"), loss_and_inputs(kind)
    filled.load_state_dict(again.state_dict())
    assert torch.equal(filled(x, target), again(x, target))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_without_a_graph_break(kind, compiler, backend):
    loss, x, target = in_float64(kind, backend)
    expected = results(Aimed(loss, target), [x])
    torch._dynamo.reset()
    found = results(torch.compile(Aimed(loss, target), fullgraph=True, backend=compiler), [x])
    for name, tensor in found.items():
        assert_same_in_float64(tensor, expected[name.replace("_orig_mod.", "")], name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_functional_call_uses_the_given_parameters(backend):
    loss, x, target = in_float64("plain", backend)
    zeros = {"linear.weight": torch.zeros(V, E, dtype=torch.float64)}
    found = torch.func.functional_call(loss, zeros, (x, target))
    assert_same_in_float64(found, torch.tensor(V, dtype=torch.float64).log())


def test_options_may_be_changed_later():
    """As torch reads them: at each call."""
    loss, x, target = in_float64("plain", "aten")
    loss.reduction, loss.label_smoothing, loss.ignore_index = "none", 0.2, int(target[0, 0])
    expected = F.cross_entropy(loss.linear(x).transpose(1, 2), target, reduction="none", label_smoothing=0.2,
                               ignore_index=int(target[0, 0]))  # fmt: skip
    assert_same_in_float64(loss(x, target), expected)


def test_a_target_that_is_no_class_is_refused():
    loss, x, target = loss_and_inputs("plain", backend="aten")
    target[1, 2] = V
    with pytest.raises(ValueError, match=r"target must lie in \[0, 7\) or be ignore_index -100, got 7 at \[1, 2\]"):
        loss(x, target)
